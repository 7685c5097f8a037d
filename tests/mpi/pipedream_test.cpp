// PipeDream against the recurrence that defines it, bit by bit: fp64, dropout, momentum and weight decay on, 40
// mini-batches. The recurrence runs on rank 0.

#include <cstring>
#include <set>

#include "cli/comparison.h"
#include "tests/support/catch.h"
#include "tests/support/mpi_world.h"
#include "tests/support/pipedream_layouts.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

/// 480 samples: 40 mini-batches of 12. Sums in rank order, as the recurrence adds.
Overrides pipedream(const Overrides& more) {
  Overrides overrides = {"engine.name=pipedream", "workload.train_samples=480", "training.deterministic=true"};
  overrides.insert(overrides.end(), more.begin(), more.end());
  return overrides;
}

/// Parameters have the recurrence's bits. Losses of a step whose mini-batches lie on several ranks are added in another
/// order.
void check_against_recurrence(const std::string& model, const Overrides& overrides, int steps) {
  const std::unique_ptr<Experiment> experiment = make_experiment(test_world(), tiny_config(model), overrides);
  const Outcome outcome = train_for_comparison(*experiment, steps);
  if (test_world().info().rank == 0) {
    const std::unique_ptr<Experiment> reference = make_reference_experiment(*experiment);
    const Outcome expected = train_for_comparison(*reference, steps);
    REQUIRE(outcome.losses.size() == expected.losses.size());
    REQUIRE(!outcome.losses.empty());
    for (const Deviation& deviation : compare(outcome, expected)) {
      INFO(deviation.what);
      CHECK(deviation.error <= (deviation.is_loss ? 1e-14 : 0.0));
    }
  }
  test_world().barrier();
}

}  // namespace

TEST_CASE("pipedream has the bits of the recurrence", "[pipedream]") {
  const std::string model = GENERATE("gpt2", "vgg");
  for (const Overrides& layout : layouts(model)) {
    INFO(model << " " << layout[0]);
    check_against_recurrence(model, pipedream(layout), 40);
  }
}

TEST_CASE("so it has with fewer mini-batches than stages, and with mini-batches left out", "[pipedream]") {
  for (const Overrides& layout : layouts("gpt2")) {
    for (const int steps : {3, 4}) {
      INFO(layout[0] << ", " << steps << " steps");
      check_against_recurrence("gpt2", pipedream(layout), steps);
    }
  }
}

TEST_CASE("so it has with every optimizer, with clipping and with each rule for batches and rates", "[pipedream]") {
  for (const Overrides& layout : layouts("gpt2")) {
    for (const Overrides& recipe :
         std::vector<Overrides>{{R"(training.optimizer={"name": "adamw", "lr": 0.003, "weight_decay": 0.1})"},
                                {R"(training.optimizer={"name": "lamb", "lr": 0.01, "weight_decay": 0.01})"},
                                {"training.optimizer.clip_grad_norm=0.05"},
                                {"engine.batch_rule=match_injection", "engine.lr_staleness=inverse",
                                 R"(training.lr_schedule={"name": "cosine", "warmup_steps": 4})"},
                                {"engine.batch_rule=match_injection", "workload.train_samples=43"},
                                {"engine.mode=none"}}) {
      INFO(layout[0] << ", " << recipe[0]);
      check_against_recurrence("gpt2", joined(pipedream(layout), recipe), 12);
    }
  }
}

TEST_CASE("so it has with two versions, with stage 0's versions everywhere, and with a flush", "[pipedream]") {
  const std::string model = GENERATE("gpt2", "vgg");
  for (const Overrides& mode : std::vector<Overrides>{{"engine.mode=2bw", "engine.micro_batches=4"},
                                                      {"engine.mode=2bw", "engine.micro_batches=6"},
                                                      {"engine.mode=2bw", "training.micro_batch_size=2"},
                                                      {"engine.mode=vertical_sync"},
                                                      {"engine.mode=flush", "engine.micro_batches=3"}}) {
    INFO(model << ", " << mode[0] << " " << mode.back());
    check_against_recurrence(model, pipedream(mode), 40);
    check_against_recurrence(model, pipedream(joined(mode, {"workload.train_samples=43"})), 5);  // 7 samples are left
  }
}

namespace {

/// What rank 0 has after these steps, in every rank's place the same experiment.
Outcome train(const std::string& model, const Overrides& overrides, int steps) {
  const std::unique_ptr<Experiment> experiment = make_experiment(test_world(), tiny_config(model), overrides);
  return train_for_comparison(*experiment, steps);
}

/// The serial engine over the same samples, on rank 0.
Outcome train_serially(const std::string& model, const Overrides& overrides, int steps) {
  const std::unique_ptr<Experiment> experiment =
      make_experiment(test_world(), tiny_config(model), joined({"engine.name=torchgpipe"}, overrides));
  return test_world().info().rank == 0 ? train_for_comparison(*make_reference_experiment(*experiment), steps)
                                       : Outcome();
}

}  // namespace

TEST_CASE("without lag it is what other engines compute: with a flush, or with one stage", "[pipedream]") {
  const int ranks = test_world().info().size;
  for (const char* model : {"gpt2", "vgg"}) {
    const Overrides data = {"workload.train_samples=480"};
    const Outcome serial = train_serially(model, data, 10);
    const Outcome flushed = train(model, joined(data, {"engine.name=pipedream", "engine.mode=flush"}), 10);
    const Outcome replicated = train(model,
                                     joined(data, {"engine.name=pipedream", str("engine.replicas=[", ranks, "]"),
                                                   "engine.batch_rule=match_injection"}),
                                     10);
    if (test_world().info().rank == 0) {
      CHECK(worst_of(compare(flushed, serial)).error <= 1e-11);
      CHECK(worst_of(compare(replicated, serial)).error <= (ranks == 1 ? 0.0 : 1e-11));
    }
    test_world().barrier();
  }
}

TEST_CASE("stale weights and a stash without effect make a difference", "[pipedream]") {
  if (test_world().info().size == 1) return;
  const Overrides data = {"workload.train_samples=480", "engine.name=pipedream"};
  const Outcome stash = train("gpt2", data, 20), none = train("gpt2", joined(data, {"engine.mode=none"}), 20);
  const Outcome serial = train_serially("gpt2", {"workload.train_samples=480"}, 20);
  if (test_world().info().rank == 0) {
    CHECK(worst_of(compare(none, stash)).error > 1e-6);
    CHECK(worst_of(compare(stash, serial)).error > 1e-3);
  }
  test_world().barrier();
}

TEST_CASE("a stage holds as many weights as it is updates behind, and one more", "[pipedream]") {
  const int ranks = test_world().info().size, rank = test_world().info().rank;
  const auto versions_of = [&](const std::string& mode) {
    const std::unique_ptr<Experiment> experiment = make_experiment(
        test_world(), tiny_config("gpt2"),
        {"engine.name=pipedream", "workload.train_samples=480", "workload.layers=4", "engine.mode=" + mode});
    train_for_comparison(*experiment, 20);
    const MemoryByKind held = experiment->device->memory().peak();
    const MemoryByKind predicted = experiment->engine->predict().memory;
    CHECK(held[MemoryKind::weight_versions] == predicted[MemoryKind::weight_versions]);
    CHECK(held[MemoryKind::parameters] == predicted[MemoryKind::parameters]);
    return 1 + static_cast<int>(held[MemoryKind::weight_versions] / held[MemoryKind::parameters]);
  };
  CHECK(versions_of("stash") == ranks - rank);
  CHECK(versions_of("none") == 1);
  CHECK(versions_of("flush") == 1);
  CHECK(versions_of("2bw") == 2);
  CHECK(versions_of("vertical_sync") == ranks);
}

TEST_CASE("epochs after the first, and a checkpoint between them, go on with the same bits", "[pipedream]") {
  World& world = test_world();
  const std::string mode = GENERATE("stash", "2bw");
  const Overrides overrides = {"engine.name=pipedream", "training.deterministic=true", "engine.mode=" + mode};
  Observer nobody;
  const auto epoch = [](std::int64_t number) { return EpochPlan(60, 12, 11, number, true, false, 0); };
  const auto bytes_of = [](Engine& engine) {
    std::vector<std::string> all;
    for (const StateTensor& state : engine.state()) {
      all.emplace_back(static_cast<const char*>(state.tensor.raw()), static_cast<std::size_t>(state.tensor.bytes()));
    }
    return all;
  };
  const std::unique_ptr<Experiment> whole = make_experiment(world, tiny_config("gpt2"), overrides);
  whole->engine->prepare();
  whole->engine->run_epoch(epoch(0), nobody);
  const std::vector<std::string> saved = bytes_of(*whole->engine);
  const TrainingPosition position = whole->engine->position();
  whole->engine->run_epoch(epoch(1), nobody);

  const std::unique_ptr<Experiment> resumed = make_experiment(world, tiny_config("gpt2"), overrides);
  resumed->engine->prepare();
  const std::vector<StateTensor> state = resumed->engine->state();
  for (std::size_t i = 0; i < state.size(); ++i) std::memcpy(state[i].tensor.raw(), saved[i].data(), saved[i].size());
  resumed->engine->set_position(position);
  resumed->engine->run_epoch(epoch(1), nobody);
  CHECK(bytes_of(*resumed->engine) == bytes_of(*whole->engine));

  if (world.info().rank == 0) {  // the recurrence over the same two epochs
    const std::unique_ptr<Experiment> reference = make_reference_experiment(*whole);
    reference->engine->prepare();
    for (std::int64_t number : {0, 1}) reference->engine->run_epoch(epoch(number), nobody);
    std::map<std::string, std::vector<double>> expected;
    reference->engine->visit_parameters([&](const ParamSpec& spec, int, const Tensor& values) {
      expected[spec.name].assign(values.data<double>(), values.data<double>() + values.elements());
    });
    whole->engine->visit_parameters([&](const ParamSpec& spec, int, const Tensor& values) {
      INFO(spec.name);
      CHECK(expected.at(spec.name) ==
            std::vector<double>(values.data<double>(), values.data<double>() + values.elements()));
    });
  } else {
    whole->engine->visit_parameters([](const ParamSpec&, int, const Tensor&) {});
  }
  world.barrier();
}

TEST_CASE("a request to stop ends an epoch on all ranks with the same step", "[pipedream]") {
  World& world = test_world();
  const std::unique_ptr<Experiment> experiment = make_experiment(
      world, tiny_config("gpt2"), {"engine.name=pipedream", "workload.train_samples=2400", "workload.layers=4"});
  bool asked = false;
  experiment->context->stop_requested = [&asked] { return asked; };
  experiment->engine->prepare();
  struct Asker final : Observer {
    Asker(bool& to, bool is_me) : asked(to), mine(is_me) {}
    void step_end(const StepReport& report) override { asked = mine && report.step >= 20; }
    bool& asked;
    bool mine;
  } asker(asked, world.info().rank == world.info().size - 1);
  const PassResult result = experiment->engine->run_epoch(EpochPlan(2400, 12, 11, 0, true, false, 0), asker);
  CHECK(result.stopped);
  CHECK(result.steps > 20);
  CHECK(result.steps < 150);
  const std::vector<std::string> steps = world.gather(str(result.steps));
  CHECK(std::set<std::string>(steps.begin(), steps.end()).size() == 1);
}

TEST_CASE("layouts and recipes that cannot be are refused, each with what would do", "[pipedream]") {
  const int ranks = test_world().info().size;
  const auto refuses = [](const std::string& model, const Overrides& overrides, const std::string& words) {
    INFO(overrides[0]);
    CHECK_THROWS_WITH(make_experiment(test_world(), tiny_config(model), joined({"engine.name=pipedream"}, overrides)),
                      ContainsSubstring(words));
  };
  refuses("gpt2", {"engine.replicas=[2,3]"}, str("[2, 3] add up to 5 ranks, but there are ", ranks));
  refuses("gpt2", {"engine.balance=[99]"}, "/engine/balance");
  if (ranks > 2) {
    refuses("gpt2", {str("engine.replicas=[", ranks - 1, ",1]"), "engine.mode=2bw"}, "for stages of one rank each");
  }
  refuses("gpt2", {"engine.micro_batches=2"}, "sends mini-batches through whole");
  refuses("gpt2", {"training.micro_batch_size=2"}, "sends mini-batches through whole");
  refuses("gpt2", {"engine.mode=published"}, "plain SGD");
  refuses("gpt2", {"engine.mode=flush", "engine.batch_rule=match_update"}, "does not act in mode flush");
  if (ranks == 4) {
    refuses("gpt2", {"engine.mode=2bw", "engine.micro_batches=2"}, "needs at least 3 micro-batches");
    refuses("gpt2", {"engine.replicas=[3,1]"}, "missing: with replicas [3, 1]");
    refuses("gpt2", {"engine.replicas=[3,1]", "engine.balance=[1,1]"}, "/engine/balance");
    refuses("gpt2", {"engine.batch_rule=match_injection", "training.global_batch_size=10"}, "do not divide by 4");
  }
}
