// What the torchgpipe engine says before it runs: cuts, memory, bytes, bubble, and what it refuses.

#include <fstream>

#include "cli/experiment.h"
#include "tests/support/catch.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

using Overrides = std::vector<std::string>;

std::unique_ptr<Experiment> planned(int ranks, Overrides overrides, const std::string& model = "gpt2") {
  overrides.insert(overrides.begin(), "engine={\"name\": \"torchgpipe\"}");
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

TEST_CASE("what cannot be is refused with what can", "[torchgpipe]") {
  CHECK_THAT(refusal(6, {}), ContainsSubstring("has only 5 layers to divide; start at most 5 ranks"));
  CHECK(refusal(5, {"engine.chunks=2"}).empty());
  CHECK_THAT(refusal(2, {"engine.balance=[2,2]"}),
             ContainsSubstring("/engine/balance (command line): [2, 2] adds up to 4, the model has 5 layers"));
  CHECK_THAT(refusal(2, {"engine.balance=[2,2]"}), ContainsSubstring("nearest: [3, 2]"));
  CHECK_THAT(refusal(3, {"engine.balance=[2,3]"}), ContainsSubstring("has 2 entries for 3 stages"));
  CHECK_THAT(refusal(2, {"engine.balance=[5,0]"}), ContainsSubstring("has a stage without layers"));
  CHECK_THAT(refusal(2, {"engine.balance=[3,2]", "engine.balance_by=size"}),
             ContainsSubstring("leave one of the two out"));
  CHECK_THAT(refusal(2, {"engine.balance_by=time"}), ContainsSubstring("/engine/profile"));
  CHECK_THAT(refusal(2, {"engine.profile=x.json"}), ContainsSubstring("acts with balance_by=time only"));
  CHECK_THAT(refusal(2, {"engine.param_scale=4"}), ContainsSubstring("acts with balance_by=size only"));
  CHECK_THAT(refusal(2, {"engine.checkpoint=sometimes"}), ContainsSubstring("except_last"));
  CHECK_THAT(refusal(2, {"engine.chunks=0"}), ContainsSubstring("/engine/chunks"));
  CHECK(refusal(2, {"engine.balance=[3,2]"}).empty());
}

TEST_CASE("chunks, micro-batch size and batch decide how many micro-batches there are", "[torchgpipe]") {
  const auto micro_batches = [](const Overrides& overrides) {
    return planned(2, overrides)->engine->describe().micro_batches;
  };
  CHECK(micro_batches({}) == 1);
  CHECK(micro_batches({"engine.chunks=5"}) == 5);
  CHECK(micro_batches({"training.micro_batch_size=3"}) == 4);
  CHECK(micro_batches({"training.micro_batch_size=3", "engine.chunks=6"}) == 6);
  CHECK(micro_batches({"engine.chunks=100"}) == 12);
  const std::vector<std::string> warnings = planned(2, {"engine.chunks=100"})->engine->predict().warnings;
  REQUIRE(warnings.size() == 1);
  CHECK_THAT(warnings[0], ContainsSubstring("12 micro-batches, not 100"));
}

TEST_CASE("the stages of a run share its model", "[torchgpipe]") {
  for (const char* model : {"gpt2", "vgg"}) {
    const std::unique_ptr<Experiment> experiment = planned(3, {"engine.chunks=4"}, model);
    const Prediction prediction = experiment->engine->predict();
    REQUIRE(prediction.tables.size() == 3);
    std::int64_t parameters = 0;
    for (const std::vector<std::string>& row : prediction.tables[0].rows) parameters += std::stoll(row[6]);
    CHECK(parameters == parameter_count(experiment->model.build(LayerFactory())));
    CHECK(prediction.tables[1].rows.size() == 3);
    CHECK(prediction.tables[2].rows.size() == 3);
    CHECK(experiment->engine->describe().pp == 3);
  }
}

TEST_CASE("a stage sends each activation once, and each gradient once", "[torchgpipe]") {
  // Rank 0 sends the mini-batch's activations, whatever the number of chunks: 12 x 11 x 24 fp64.
  for (int chunks : {1, 4, 5}) {
    const std::unique_ptr<Experiment> experiment =
        planned(2, {"engine.chunks=" + std::to_string(chunks), "engine.balance=[3,2]"});
    const CommCounts traffic = experiment->engine->predict().comm_per_step;
    CHECK(traffic.at("pp.send").bytes == 12 * 11 * 24 * 8);
    CHECK(traffic.at("pp.send").calls == chunks);
    CHECK(traffic.at("pp.recv").calls == chunks);
    CHECK(traffic.at("tied.all_reduce").bytes == 29 * 24 * 8);  // one embedding: 2 (n - 1) / n of it with n = 2
  }
}

TEST_CASE("checkpointing keeps inputs in place of activations", "[torchgpipe]") {
  const auto activations = [](const char* mode, int chunks) {
    return planned(2, {str("engine.checkpoint=", mode), str("engine.chunks=", chunks)})
        ->engine->predict()
        .memory[MemoryKind::activations];
  };
  CHECK(activations("always", 4) == activations("except_last", 4));  // one micro-batch at a time
  CHECK(activations("never", 4) > 2 * activations("always", 4));
  CHECK(activations("never", 1) == activations("always", 1));
  // All outputs of a step on the last rank, in place of one micro-batch's.
  CHECK(planned(1, {"engine.chunks=4", "engine.loss_in_pipeline=false"})
            ->engine->predict()
            .memory[MemoryKind::activations] >
        planned(1, {"engine.chunks=4"})->engine->predict().memory[MemoryKind::activations]);
}

TEST_CASE("the bubble shrinks with the number of micro-batches", "[torchgpipe]") {
  const auto bubble = [](int ranks, int chunks) {
    return planned(ranks, {str("engine.chunks=", chunks), "engine.checkpoint=never"})
        ->engine->predict()
        .bubble_fraction;
  };
  CHECK(bubble(1, 4) == Approx(0.0).margin(1e-12));
  CHECK(bubble(2, 1) == Approx(0.5));
  CHECK(bubble(2, 12) < bubble(2, 4));
}

TEST_CASE("measured times decide a cut", "[torchgpipe]") {
  // The last of five layers takes as long as all others together.
  const std::string path = tiny_config("gpt2") + ".profile";
  std::ofstream(path) << R"({"model": "gpt2-tiny", "samples": 3, "layers": {
    "embedding": {"forward_ns": 100, "backward_ns": 200}, "h.0": {"forward_ns": 100, "backward_ns": 200},
    "h.1": {"forward_ns": 100, "backward_ns": 200}, "ln_f": {"forward_ns": 100, "backward_ns": 200},
    "lm_head": {"forward_ns": 400, "backward_ns": 800}}})";
  const std::unique_ptr<Experiment> experiment =
      planned(2, {"engine.balance_by=time", "engine.profile=" + path, "engine.chunks=4"});
  CHECK(experiment->engine->describe().knobs.at("balance") == "[4, 1]");
  CHECK_THAT(experiment->engine->predict().tables[0].title, ContainsSubstring("by seconds"));
}
