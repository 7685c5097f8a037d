// What the zero engine claims beyond agreeing with its reference: bits equal to DDP's where sums have one order, memory
// and bytes by the paper's formulas, a plan that all ranks share, one rank that pays for nothing.

#include <algorithm>
#include <cmath>

#include "cli/comparison.h"
#include "tests/support/catch.h"
#include "tests/support/lone_engine.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

Outcome train(const char* model, const Overrides& overrides, int steps = 4) {
  return train_for_comparison(*make_experiment(test_world(), tiny_config(model), overrides), steps);
}

/// Losses everywhere; weights and validation where they are known, on rank 0.
bool same_bits(const Outcome& a, const Outcome& b) {
  return a.losses == b.losses && a.values == b.values && a.validation.loss_sum == b.validation.loss_sum;
}

Overrides zero(int stage, const Overrides& more = {}) {
  return joined({"engine.name=zero", "engine.stage=" + std::to_string(stage)}, more);
}

/// Settings that change how sums are brought about, but not their order.
std::vector<Overrides> ways_of(int stage) {
  std::vector<Overrides> ways = {zero(stage),
                                 zero(stage, {"engine.reduce_bucket_size=1"}),
                                 zero(stage, {"engine.reduce_bucket_size=1500", "engine.overlap_comm=false"}),
                                 zero(stage, {"engine.reduce_bucket_size=900", "engine.reductions_in_flight=5"}),
                                 zero(stage, {"engine.preset=deepspeed", "engine.reduce_bucket_size=3000"}),
                                 zero(stage, {"engine.preset=deepspeed-2021", "engine.reduce_bucket_size=3000"})};
  if (stage < 3) {
    ways.push_back(zero(stage, {"engine.overlap_all_gather=false"}));
  } else {
    ways.push_back(zero(stage, {"engine.stage3_prefetch_bucket_size=0"}));
    ways.push_back(zero(stage, {"engine.stage3_prefetch_bucket_size=3000", "engine.stage3_max_reuse_distance=2000"}));
    ways.push_back(zero(stage, {"engine.stage3_param_persistence_threshold=100", "engine.reduction=all_reduce"}));
    ways.push_back(zero(stage, {"engine.reduction=reduce", "engine.reduce_bucket_size=2000"}));
  }
  return ways;
}

std::string name_of(const Overrides& overrides) {
  std::string text;
  for (const std::string& override_text : overrides) text += override_text + " ";
  return text;
}

/// An experiment and the counts of one steady step.
struct Counted {
  explicit Counted(const char* model, const Overrides& overrides)
      : experiment(make_experiment(test_world(), tiny_config(model), overrides)) {
    Observer nobody;
    experiment->engine->prepare();
    experiment->engine->run_epoch(EpochPlan(60, 12, 1, 0, true, false, 1), nobody);
    experiment->ledger.take();
    experiment->engine->run_epoch(EpochPlan(60, 12, 1, 0, true, false, 1), nobody);
    counts = experiment->ledger.take();
  }
  std::int64_t bytes(const std::string& operation) const {
    const auto found = counts.find(operation);
    return found == counts.end() ? 0 : found->second.bytes;
  }
  std::int64_t held(MemoryKind kind) const { return experiment->device->memory().current()[kind]; }

  std::unique_ptr<Experiment> experiment;
  CommCounts counts;
};

std::int64_t parameters_of(const Experiment& experiment) {
  return parameter_count(experiment.model.build(LayerFactory()));
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

TEST_CASE("with sums in rank order, every stage in every way has the bits of DDP", "[zero]") {
  for (const char* model : {"gpt2", "vgg"}) {
    for (const char* dtype : {"fp32", "fp64"}) {
      const Overrides recipe = {"training.deterministic=true", std::string("training.dtype=") + dtype,
                                "workload.train_samples=43"};
      const Outcome ddp = train(model, joined({"engine.name=ddp"}, recipe));
      for (int stage : {1, 2, 3}) {
        for (const Overrides& way : ways_of(stage)) {
          INFO(model << " " << dtype << " " << name_of(way));
          CHECK(same_bits(train(model, joined(way, recipe)), ddp));
        }
      }
    }
  }
}

TEST_CASE("two ranks have the bits of DDP also with the reductions of MPI: a sum of two has one order", "[zero]") {
  if (test_world().info().size != 2) return;
  const Overrides recipe = {"training.dtype=fp32"};
  const Outcome ddp = train("gpt2", joined({"engine.name=ddp"}, recipe));
  for (int stage : {1, 2, 3}) {
    for (const Overrides& way : ways_of(stage)) {
      INFO(name_of(way));
      CHECK(same_bits(train("gpt2", joined(way, recipe)), ddp));
    }
  }
}

TEST_CASE("accumulation: stage 1 adds up as DDP does; stages 2 and 3 reduce each micro-batch, alike", "[zero]") {
  const Overrides recipe = {"training.deterministic=true", "training.dtype=fp32", "training.micro_batch_size=1",
                            "workload.train_samples=38"};  // at last two samples for all ranks
  const Outcome ddp = train("gpt2", joined({"engine.name=ddp"}, recipe));
  for (const Overrides& way : ways_of(1)) {
    INFO(name_of(way));
    CHECK(same_bits(train("gpt2", joined(way, recipe)), ddp));
  }
  const Outcome stage_2 = train("gpt2", joined(zero(2), recipe));
  CHECK_FALSE(same_bits(stage_2, ddp));  // a sum of reductions is no reduction of sums
  for (int stage : {2, 3}) {
    for (const Overrides& way : ways_of(stage)) {
      INFO(name_of(way));
      CHECK(same_bits(train("gpt2", joined(way, recipe)), stage_2));
    }
  }
}

TEST_CASE("clipping: norms of cut parameters round to the factor of whole ones", "[zero]") {
  const Overrides recipe = {"training.deterministic=true", "training.dtype=fp32",
                            R"(training.optimizer={"name": "adamw", "lr": 0.003, "clip_grad_norm": 0.05})"};
  const Outcome ddp = train("gpt2", joined({"engine.name=ddp"}, recipe));
  for (int stage : {1, 2, 3}) {
    for (const Overrides& way : ways_of(stage)) {
      INFO(name_of(way));
      CHECK(same_bits(train("gpt2", joined(way, recipe)), ddp));
    }
  }
}

TEST_CASE("memory by kind is what the paper's formulas say", "[zero]") {
  const std::int64_t ranks = test_world().info().size;
  for (const char* dtype : {"fp32", "fp64"}) {
    for (int stage : {1, 2, 3}) {
      INFO(dtype << ", stage " << stage);
      const Counted run("vgg", zero(stage, {std::string("training.dtype=") + dtype, "workload.classifier_width=200",
                                            R"(training.optimizer={"name": "adamw", "lr": 0.001})"}));
      const auto psi = static_cast<double>(parameters_of(*run.experiment) * (std::string(dtype) == "fp32" ? 4 : 8));
      const auto share = psi / static_cast<double>(ranks);
      const auto near = [](std::int64_t measured, double formula) {
        INFO(measured << " against " << formula);
        CHECK(std::abs(static_cast<double>(measured) - formula) <= 0.01 * formula);
      };
      near(run.held(MemoryKind::optimizer), 2 * share);  // two moments, no master weights beside wide values
      near(run.held(MemoryKind::gradients), stage == 1 ? psi : share);
      if (stage < 3) near(run.held(MemoryKind::parameters), psi);
      if (stage == 3) {
        CHECK(static_cast<double>(run.held(MemoryKind::parameters)) > share);
        CHECK(static_cast<double>(run.held(MemoryKind::parameters)) < psi + share);
      }
    }
  }
}

TEST_CASE("bytes of a step are the paper's, exactly", "[zero]") {
  const std::int64_t ranks = test_world().info().size;
  const auto share = [&](std::int64_t elements) { return elements * 8 / ranks * (ranks - 1); };  // f elements, fp64
  for (std::int64_t micro_batches : {1, 3}) {
    if (12 / ranks % micro_batches != 0) continue;
    const std::string micro = "training.micro_batch_size=" + std::to_string(12 / ranks / micro_batches);
    for (int stage : {1, 2}) {
      INFO("stage " << stage << ", " << micro_batches << " micro-batches");
      const std::int64_t passes = stage == 1 ? 1 : micro_batches;
      const Counted textbook("vgg", zero(stage, {micro}));
      const std::int64_t psi = parameters_of(*textbook.experiment);
      CHECK(textbook.bytes("world.reduce_scatter") == passes * share(round_up(psi, 8 * ranks)));
      CHECK(textbook.bytes("world.all_gather") == share(round_up(psi, 8 * ranks)));
      CHECK(textbook.bytes("world.all_reduce") == 0);
      const Counted upstream("vgg",
                             zero(stage, {micro, "engine.preset=deepspeed", "engine.reduce_bucket_size=100000"}));
      CHECK(upstream.bytes("world.all_reduce") == passes * ring_bytes("all_reduce", static_cast<int>(ranks), psi * 8));
      CHECK(upstream.bytes("world.all_gather") == share(round_up(psi, 2 * ranks)));
      const Counted old("vgg",
                        zero(stage, {micro, "engine.preset=deepspeed-2021", "engine.reduce_bucket_size=100000"}));
      const std::int64_t reduced = passes * (ring_bytes("reduce", static_cast<int>(ranks), psi * 8));
      CHECK(std::abs(old.bytes("world.reduce") - reduced) <= passes * ranks);  // rounded owner by owner
      CHECK(old.bytes("world.all_gather") == share(round_up(psi, 2 * ranks)));
    }
    // Stage 3 gathers for the forward and for the backward pass; what is on its way to the next use stays at the turn.
    std::int64_t blocks = 0, last = 0;
    const Counted strict("vgg", zero(3, {micro, "engine.stage3_prefetch_bucket_size=0"}));
    for (const auto& layer : strict.experiment->model.build(LayerFactory())) {
      std::int64_t elements = 0;
      for (const ParamSpec& spec : layer->param_specs()) elements += spec.shape().elements();
      blocks += round_up(elements, 8 * ranks);
      if (elements > 0) last = round_up(elements, 8 * ranks);
    }
    INFO("stage 3, " << micro_batches << " micro-batches");
    CHECK(strict.bytes("world.reduce_scatter") == micro_batches * share(blocks));
    CHECK(strict.bytes("parameters.all_gather") == micro_batches * 2 * share(blocks));
    const Counted ahead("vgg", zero(3, {micro}));
    CHECK(ahead.bytes("world.reduce_scatter") == micro_batches * share(blocks));
    CHECK(ahead.bytes("parameters.all_gather") == micro_batches * (2 * share(blocks) - share(last)));
    // With upstream's reuse distance nothing is let go in between: one gathering.
    const Counted kept("vgg", zero(3, {micro, "engine.stage3_max_reuse_distance=1e9"}));
    CHECK(kept.bytes("parameters.all_gather") == micro_batches * share(blocks));
  }
}

TEST_CASE("padding of weights and moments stays zero", "[zero]") {
  const int rank = test_world().info().rank, ranks = test_world().info().size;
  for (const char* preset : {"textbook", "deepspeed"}) {
    const Counted run("gpt2", zero(2, {std::string("engine.preset=") + preset, "engine.reduce_bucket_size=100000",
                                       R"(training.optimizer={"name": "adamw", "lr": 0.01})"}));
    const std::int64_t psi = parameters_of(*run.experiment);
    for (const StateTensor& state : run.experiment->engine->state()) {
      const std::int64_t slice = state.tensor.elements();
      CHECK(slice == round_up(psi, (std::string(preset) == "textbook" ? 8 : 2) * ranks) / ranks);
      for (std::int64_t i = std::max<std::int64_t>(0, psi - rank * slice); i < slice; ++i) {
        CHECK(state.tensor.data<double>()[i] == 0.0);
      }
    }
  }
}

TEST_CASE("parameters smaller than the number of ranks, and larger than every bucket", "[zero]") {
  for (int stage : {1, 2, 3}) {
    for (const char* preset : {"textbook", "deepspeed", "deepspeed-2021"}) {
      INFO("stage " << stage << ", " << preset);
      const std::unique_ptr<Experiment> experiment =
          make_experiment(test_world(), tiny_config("vgg"),
                          zero(stage, {std::string("engine.preset=") + preset, "engine.reduce_bucket_size=1",
                                       "workload.classes=2", "workload.data=synthetic"}));
      const Outcome outcome = train_for_comparison(*experiment, 2);
      if (test_world().info().rank == 0) {
        const std::unique_ptr<Experiment> reference = make_reference_experiment(*experiment);
        CHECK(worst_of(compare(outcome, train_for_comparison(*reference, 2))).error <= 1e-11);
      }
      test_world().barrier();
    }
  }
}

TEST_CASE("hf-auto takes its sizes from the hidden size, and needs one", "[zero]") {
  const std::unique_ptr<Experiment> text =
      make_experiment(test_world(), tiny_config("gpt2"), zero(3, {"engine.preset=hf-auto"}));
  const std::int64_t h = *text->model.hidden_size;
  const EngineDescription description = text->engine->describe();
  CHECK(description.knobs.at("reduce_bucket_size") == std::to_string(h * h));
  CHECK(description.knobs.at("stage3_prefetch_bucket_size") == std::to_string(9 * h * h / 10));
  CHECK(description.knobs.at("stage3_param_persistence_threshold") == std::to_string(10 * h));

  const std::unique_ptr<Experiment> told = make_experiment(
      test_world(), tiny_config("gpt2"), zero(2, {"engine.preset=hf-auto", "engine.reduce_bucket_size=700"}));
  CHECK(told->engine->describe().knobs.at("reduce_bucket_size") == "700");
  CHECK_THROWS_WITH(make_experiment(test_world(), tiny_config("vgg"), zero(1, {"engine.preset=hf-auto"})),
                    ContainsSubstring("hf-auto: needs a hidden size, "));
}

TEST_CASE("a rank with another plan is named, with both plans, before training", "[zero]") {
  World& world = test_world();
  const bool odd = world.info().rank + 1 == world.info().size;
  for (const char* knob : {"engine.stage=2", "engine.reduce_bucket_size=700", "engine.reduction=all_reduce"}) {
    const std::unique_ptr<Experiment> experiment =
        make_experiment(world, tiny_config("gpt2"), odd ? Overrides{"engine.name=zero", knob} : zero(1));
    try {
      experiment->engine->prepare();
      FAIL("ranks with different plans began to train");
    } catch (const Error& error) {
      INFO(error.what());
      CHECK(error.code() == ExitCode::communication);
      CHECK_THAT(error.what(), ContainsSubstring("ranks have different plans: rank 0 means stage 1, "));
      CHECK_THAT(error.what(), ContainsSubstring("; rank " + std::to_string(world.info().size - 1) + " means stage "));
      CHECK_THAT(error.what(), ContainsSubstring(" ranks, ") && ContainsSubstring("layout "));
    }
    world.barrier();
  }
}

TEST_CASE("one rank alone divides, copies and sends nothing", "[zero]") {
  const std::unique_ptr<Experiment> any = make_experiment(test_world(), tiny_config("gpt2"), {"engine.name=ddp"});
  if (test_world().info().rank == 0) {
    const std::unique_ptr<Experiment> serial = make_reference_experiment(*any);
    const Outcome reference = train_for_comparison(*serial, 3);
    for (const EngineVariant& variant : find_engine("zero")->variants) {
      INFO(variant.name);
      const std::unique_ptr<Experiment> alone = make_lone_experiment(*any, "zero", variant.knobs);
      CHECK(same_bits(train_for_comparison(*alone, 3), reference));
      alone->ledger.take();
      Observer nobody;
      alone->engine->run_epoch(EpochPlan(60, 12, 1, 1, true, false, 2), nobody);
      for (const auto& [operation, count] : alone->ledger.take()) {
        INFO(operation);
        CHECK(operation == "control.all_reduce");  // of every synchronous engine: losses and stop flags
      }
      for (int kind = 0; kind < kMemoryKinds; ++kind) {
        const auto tag = static_cast<MemoryKind>(kind);
        if (tag == MemoryKind::workspace) continue;  // a few sums of squares more
        CHECK(alone->device->memory().current()[tag] == serial->device->memory().current()[tag]);
      }
    }
  }
  test_world().barrier();
}
