// A stage that fails in the middle of a step: no other stage waits in vain, and all end with its message and code.

#include <chrono>

#include "cli/experiment.h"
#include "tests/mpi/ranks.h"
#include "tests/support/catch.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

/// Fails when its rank goes over to the backward passes of its second step.
class Saboteur final : public Observer {
 public:
  void phase(Phase phase) override {
    if (phase == Phase::backward && ++times_ == 2) throw Error("the stage broke", ExitCode::data);
  }

 private:
  int times_ = 0;
};

/// One epoch of the engine, in a world that may fail: what the rank's program would report of it.
std::unique_ptr<Error> failure_of(Experiment& experiment, bool is_victim) {
  try {
    experiment.engine->prepare();
    Saboteur saboteur;
    Observer nobody;
    experiment.engine->run_epoch(EpochPlan(60, 12, 1, 0, true, false, 0),
                                 is_victim ? static_cast<Observer&>(saboteur) : nobody);
  } catch (const Error& error) {
    return std::make_unique<Error>(error);
  }
  return nullptr;
}

}  // namespace

TEST_CASE("whichever stage fails, all end with its message", "[pipeline]") {
  // A process ends after its failure. Here it goes on, so messages on their way must still find their buffers.
  std::vector<std::unique_ptr<Ranks>> worlds;
  std::vector<std::unique_ptr<Experiment>> experiments;
  for (const char* mode : {"always", "never"}) {
    for (int victim = 0; victim < test_world().info().size; ++victim) {
      INFO("stage " << victim << " of " << test_world().info().size << ", checkpoint " << mode);
      World& world = *worlds.emplace_back(std::make_unique<Ranks>())->world;
      const bool is_victim = world.info().rank == victim;
      Experiment& experiment = *experiments.emplace_back(make_experiment(
          world, tiny_config("gpt2"), {"engine.name=torchgpipe", "engine.chunks=4", str("engine.checkpoint=", mode)}));
      const auto begin = std::chrono::steady_clock::now();
      const std::unique_ptr<Error> failure = failure_of(experiment, is_victim);
      REQUIRE(failure);
      // As the program does: the first to fail speaks for all.
      CHECK(world.claim_first_failure(failure->code(), failure->what()) == is_victim);
      CHECK(failure->code() == ExitCode::data);
      CHECK_THAT(failure->what(), ContainsSubstring("the stage broke"));
      if (!is_victim) CHECK_THAT(failure->what(), StartsWith(str("stopped by rank ", victim, ": ")));
      CHECK(world.first_failure().rank == victim);
      CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(15));
      test_world().barrier();
    }
  }
}
