// PipeDream over several epochs whose lags go on from one to the next (drain=never), against the recurrence that counts
// mini-batches over the whole training: fp64, dropout, momentum and weight decay on. The recurrence runs on rank 0.

#include <cstring>

#include "cli/comparison.h"
#include "tests/support/catch.h"
#include "tests/support/mpi_world.h"
#include "tests/support/pipedream_layouts.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

/// Sums in rank order, as the recurrence adds.
Overrides never(const Overrides& more = {}) {
  return joined({"engine.name=pipedream", "engine.drain=never", "training.deterministic=true"}, more);
}

/// Epochs of 240 samples in mini-batches of 12, of which some steps are trained.
EpochPlan epoch(std::int64_t number, int steps) { return EpochPlan(240, 12, 11, number, true, false, steps); }

std::unique_ptr<Experiment> make(const std::string& model, const Overrides& overrides) {
  return make_experiment(test_world(), tiny_config(model), joined(overrides, {"workload.train_samples=240"}));
}

/// Parameters after training, and the validation loss of each epoch.
Outcome train_epochs(Engine& engine, int first, int last, int steps) {
  Observer nobody;
  Outcome outcome;
  for (int number = first; number < last; ++number) {
    outcome.losses.push_back(engine.run_epoch(epoch(number, steps), nobody).loss());
    outcome.losses.push_back(engine.evaluate(EpochPlan(17, 12, 11, 0, false, false, 0)).loss());
  }
  engine.visit_parameters([&](const ParamSpec& spec, int, const Tensor& values) {
    outcome.names.push_back(spec.name);
    outcome.values[spec.name].assign(values.data<double>(), values.data<double>() + values.elements());
  });
  return outcome;
}

Outcome train(const std::string& model, const Overrides& overrides, int epochs, int steps) {
  const std::unique_ptr<Experiment> experiment = make(model, overrides);
  experiment->engine->prepare();
  return train_epochs(*experiment->engine, 0, epochs, steps);
}

/// On rank 0: the error of what differs most.
double worst(const Outcome& outcome, const Outcome& expected) {
  REQUIRE(outcome.losses.size() == expected.losses.size());
  REQUIRE(!expected.names.empty());
  double error = 0.0;
  for (const Deviation& deviation : compare(outcome, expected)) {
    if (!deviation.is_loss) error = std::max(error, deviation.error);
  }
  return error;
}

/// Parameters have the recurrence's bits; losses are added in another order.
void check_against_recurrence(const std::string& model, const Overrides& overrides, int epochs, int steps) {
  const std::unique_ptr<Experiment> experiment = make(model, overrides);
  experiment->engine->prepare();
  const Outcome outcome = train_epochs(*experiment->engine, 0, epochs, steps);
  if (test_world().info().rank == 0) {
    const std::unique_ptr<Experiment> reference = make_reference_experiment(*experiment);
    reference->engine->prepare();
    const Outcome expected = train_epochs(*reference->engine, 0, epochs, steps);
    for (const Deviation& deviation : compare(outcome, expected)) {
      INFO(deviation.what);
      CHECK(deviation.error <= (deviation.is_loss ? 1e-14 : 0.0));
    }
    CHECK(worst(outcome, expected) == 0.0);
  }
  test_world().barrier();
}

std::vector<std::string> bytes_of(Engine& engine) {
  std::vector<std::string> all;
  for (const StateTensor& state : engine.state()) {
    all.emplace_back(static_cast<const char*>(state.tensor.raw()), static_cast<std::size_t>(state.tensor.bytes()));
  }
  return all;
}

void restore(Engine& engine, const std::vector<std::string>& saved, const TrainingPosition& position) {
  const std::vector<StateTensor> state = engine.state();
  REQUIRE(state.size() == saved.size());
  for (std::size_t i = 0; i < state.size(); ++i) std::memcpy(state[i].tensor.raw(), saved[i].data(), saved[i].size());
  engine.set_position(position);
}

}  // namespace

TEST_CASE("lags that go on over epochs' ends have the bits of the recurrence", "[pipedream]") {
  const std::string model = GENERATE("gpt2", "vgg");
  for (const Overrides& layout : layouts(model)) {
    for (const char* mode : {"stash", "none"}) {
      INFO(model << " " << layout[0] << " " << mode);
      check_against_recurrence(model, never(joined(layout, {str("engine.mode=", mode)})), 3, 12);
    }
  }
}

TEST_CASE("so they have in the modes of one rank a stage", "[pipedream]") {
  const std::string model = GENERATE("gpt2", "vgg");
  for (const Overrides& mode :
       std::vector<Overrides>{{"engine.mode=2bw", "engine.micro_batches=4"},
                              {"engine.mode=vertical_sync"},
                              {"engine.mode=published", R"(training.optimizer={"name": "sgd", "lr": 0.05})"}}) {
    INFO(model << " " << mode[0]);
    check_against_recurrence(model, never(mode), 3, 10);
  }
}

TEST_CASE("so they have when epochs are shorter than the pipeline", "[pipedream]") {
  for (const Overrides& layout : layouts("gpt2")) {
    for (const int steps : {1, 2, 3}) {
      INFO(layout[0] << ", " << steps << " steps");
      check_against_recurrence("gpt2", never(layout), 7, steps);
    }
  }
  check_against_recurrence("gpt2", never({"engine.mode=2bw", "engine.micro_batches=4"}), 5, 1);
  check_against_recurrence("gpt2", never({"engine.mode=vertical_sync"}), 7, 2);
}

TEST_CASE("so they have with other optimizers, clipping, and rates that follow a schedule", "[pipedream]") {
  for (const Overrides& layout : layouts("gpt2")) {
    for (const Overrides& recipe : std::vector<Overrides>{
             {R"(training.optimizer={"name": "adamw", "lr": 0.003, "weight_decay": 0.1, "clip_grad_norm": 0.05})"},
             {"engine.batch_rule=match_injection", "engine.lr_staleness=inverse", "training.epochs=3",
              R"(training.lr_schedule={"name": "cosine", "warmup_steps": 4})"}}) {
      INFO(layout[0] << ", " << recipe[0]);
      check_against_recurrence("gpt2", never(joined(layout, recipe)), 3, 6);
    }
  }
}

TEST_CASE("drain=never makes a difference, from the second epoch on", "[pipedream]") {
  for (const Overrides& mode : std::vector<Overrides>{
           {"engine.mode=stash"}, {"engine.mode=none"}, {"engine.mode=2bw"}, {"engine.mode=vertical_sync"}}) {
    INFO(mode[0]);
    const Overrides drained = joined(never(mode), {"engine.drain=epoch"});
    const Outcome first = train("gpt2", never(mode), 1, 8), first_drained = train("gpt2", drained, 1, 8);
    const Outcome second = train("gpt2", never(mode), 2, 8), second_drained = train("gpt2", drained, 2, 8);
    if (test_world().info().rank == 0) {
      CHECK(worst(first, first_drained) == 0.0);
      CHECK(worst(second, second_drained) > 1e-6);
    }
  }
}

TEST_CASE("records count full lags in later epochs, and memory is what was foreseen", "[pipedream]") {
  const int ranks = test_world().info().size, rank = test_world().info().rank;
  for (const std::string mode : {"stash", "none"}) {
    const std::unique_ptr<Experiment> experiment = make("gpt2", never({"workload.layers=4", "engine.mode=" + mode}));
    experiment->engine->prepare();
    Observer nobody;
    const std::int64_t units = 9;
    const auto lag = static_cast<std::size_t>(ranks - 1 - rank);
    const PassResult first = experiment->engine->run_epoch(epoch(0, 9), nobody);
    const PassResult second = experiment->engine->run_epoch(epoch(1, 9), nobody);
    std::vector<std::int64_t> filling(lag + 1, 1), full(lag + 1, 0);
    filling[lag] = units - static_cast<std::int64_t>(lag);
    full[lag] = units;
    REQUIRE(second.staleness.has_value());
    CHECK(first.staleness->updates_behind == filling);
    CHECK(second.staleness->updates_behind == full);
    CHECK(second.staleness->versions == static_cast<int>(lag) + 1);
    CHECK((second.staleness->weight_drift > 0.0) == (lag > 0));
    const MemoryByKind held = experiment->device->memory().peak(), predicted = experiment->engine->predict().memory;
    CHECK(held[MemoryKind::weight_versions] == predicted[MemoryKind::weight_versions]);
    CHECK(held[MemoryKind::weight_versions] > 0);  // on the last stage those of the tied copy
  }
}

TEST_CASE("a checkpoint holds the weights that lags go on with", "[pipedream]") {
  const std::string mode = GENERATE("stash", "none", "vertical_sync", "2bw");
  for (const int steps : {1, 7}) {
    INFO(mode << ", epochs of " << steps << " steps");
    const Overrides overrides = never({"engine.mode=" + mode});
    const std::unique_ptr<Experiment> whole = make("gpt2", overrides), resumed = make("gpt2", overrides);
    whole->engine->prepare();
    train_epochs(*whole->engine, 0, 3, steps);
    const std::vector<std::string> saved = bytes_of(*whole->engine);
    const TrainingPosition position = whole->engine->position();
    const Outcome expected = train_epochs(*whole->engine, 3, 6, steps);

    resumed->engine->prepare();
    restore(*resumed->engine, saved, position);
    const Outcome outcome = train_epochs(*resumed->engine, 3, 6, steps);
    CHECK(outcome.losses == expected.losses);
    if (test_world().info().rank == 0) CHECK(worst(outcome, expected) == 0.0);
    CHECK(bytes_of(*resumed->engine) == bytes_of(*whole->engine));
  }
}

TEST_CASE("a resumed run knows how many versions it has", "[pipedream]") {
  Observer nobody;
  const std::unique_ptr<Experiment> whole = make("gpt2", never()), resumed = make("gpt2", never());
  whole->engine->prepare();
  for (int number = 0; number < 5; ++number) whole->engine->run_epoch(epoch(number, 1), nobody);
  const std::vector<std::string> saved = bytes_of(*whole->engine);
  const TrainingPosition position = whole->engine->position();
  const PassResult expected = whole->engine->run_epoch(epoch(5, 1), nobody);
  resumed->engine->prepare();
  restore(*resumed->engine, saved, position);
  const PassResult result = resumed->engine->run_epoch(epoch(5, 1), nobody);
  CHECK(result.staleness->updates_behind == expected.staleness->updates_behind);
  CHECK(result.staleness->versions == expected.staleness->versions);
  CHECK(result.staleness->weight_drift == expected.staleness->weight_drift);
}

TEST_CASE("a pipeline that flushes has no lags to keep", "[pipedream]") {
  CHECK_THROWS_WITH(make("gpt2", never({"engine.mode=flush"})),
                    ContainsSubstring("/engine/drain") && ContainsSubstring("leave drain out, or take mode 2bw"));
  CHECK_THROWS_WITH(make("gpt2", joined(never(), {"engine.drain=always"})), ContainsSubstring("never"));
}
