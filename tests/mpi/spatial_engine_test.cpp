// Whole models with divided images, alone and together with a divided classifier, against the serial engine.

#include <map>

#include "cli/comparison.h"
#include "tests/support/catch.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

using Overrides = std::vector<std::string>;

/// An experiment whose engine divides images into `height` slices: of 32 rows, or 96 where three ranks take part.
std::unique_ptr<Experiment> divided(int height, Overrides overrides) {
  const int ranks = test_world().info().size;
  overrides.insert(overrides.begin(), {"engine.name=lbann", str("engine.spatial.height=", height),
                                       str("workload.image_size=", ranks == 3 ? 96 : 32)});
  return make_experiment(test_world(), tiny_config("vgg"), overrides);
}

/// Into how many slices images can be divided on so many ranks.
std::vector<int> heights() {
  const int ranks = test_world().info().size;
  if (ranks == 4) return {1, 2, 4};
  return ranks == 2 ? std::vector<int>{1, 2} : std::vector<int>{3};
}

/// A micro-batch that the ranks of a group cannot share evenly, unless each is alone.
std::string uneven_micro_batch(int height) { return str("training.micro_batch_size=", height == 3 ? 4 : 3); }

}  // namespace

TEST_CASE("a model with divided images equals the serial engine", "[spatial]") {
  for (const int height : heights()) {
    const std::string even_micro_batch = str("training.micro_batch_size=", height);
    const std::vector<Overrides> variants = {
        {},
        {"training.micro_batch_size=1"},                            // fewer whole samples than ranks of a group
        {uneven_micro_batch(height), "workload.train_samples=43"},  // ragged: 7 samples are left
        {"training.optimizer.clip_grad_norm=0.05", "workload.train_samples=37"},  // 1 is left
        {"training.deterministic=true", "engine.max_inflight=0", "engine.spatial.overlap=false"},
        {"engine.sharded=true", even_micro_batch, "workload.train_samples=37"},
        {"workload.image_size=64", "workload.train_samples=24"},
        {"workload.image_size=64", "workload.train_samples=24", "engine.fc=model"},
        {"engine.fc=model"},
        {"engine.fc=model", even_micro_batch, "workload.train_samples=43"},
        {"engine.fc=model", "workload.train_samples=37", "training.optimizer.clip_grad_norm=0.05"},
    };
    for (const Overrides& overrides : variants) {
      const bool large = !overrides.empty() && overrides.front() == "workload.image_size=64";
      if (large && 64 % height != 0) continue;
      std::string text;
      for (const std::string& override : overrides) text += override + " ";
      INFO(height << " slices, " << text);
      const std::unique_ptr<Experiment> experiment = divided(height, overrides);
      CHECK(experiment->engine->describe().dp == test_world().info().size / height);
      const Outcome outcome = train_for_comparison(*experiment, 4);
      if (test_world().info().rank == 0) {
        const std::unique_ptr<Experiment> reference = make_reference_experiment(*experiment);
        const Deviation worst = worst_of(compare(outcome, train_for_comparison(*reference, 4)));
        INFO("worst: " << worst.what);
        CHECK(worst.error <= 1e-11);
      }
      test_world().barrier();
    }
  }
}

TEST_CASE("memory and bytes are the predicted ones, and activations shrink with slices", "[spatial]") {
  std::map<int, std::int64_t> activations;
  for (const int height : heights()) {
    for (const Overrides& variant : std::vector<Overrides>{{"training.micro_batch_size=1"},
                                                           {uneven_micro_batch(height)},
                                                           {"engine.sharded=true"},
                                                           {"engine.fc=model", "training.micro_batch_size=0"}}) {
      INFO(height << " slices, " << variant.front());
      Overrides overrides = {"training.deterministic=true", "workload.train_samples=24"};
      overrides.insert(overrides.end(), variant.begin(), variant.end());
      const std::unique_ptr<Experiment> experiment = divided(height, overrides);
      const Prediction prediction = experiment->engine->predict();
      experiment->engine->prepare();
      Observer nobody;
      const EpochPlan plan(24, 12, 1, 0, true, false, 0);
      experiment->engine->run_epoch(plan, nobody);
      for (int kind = 0; kind < kMemoryKinds; ++kind) {
        const auto tag = static_cast<MemoryKind>(kind);
        INFO(kMemoryKindNames[static_cast<std::size_t>(kind)]);
        const auto measured = static_cast<double>(experiment->device->memory().peak()[tag]);
        CHECK(std::abs(measured - static_cast<double>(prediction.memory[tag])) <= 0.01 * measured);
      }
      if (variant.front() == "training.micro_batch_size=1") {
        activations[height] = prediction.memory[MemoryKind::activations];
      }
      experiment->ledger.take();
      experiment->engine->run_epoch(plan, nobody);
      const CommCounts counted = experiment->ledger.take();
      for (const auto& [operation, count] : prediction.comm_per_step) {
        INFO(operation);
        REQUIRE(counted.contains(operation));
        CHECK(counted.at(operation).calls == 2 * count.calls);
        CHECK(counted.at(operation).bytes == 2 * count.bytes);
      }
      CHECK(counted.size() == prediction.comm_per_step.size());
    }
  }
  for (const auto& [height, bytes] : activations) {
    INFO(height << " slices");  // the halos of such small images, and whole samples, come on top of 1/p
    if (activations.contains(1)) CHECK(bytes < 1.35 * static_cast<double>(activations.at(1)) / height);
  }
}

TEST_CASE("neither overlap nor a data store changes what is trained", "[spatial]") {
  const int height = heights().back();
  const auto outcome = [&](const char* overlap, const char* store) {
    return train_for_comparison(
        *divided(height, {"training.deterministic=true", str("engine.spatial.overlap=", overlap),
                          str("loader.data_store.enabled=", store)}),
        3);
  };
  const Outcome plain = outcome("true", "false"), waiting = outcome("false", "false"), stored = outcome("true", "true");
  CHECK(plain.losses == stored.losses);
  CHECK(plain.values == stored.values);
  // Weight gradients are added up in another order.
  for (std::size_t step = 0; step < plain.losses.size(); ++step)
    CHECK(std::abs(plain.losses[step] - waiting.losses[step]) <= 1e-12 * plain.losses[step]);
}

TEST_CASE("slices that cannot be are refused with the nearest that can", "[spatial]") {
  const auto refuse = [](const Overrides& overrides, const std::string& words) {
    CHECK_THROWS_WITH(make_experiment(test_world(), tiny_config("vgg"), overrides), ContainsSubstring(words));
  };
  refuse({"engine.name=lbann", "engine.spatial.height=5"},
         "/engine/spatial/height (command line): 5: it does not divide the ");
  refuse({"engine.name=lbann", "engine.spatial.height=32"}, "groups of so many do not make up");
  if (test_world().info().size % 2 != 0) return;
  refuse({"engine.name=lbann", "engine.spatial.height=2", "engine.fc=model", "training.micro_batch_size=3"},
         "2 does not divide training.micro_batch_size (3); nearest: 2 or 4");
}
