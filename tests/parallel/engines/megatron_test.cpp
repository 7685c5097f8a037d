// What the megatron engine says before it runs: grids, cuts, memory, bytes, bubble, and what it refuses.

#include <algorithm>

#include "cli/experiment.h"
#include "tests/support/catch.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

using Overrides = std::vector<std::string>;

std::unique_ptr<Experiment> planned(int ranks, Overrides overrides, const std::string& model = "gpt2") {
  overrides.insert(overrides.begin(), "engine={\"name\": \"megatron\"}");
  return make_planned_experiment(ranks, tiny_config(model), overrides);
}

std::string refusal(int ranks, const Overrides& overrides) {
  try {
    planned(ranks, overrides);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("what cannot be is refused with the nearest that can", "[megatron]") {
  const std::string tp = "engine.tensor_model_parallel_size=", pp = "engine.pipeline_model_parallel_size=";
  const std::string chunks = "engine.virtual_pipeline_model_parallel_size=", spread = "engine.sequence_parallel=true";
  const std::string micro = "training.micro_batch_size=", group = "engine.microbatch_group_size_per_vp_stage=";
  // Ranks: the model has 3 heads, so 6 is no cure for 4.
  CHECK_THAT(refusal(6, {tp + "4"}), ContainsSubstring("over 4 ranks: it does not divide the 6 ranks; nearest: 3"));
  CHECK_THAT(refusal(12, {tp + "8", pp + "2", "workload.heads=4"}),
             ContainsSubstring("it does not divide the 6 ranks; nearest: 2"));
  CHECK_THAT(refusal(4, {pp + "3"}), ContainsSubstring("3 stages do not divide 4 ranks; nearest: 2 or 4"));
  CHECK_THAT(refusal(12, {pp + "5", tp + "3"}), ContainsSubstring("5 stages do not divide 12 ranks; nearest: 4"));
  // Heads (which divide the hidden width too), vocabulary, sequence length.
  CHECK_THAT(refusal(2, {tp + "2"}), ContainsSubstring("it does not divide the 3 heads of h.0.attn; nearest: 1"));
  CHECK_THAT(refusal(12, {tp + "12", "workload.heads=12", "workload.vocabulary_size=5"}),
             ContainsSubstring("it is more than the vocabulary of 5; nearest: 4"));
  CHECK_THAT(refusal(3, {tp + "3", spread}), ContainsSubstring("/engine/sequence_parallel"));
  CHECK_THAT(refusal(3, {tp + "3", spread}),
             ContainsSubstring("over 3 ranks: it does not divide the 11 tokens of a sequence; nearest: 1"));
  // Layers.
  CHECK_THAT(refusal(6, {pp + "6"}), ContainsSubstring("only 5 layers to divide; nearest: 3"));
  CHECK_THAT(refusal(2, {pp + "2", chunks + "3", micro + "3"}), ContainsSubstring("at most 2"));
  // Samples.
  CHECK_THAT(refusal(6, {tp + "1", "training.global_batch_size=10"}), ContainsSubstring("nearest: 6 or 12"));
  CHECK_THAT(refusal(2, {micro + "4"}), ContainsSubstring("4 does not divide the 6 samples of a rank"));
  // Interleaving.
  CHECK_THAT(refusal(2, {chunks + "2"}), ContainsSubstring("needs several stages"));
  CHECK_THAT(refusal(2, {pp + "2", chunks + "2"}),
             ContainsSubstring("there are 1 for 2; take 1, or training.micro_batch_size=6"));
  CHECK(refusal(2, {pp + "2", chunks + "2", micro + "6"}).empty());
  CHECK_THAT(refusal(2, {pp + "2", chunks + "2", micro + "3", group + "3"}), ContainsSubstring("nearest: 4"));
  CHECK_THAT(refusal(2, {group + "3"}), ContainsSubstring("above 1 only"));
  CHECK(refusal(6, {tp + "3", pp + "2"}).empty());
}

TEST_CASE("a plan lists the grids that the model can have", "[megatron]") {
  const auto rows = [](int ranks, const std::string& model = "gpt2") {
    const Prediction prediction = planned(ranks, {"training.global_batch_size=24"}, model)->engine->predict();
    const auto found = std::find_if(prediction.tables.begin(), prediction.tables.end(),
                                    [](const PlanTable& table) { return table.title.starts_with("what is legal"); });
    REQUIRE(found != prediction.tables.end());
    return found->rows;
  };
  using Rows = std::vector<std::vector<std::string>>;
  CHECK(rows(12) == Rows{{"1", "1, 3", "1", "1"},
                         {"2", "1, 3", "1", "1 to 2, from 2 micro-batches on"},
                         {"3", "1", "1", "1"},
                         {"4", "1, 3", "1", "1"}});
  CHECK(rows(4, "vgg")[0] == std::vector<std::string>{"1", "1, 2", "1", "1"});
  // All that the table says of 12 ranks is true, and nothing else is legal.
  for (int pp = 1; pp <= 12; ++pp) {
    for (int tp = 1; tp <= 12; ++tp) {
      INFO("pp " << pp << ", tp " << tp);
      bool is_listed = false;
      for (const std::vector<std::string>& row : rows(12)) {
        is_listed =
            is_listed || (row[0] == str(pp) && (", " + row[1] + ",").find(str(" ", tp, ",")) != std::string::npos);
      }
      CHECK(is_listed == refusal(12, {str("engine.tensor_model_parallel_size=", tp),
                                      str("engine.pipeline_model_parallel_size=", pp), "training.global_batch_size=24"})
                             .empty());
    }
  }
}

TEST_CASE("presets are the study's series", "[megatron]") {
  const EngineDescription intra = planned(3, {"engine.preset=megatron-intra"})->engine->describe();
  CHECK(intra.tp == 3);
  CHECK(intra.dp == 1);
  const EngineDescription data = planned(3, {"engine.preset=megatron-data"})->engine->describe();
  CHECK(data.tp == 1);
  CHECK(data.dp == 3);
}

TEST_CASE("bubbles shrink with micro-batches and with interleaving", "[megatron]") {
  const auto bubble = [](const Overrides& more) {
    Overrides overrides = {"engine.pipeline_model_parallel_size=2", "workload.layers=7"};
    overrides.insert(overrides.end(), more.begin(), more.end());
    return planned(2, overrides)->engine->predict().bubble_fraction;
  };
  const double one = bubble({}), twelve = bubble({"training.micro_batch_size=1"});
  CHECK(one == 0.5);  // stages take turns
  CHECK(twelve < 0.5 * one);
  CHECK(planned(2, {})->engine->predict().bubble_fraction == 0.0);
  CHECK_THAT(planned(2, {"engine.pipeline_model_parallel_size=2"})->engine->predict().warnings.at(0),
             ContainsSubstring("1 micro-batches for 2 stages"));
}

TEST_CASE("every layer is on one stage, however many there are", "[megatron]") {
  for (int stages : {2, 3, 5}) {
    const std::string balance = planned(stages, {str("engine.pipeline_model_parallel_size=", stages)})
                                    ->engine->describe()
                                    .knobs.at("layers of each stage");
    int sum = 0;
    for (char c : balance) sum += c >= '0' && c <= '9' ? c - '0' : 0;
    INFO(balance);
    CHECK(sum == 5);  // embedding, two blocks, norm, head
  }
}

TEST_CASE("the distributed optimizer divides moments, and tensor parallelism weights", "[megatron]") {
  const auto memory = [](const Overrides& overrides) { return planned(3, overrides)->engine->predict().memory; };
  const MemoryByKind whole = memory({}), divided = memory({"engine.use_distributed_optimizer=true"});
  CHECK(3 * divided[MemoryKind::optimizer] < whole[MemoryKind::optimizer] * 11 / 10);
  CHECK(memory({"engine.preset=megatron-intra"})[MemoryKind::parameters] < whole[MemoryKind::parameters] / 2);
}

TEST_CASE("recomputation trades activations for one more forward pass", "[megatron]") {
  const auto predicted = [](int ranks, Overrides more) {
    more.insert(more.end(), {"workload.layers=4", "training.micro_batch_size=2"});
    return planned(ranks, more)->engine->predict();
  };
  const std::string full = "engine.recompute_granularity=full";
  const auto activations = [&](Overrides more) { return predicted(3, more).memory[MemoryKind::activations]; };
  const std::string pp = "engine.pipeline_model_parallel_size=3";
  CHECK(activations({full}) < activations({}) / 2);
  CHECK(activations({pp, full}) < activations({pp}) / 2);
  CHECK(activations({full, "engine.recompute_num_layers=2"}) > activations({full}));
  const Overrides two = {full, "engine.recompute_method=block", "engine.recompute_num_layers=2"};
  CHECK(activations(two) > activations({full}));
  CHECK(activations(two) < activations({}));
  CHECK(activations({"engine.recompute_granularity=selective"}) == activations({}));
  // Replicas send gradients only.
  CHECK(predicted(3, {}).comm_per_step.at("dp.all_reduce").bytes ==
        predicted(3, {full}).comm_per_step.at("dp.all_reduce").bytes);

  const Overrides intra = {"engine.preset=megatron-intra"};
  const CommCounts without = predicted(3, intra).comm_per_step;
  const CommCounts with = predicted(3, {intra[0], full}).comm_per_step;
  // Two all-reduces in each of 4 blocks for each of 6 micro-batches of 2 samples, 11 tokens of width 24, in fp64.
  CHECK(with.at("tp.all_reduce").calls - without.at("tp.all_reduce").calls == 2 * 4 * 6);
  CHECK(with.at("tp.all_reduce").bytes - without.at("tp.all_reduce").bytes ==
        2 * 4 * 6 * (2 * 2 * 2 * 11 * 24 * 8 / 3));
  CHECK(with.at("tp.all_gather").calls == without.at("tp.all_gather").calls);

  const std::vector<std::string> differences =
      planned(3, {"engine.recompute_granularity=selective"})->engine->describe().differences;
  CHECK_THAT(differences.back(), ContainsSubstring("attention never keeps its scores"));
}

TEST_CASE("what cannot be recomputed is refused", "[megatron]") {
  const std::string full = "engine.recompute_granularity=full", count = "engine.recompute_num_layers=";
  CHECK_THAT(refusal(2, {count + "1"}), ContainsSubstring("recompute_granularity=full only, this is none"));
  CHECK_THAT(refusal(2, {"engine.recompute_granularity=selective", "engine.recompute_method=block"}),
             ContainsSubstring("this is selective"));
  CHECK_THAT(refusal(2, {full, count + "3"}), ContainsSubstring("no stage has more than 2; nearest: 2"));
  CHECK_THAT(refusal(2, {full, count + "2", "engine.pipeline_model_parallel_size=2"}), ContainsSubstring("nearest: 1"));
  CHECK(refusal(2, {full, count + "2"}).empty());
  CHECK_THROWS_WITH(planned(2, {full}, "vgg"), ContainsSubstring("no transformer blocks to recompute; nearest: none"));
}
