// What the megatron engine says before it runs: grids, cuts, memory, bytes, bubble, and what it refuses.

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

TEST_CASE("grids that cannot be are refused with those that can", "[megatron]") {
  const std::string tp = "engine.tensor_model_parallel_size=", pp = "engine.pipeline_model_parallel_size=";
  CHECK_THAT(refusal(6, {tp + "4"}), ContainsSubstring("tp 4 x pp 1 = 4 does not divide 6 ranks; nearest: 3 or 6"));
  CHECK_THAT(refusal(4, {pp + "3"}), ContainsSubstring("/engine/pipeline_model_parallel_size"));
  CHECK_THAT(refusal(2, {tp + "2"}), ContainsSubstring("/engine/tensor_model_parallel_size"));  // 3 heads
  CHECK_THAT(refusal(6, {pp + "6"}), ContainsSubstring("at most 5"));
  CHECK_THAT(refusal(2, {"engine.virtual_pipeline_model_parallel_size=2"}), ContainsSubstring("needs several stages"));
  CHECK_THAT(refusal(2, {pp + "2", "engine.virtual_pipeline_model_parallel_size=2"}),
             ContainsSubstring("there are 1 for 2"));
  CHECK_THAT(refusal(2, {pp + "2", "engine.virtual_pipeline_model_parallel_size=2", "training.micro_batch_size=3",
                         "engine.microbatch_group_size_per_vp_stage=3"}),
             ContainsSubstring("nearest: 4"));
  CHECK_THAT(refusal(2, {"engine.microbatch_group_size_per_vp_stage=3"}), ContainsSubstring("above 1 only"));
  CHECK(refusal(6, {tp + "3", pp + "2"}).empty());
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
