// LBANN beyond what all engines are held to: plain data parallelism bit for bit against DDP, bytes and memory against
// the formulas where clipping and LAMB add to them, weights divided over ranks, one rank alone.

#include "cli/comparison.h"
#include "parallel/sync/tournament.h"
#include "tests/support/catch.h"
#include "tests/support/lone_engine.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

using Overrides = std::vector<std::string>;

/// What makes a step unusual, global batch 12.
const std::vector<Overrides> kRecipes = {
    {},
    {"training.micro_batch_size=1", "training.optimizer.clip_grad_norm=0.05"},
    // 2 samples are left for all ranks in the last step
    {"workload.train_samples=38", R"(training.optimizer={"name": "adamw", "lr": 0.003, "clip_grad_norm": 0.05})"},
    {"workload.train_samples=43", "training.micro_batch_size=1"},
    {R"(training.optimizer={"name": "lamb", "lr": 0.01, "weight_decay": 0.01})"},
};

/// Knobs of data parallelism: they change when things happen, never what comes out.
const std::vector<Overrides> kTimings = {
    {},
    {"engine.max_inflight=0", "engine.update_group_elements=0"},
    {"engine.max_inflight=3", "engine.update_group_elements=1500"},
};

/// Divided weights: beside the gradients' sums also gathers come and go.
const std::vector<Overrides> kSharded = {
    {"engine.sharded=true"},
    {"engine.sharded=true", "engine.max_inflight=0"},
    {"engine.sharded=true", "engine.max_inflight=2"},
};

/// All options that a model can have.
std::vector<Overrides> options_of(const std::string& model) {
  std::vector<Overrides> options = kTimings;
  options.push_back(kSharded.front());
  if (model == "vgg") {
    options.push_back({"engine.fc=model"});
    options.push_back({"engine.fc=model", "engine.max_inflight=0", "engine.update_group_elements=0"});
    options.push_back({"engine.fc=model", "workload.classifier_width=0"});  // first and last at once
  }
  return options;
}

Overrides joined(std::initializer_list<Overrides> lists) {
  Overrides all;
  for (const Overrides& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

std::string text_of(const Overrides& overrides) {
  std::string text;
  for (const std::string& override : overrides) text += override + " ";
  return text;
}

Outcome train(const std::string& model, const Overrides& overrides, int steps = 5) {
  return train_for_comparison(*make_experiment(test_world(), tiny_config(model), overrides), steps);
}

}  // namespace

TEST_CASE("one divided layer, first and last at once, equals serial", "[engines]") {
  World& world = test_world();
  for (const Overrides& recipe : kRecipes) {
    const Overrides overrides =
        joined({recipe, {"engine.name=lbann", "engine.fc=model", "workload.classifier_width=0"}});
    INFO(world.info().size << " ranks: " << text_of(overrides));
    const std::unique_ptr<Experiment> experiment = make_experiment(world, tiny_config("vgg"), overrides);
    const Outcome outcome = train_for_comparison(*experiment, 5);
    if (world.info().rank == 0) {
      const Outcome reference = train_for_comparison(*make_reference_experiment(*experiment), 5);
      const Deviation worst = worst_of(compare(outcome, reference));
      INFO("worst: " << worst.what);
      CHECK(worst.error <= 1e-11);
    }
    world.barrier();
  }
}

TEST_CASE("data parallelism leaves the bits of DDP", "[engines]") {
  for (const char* dtype : {"training.dtype=fp64", "training.dtype=fp32"}) {
    for (const char* model : {"gpt2", "vgg"}) {
      for (const Overrides& recipe : kRecipes) {
        const Overrides common = joined({recipe, {dtype, "training.deterministic=true"}});
        const Outcome ddp = train(model, joined({common, {"engine.name=ddp"}}));
        std::vector<Overrides> ways = kTimings;
        // LAMB adds up the norm of a divided weight slice by slice.
        if (recipe != kRecipes.back()) ways.insert(ways.end(), kSharded.begin(), kSharded.end());
        for (const Overrides& knobs : ways) {
          const Overrides overrides = joined({common, {"engine.name=lbann"}, knobs});
          INFO(model << ": " << text_of(overrides));
          const Outcome lbann = train(model, overrides);
          CHECK(lbann.losses == ddp.losses);
          CHECK(lbann.values == ddp.values);
          CHECK(lbann.validation.loss_sum == ddp.validation.loss_sum);
        }
      }
    }
  }
}

TEST_CASE("two ranks have DDP's bits with the reductions of MPI as well", "[engines]") {
  if (test_world().info().size != 2) return;
  const Outcome ddp = train("gpt2", {"engine.name=ddp", "training.dtype=fp32"});
  for (const std::vector<Overrides>& ways : {kTimings, kSharded}) {
    for (const Overrides& knobs : ways) {
      INFO(text_of(knobs));
      const Outcome lbann = train("gpt2", joined({{"engine.name=lbann", "training.dtype=fp32"}, knobs}));
      CHECK(lbann.losses == ddp.losses);
      CHECK(lbann.values == ddp.values);
    }
  }
}

TEST_CASE("memory and bytes are those of the formulas", "[engines]") {
  World& world = test_world();
  for (const char* model : {"gpt2", "vgg"}) {
    for (const Overrides& recipe : {kRecipes[1], kRecipes[4]}) {
      for (const Overrides& knobs : options_of(model)) {
        const Overrides overrides =
            joined({{"engine.name=lbann", "workload.train_samples=48", "training.dtype=fp32"}, recipe, knobs});
        INFO(model << ": " << text_of(overrides));
        const std::unique_ptr<Experiment> experiment = make_experiment(world, tiny_config(model), overrides);
        const Prediction prediction = experiment->engine->predict();
        experiment->engine->prepare();
        experiment->ledger.take();
        experiment->device->memory().reset_peak();
        Observer nobody;
        experiment->engine->run_epoch(EpochPlan(48, 12, 1, 0, true, false, 2), nobody);
        CommCounts counted = experiment->ledger.take();
        std::erase_if(counted, [](const auto& entry) { return entry.second.bytes == 0; });  // of one rank alone
        CHECK(counted.size() == prediction.comm_per_step.size());
        for (const auto& [operation, count] : prediction.comm_per_step) {
          INFO(operation);
          CHECK(counted[operation].calls == 2 * count.calls);
          CHECK(counted[operation].bytes == 2 * count.bytes);
        }
        for (int kind = 0; kind < kMemoryKinds; ++kind) {
          const auto tag = static_cast<MemoryKind>(kind);
          INFO(kMemoryKindNames[static_cast<std::size_t>(kind)]);
          CHECK(experiment->device->memory().peak()[tag] == prediction.memory[tag]);
        }
      }
    }
  }
}

TEST_CASE("of sharded weights a rank holds its share and the largest layer, and sends 4fP", "[engines]") {
  World& world = test_world();
  const std::int64_t ranks = world.info().size;
  const auto sliced = [&](std::int64_t elements) { return (elements + 8 * ranks - 1) / (8 * ranks) * 8; };
  for (const char* model : {"gpt2", "vgg"}) {
    for (const std::int64_t micro_batches : {1, 3}) {
      if (12 / ranks % micro_batches != 0) continue;
      INFO(model << ", " << micro_batches << " micro-batches");
      const std::unique_ptr<Experiment> experiment =
          make_experiment(world, tiny_config(model),
                          {"engine.name=lbann", "engine.sharded=true", "workload.train_samples=48",
                           str("training.micro_batch_size=", 12 / ranks / micro_batches),
                           R"(training.optimizer={"name": "adamw", "lr": 0.001})"});
      experiment->engine->prepare();
      experiment->ledger.take();
      Observer nobody;
      experiment->engine->run_epoch(EpochPlan(48, 12, 1, 0, true, false, 1), nobody);
      CommCounts counted = experiment->ledger.take();

      const LayerList layers = experiment->model.build(LayerFactory());
      const ParamStore store = make_param_store(layers, 0, static_cast<int>(layers.size()));
      std::int64_t slices = 0, all = 0, largest = 0, used = 0;
      for (const Param& param : store.params()) {
        slices += sliced(param.count);
        all += param.count;
      }
      int registered = 0;
      for (const auto& layer : layers) {  // a tied weight is gathered for each of its layers
        std::int64_t whole = 0;
        for (std::size_t i = layer->param_specs().size(); i > 0; --i) {
          whole += ranks * sliced(store.params()[static_cast<std::size_t>(store.owner(registered++))].count);
        }
        largest = std::max(largest, whole);
        used += whole;
      }
      const MemoryByKind& held = experiment->device->memory().current();
      CHECK(held[MemoryKind::parameters] == (slices + largest) * 8);
      CHECK(held[MemoryKind::gradients] == ranks * slices * 8);
      CHECK(std::abs(static_cast<double>(held[MemoryKind::optimizer]) - static_cast<double>(2 * slices * 8)) <=
            0.01 * static_cast<double>(2 * slices * 8));
      const std::int64_t f_used = used / ranks * (ranks - 1);
      CHECK(counted["parameters.all_gather"].bytes == 2 * micro_batches * f_used * 8);
      std::int64_t sums = 0;
      for (const Param& param : store.params()) {
        sums += ring_bytes("all_reduce", static_cast<int>(ranks), param.count * 8);
      }
      CHECK(counted["world.all_reduce"].bytes == sums);
      CHECK(std::abs(sums - 2 * all * 8 * (ranks - 1) / ranks) <= static_cast<std::int64_t>(store.params().size()));
    }
  }
}

TEST_CASE("sharded weights smaller than the number of ranks equal serial", "[engines]") {
  World& world = test_world();
  for (const Overrides& knobs : kSharded) {
    const std::unique_ptr<Experiment> experiment =
        make_experiment(world, tiny_config("vgg"),
                        joined({{"engine.name=lbann", "workload.classes=2", "workload.data=synthetic"}, knobs}));
    const Outcome outcome = train_for_comparison(*experiment, 2);
    if (world.info().rank == 0) {
      const Outcome reference = train_for_comparison(*make_reference_experiment(*experiment), 2);
      CHECK(worst_of(compare(outcome, reference)).error <= 1e-11);
    }
    world.barrier();
  }
}

TEST_CASE("LBANN names a rank with another plan, and both plans, before training", "[engines]") {
  World& world = test_world();
  const int last = world.info().size - 1;
  if (last == 0) return;
  for (const char* knob : {"engine.sharded=true", "engine.max_inflight=0", "training.micro_batch_size=1"}) {
    Overrides overrides = {"engine.name=lbann"};
    if (world.info().rank == last) overrides.push_back(knob);
    const std::unique_ptr<Experiment> experiment = make_experiment(world, tiny_config("vgg"), overrides);
    CHECK_THROWS_WITH(experiment->engine->prepare(),
                      ContainsSubstring("ranks have different plans: rank 0 means whole weights, ") &&
                          ContainsSubstring(str("; rank ", last, " means ")));
    world.barrier();
  }
}

TEST_CASE("options that exclude each other are refused, with a way out", "[engines]") {
  if (test_world().info().size == 1) return;
  const auto refuse = [](const char* model, const Overrides& overrides, const char* words) {
    INFO(text_of(overrides));
    CHECK_THROWS_WITH(make_experiment(test_world(), tiny_config(model), joined({{"engine.name=lbann"}, overrides})),
                      ContainsSubstring(words));
  };
  refuse("vgg", {"engine.sharded=true", "engine.fc=model"},
         "/engine/sharded (command line): true: not with fc=model; take false");
  refuse("gpt2", {"engine.sharded=true", "engine.procs_per_trainer=1"},
         "/engine/sharded (command line): true: not with several trainers; take false");
  refuse("gpt2", {"engine.sharded=true", "engine.update_group_elements=10"}, "slices are updated one by one");
  refuse("vgg", {"engine.fc=model", "engine.procs_per_trainer=1"}, "model: not with several trainers; take data");
  refuse("gpt2", {"engine.fc=model"}, "does not end with fully-connected layers; take data");
  refuse("gpt2", {"engine.ltfb_batch_interval=7"}, "acts between several trainers: set procs_per_trainer below ");
  refuse("gpt2", {"engine.procs_per_trainer=5"}, "5 does not divide ");
}

TEST_CASE("trainers that meet go on with the better of two models", "[engines]") {
  World& world = test_world();
  const int ranks = world.info().size, rank = world.info().rank;
  for (const int each : {1, 2}) {
    if (ranks % each != 0 || ranks == each) continue;
    INFO(each << " of " << ranks << " ranks per trainer");
    const int trainers = ranks / each;
    const std::unique_ptr<Experiment> experiment =
        make_experiment(world, tiny_config("vgg"),
                        {"engine.name=lbann", str("engine.procs_per_trainer=", each), "engine.ltfb_batch_interval=2",
                         "training.optimizer.lr=0", "training.dtype=fp32"});
    Engine& engine = *experiment->engine;
    CHECK_THAT(engine.describe().differences.back(), StartsWith("LTFB, ") && ContainsSubstring("not synchronous SGD"));
    const CommCounts predicted = engine.predict().comm_per_step;
    engine.prepare();
    const Tensor weights = engine.state().front().tensor;
    const auto is_spoiled = [&](int trainer) { return trainer % 2 == 1; };
    const auto values = [&] {
      return std::vector<float>(weights.data<float>(), weights.data<float>() + weights.elements());
    };
    if (is_spoiled(rank / each)) experiment->backend->scale(weights, 30.0);
    const std::vector<float> before = values();
    experiment->ledger.take();
    Observer nobody;
    engine.run_epoch(EpochPlan(60, 12, 1, 0, true, false, 1), nobody);  // one update: no meeting yet
    CHECK(values() == before);
    CommCounts counted = experiment->ledger.take();
    for (const auto& [operation, count] : predicted) {
      INFO(operation);
      CHECK(counted[operation].bytes == count.bytes);
      CHECK(counted[operation].calls == count.calls);
    }
    engine.run_epoch(EpochPlan(60, 12, 1, 0, true, false, 1), nobody);  // the second one: they meet
    const int partner = tournament_partner(rank / each, trainers, experiment->config.training.seed, 1);
    const bool changes = is_spoiled(rank / each) && !is_spoiled(partner);
    CHECK((values() != before) == changes);
    if (changes) {
      std::vector<float> unspoiled = before;
      for (float& value : unspoiled) value /= 30.0F;
      double worst = 0.0;
      for (std::size_t i = 0; i < unspoiled.size(); ++i) {
        worst = std::max(worst, std::abs(static_cast<double>(unspoiled[i]) - static_cast<double>(values()[i])));
      }
      CHECK(worst < 1e-6);
    }
    counted = experiment->ledger.take();
    CHECK(counted["world.send"].bytes == (partner == rank / each ? 0 : weights.bytes()));
  }
}

TEST_CASE("the trainers' losses until they meet are those of models trained apart", "[engines]") {
  if (test_world().info().size == 1) return;  // one trainer
  const auto losses = [](const char* interval) {
    return train("gpt2", {"engine.name=lbann", "engine.procs_per_trainer=1", interval}, 5).losses;
  };
  const std::vector<double> apart = losses("engine.ltfb_batch_interval=1000");
  const std::vector<double> meeting = losses("engine.ltfb_batch_interval=3");
  for (std::size_t step = 0; step < 3; ++step) CHECK(meeting[step] == apart[step]);
  CHECK(meeting[4] != apart[4]);
}

TEST_CASE("one rank has the bits of serial and communicates nothing", "[engines]") {
  World& world = test_world();
  for (const char* model : {"gpt2", "vgg"}) {
    const std::unique_ptr<Experiment> any = make_experiment(world, tiny_config(model), {"engine.name=lbann"});
    const Outcome serial = train_for_comparison(*make_reference_experiment(*any), 5);
    for (const Overrides& knobs : {Overrides{}, Overrides{"max_inflight=0"}, Overrides{"sharded=true"}}) {
      INFO(model << " " << text_of(knobs));
      const std::unique_ptr<Experiment> alone = make_lone_experiment(*any, "lbann", knobs);
      CHECK(alone->engine->predict().comm_per_step.empty());
      CHECK(alone->engine->predict().warnings.empty());
      CHECK(worst_of(compare(train_for_comparison(*alone, 5), serial)).error == 0.0);
      alone->ledger.take();
      Observer nobody;
      alone->engine->run_epoch(EpochPlan(60, 12, 1, 1, true, false, 2), nobody);
      for (const auto& [operation, count] : alone->ledger.take()) {
        INFO(operation);
        CHECK(operation.starts_with("control."));  // the agreement on loss and stop
        CHECK(count.bytes == 0);
      }
    }
  }
}
