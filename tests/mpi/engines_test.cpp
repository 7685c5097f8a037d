// Every engine of the registry, in every variant that it names, against its reference, in fp64, with dropout on: the
// numbers after five steps agree to 1e-11 whatever the split into ranks and micro-batches. The reference runs on rank
// 0.

#include <algorithm>
#include <cmath>
#include <fstream>

#include "cli/comparison.h"
#include "parallel/comm/self_communicator.h"
#include "tests/support/catch.h"
#include "tests/support/engine_candidates.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

/// Global batch 12 divides by 2, 3 and 4 ranks.
const std::vector<std::vector<std::string>> kRecipes = {
    {},
    {"training.micro_batch_size=1"},                              // accumulation
    {"workload.train_samples=43"},                                // last of the 4 steps is ragged: 7 samples
    {"training.optimizer.clip_grad_norm=0.05"},                   // clipping in force
    {"workload.train_samples=38", "training.micro_batch_size=1",  // all of it; 2 samples are left for all ranks
     R"(training.optimizer={"name": "adamw", "lr": 0.003, "clip_grad_norm": 0.05})"},
    {R"(training.optimizer={"name": "lamb", "lr": 0.01, "weight_decay": 0.01})"},
    {"training.deterministic=true"},
    {R"(training.loss_scale={"name": "dynamic", "init_scale": 1e300, "backoff_factor": 1e-296, "growth_interval": 2})"},
};

/// Loss scales and micro-batches are for engines whose ranks finish steps together.
bool fits(const Candidate& candidate, const std::vector<std::string>& recipe) {
  const auto asks_for_steps = [](const std::string& setting) {
    return setting.starts_with("training.loss_scale") || setting.starts_with("training.micro_batch_size");
  };
  return candidate.synchronous || std::none_of(recipe.begin(), recipe.end(), asks_for_steps);
}

Outcome reference_of(const Experiment& experiment, int steps) {
  const std::unique_ptr<Experiment> reference = make_reference_experiment(experiment);
  return train_for_comparison(*reference, steps);
}

}  // namespace

TEST_CASE("every engine equals its reference after five steps", "[engines]") {
  World& world = test_world();
  for (const char* model : {"gpt2", "vgg"}) {
    for (const std::vector<std::string>& recipe : kRecipes) {
      Outcome serial;  // the same for all engines that have it as their reference
      for (const Candidate& candidate : candidates(world.info().size, model)) {
        if (!fits(candidate, recipe)) continue;
        INFO(candidate.name << ", " << model << " on " << world.info().size << " ranks, recipe "
                            << (recipe.empty() ? "plain" : recipe.back()));
        std::vector<std::string> overrides = recipe;
        overrides.insert(overrides.end(), candidate.overrides.begin(), candidate.overrides.end());
        const std::unique_ptr<Experiment> experiment = make_experiment(world, tiny_config(model), overrides);
        const Outcome outcome = train_for_comparison(*experiment, 5);
        REQUIRE(outcome.losses.size() >= 4);
        if (world.info().rank == 0) {
          const bool is_serial = experiment->config.engine->reference == "serial";
          if (is_serial && serial.losses.empty()) serial = reference_of(*experiment, 5);
          const Outcome reference = is_serial ? serial : reference_of(*experiment, 5);
          const Deviation worst = worst_of(compare(outcome, reference));
          INFO("worst: " << worst.what);
          CHECK(worst.error <= 1e-11);
          if (world.info().size == 1) CHECK(worst.error == 0.0);
        }
        world.barrier();
      }
    }
  }
}

TEST_CASE("training changes every tensor and lowers the loss", "[engines]") {
  World& world = test_world();
  const std::unique_ptr<Experiment> experiment =
      make_experiment(world, tiny_config("gpt2"), {"engine.name=ddp", "workload.train_samples=240"});
  experiment->engine->prepare();
  std::map<std::string, std::vector<double>> before;
  experiment->engine->visit_parameters([&](const ParamSpec& spec, int, const Tensor& values) {
    before[spec.name].assign(values.data<double>(), values.data<double>() + values.elements());
  });
  Observer nobody;
  const EpochPlan plan(240, 12, 1, 0, true, false, 0);
  const PassResult first = experiment->engine->run_epoch(plan, nobody);
  const PassResult second = experiment->engine->run_epoch(plan, nobody);
  CHECK(second.loss() < first.loss());
  experiment->engine->visit_parameters([&](const ParamSpec& spec, int, const Tensor& values) {
    INFO(spec.name);
    CHECK(before.at(spec.name) !=
          std::vector<double>(values.data<double>(), values.data<double>() + values.elements()));
  });
}

TEST_CASE("deterministic runs are bit-equal, and the measured memory and bytes are the predicted ones", "[engines]") {
  World& world = test_world();
  const std::string model = GENERATE("gpt2", "vgg");
  for (const Candidate& candidate : candidates(world.info().size, model)) {
    std::vector<std::string> overrides = {"training.deterministic=true", "training.dtype=fp32"};
    overrides.insert(overrides.end(), candidate.overrides.begin(), candidate.overrides.end());
    std::vector<Outcome> outcomes;
    for (int repeat = 0; repeat < 2; ++repeat) {
      INFO(candidate.name << ", " << model << ", repeat " << repeat);
      const std::unique_ptr<Experiment> experiment = make_experiment(world, tiny_config(model), overrides);
      const Prediction prediction = experiment->engine->predict();
      outcomes.push_back(train_for_comparison(*experiment, 3));
      for (int kind = 0; kind < kMemoryKinds; ++kind) {
        const auto tag = static_cast<MemoryKind>(kind);
        INFO(kMemoryKindNames[static_cast<std::size_t>(kind)]);
        const auto measured = static_cast<double>(experiment->device->memory().peak()[tag]);
        CHECK(std::abs(measured - static_cast<double>(prediction.memory[tag])) <= 0.01 * measured);
      }
    }
    INFO(candidate.name);
    CHECK(outcomes[0].losses == outcomes[1].losses);
    CHECK(outcomes[0].values == outcomes[1].values);
    CHECK(outcomes[0].validation.loss_sum == outcomes[1].validation.loss_sum);
  }
}

TEST_CASE("bytes counted in a steady step are the predicted ones", "[engines]") {
  World& world = test_world();
  const std::string model = GENERATE("gpt2", "vgg");
  for (const Candidate& candidate : candidates(world.info().size, model)) {
    std::vector<std::string> overrides = {"workload.train_samples=48"};
    overrides.insert(overrides.end(), candidate.overrides.begin(), candidate.overrides.end());
    const std::unique_ptr<Experiment> experiment = make_experiment(world, tiny_config(model), overrides);
    experiment->engine->prepare();
    Observer nobody;
    const EpochPlan plan(48, 12, 1, 0, true, false, 2);
    experiment->engine->run_epoch(plan, nobody);  // the first steps may work differently: buckets are rebuilt
    experiment->ledger.take();
    experiment->engine->run_epoch(plan, nobody);
    const CommCounts counted = experiment->ledger.take();
    const CommCounts predicted = experiment->engine->predict().comm_per_step;
    for (const auto& [operation, count] : predicted) {
      INFO(candidate.name << ", " << model << ", " << operation);
      REQUIRE(counted.count(operation) == 1);
      CHECK(counted.at(operation).calls == 2 * count.calls);
      CHECK(counted.at(operation).bytes == 2 * count.bytes);
    }
    CHECK(counted.size() == predicted.size());
  }
}

TEST_CASE("a loss that stops being finite ends every rank alike", "[engines]") {
  World& world = test_world();
  const std::unique_ptr<Experiment> experiment = make_experiment(
      world, tiny_config("vgg"), {"engine.name=ddp", "training.optimizer.lr=1e6", "training.dtype=fp32"});
  experiment->engine->prepare();
  Observer nobody;
  try {
    experiment->engine->run_epoch(EpochPlan(60, 12, 1, 0, true, false, 0), nobody);
    FAIL("trained on without a finite loss");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::numeric);
    CHECK_THAT(error.what(), ContainsSubstring("stopped being finite in epoch 0, step"));
  }
}
