// What data-parallel engines may claim of each other's numbers, claim by claim. Those that one engine alone makes are
// tested beside it:
//
//   E0  all ranks hold the same bits after every step         here; divided weights: parameter_gatherer_test
//   E1  one rank alone has the bits of the plain loop         here, for every engine and variant
//   E2  all have DDP's bits, and DDP those of the ranks' parts one after another on one rank
//                                                             the latter here; zero_test, lbann_test
//   E3  so they do with MPI's own reductions on two ranks     zero_test, lbann_test
//   E4  buckets, prefetching and overlap change no bit        DDP's here; zero_test, lbann_test
//   E5  accumulation: DDP and ZeRO-1 have the same bits       zero_test
//   E6  accumulation: ZeRO-2 and 3 agree up to rounding only  zero_test, engines_test
//   E7  every engine agrees with the plain loop               in fp64 engines_test, in fp32 here
//   E8  clipping keeps the bits                               zero_test, lbann_test
//   E9  divided images: outputs and data gradients bit by bit, weight gradients up to rounding
//                                                             spatial_layers_test, spatial_engine_test
//   E10 divided neurons: outputs bit by bit, data gradients up to rounding
//                                                             neuron_layers_test, engines_test

#include <map>
#include <set>

#include "cli/comparison.h"
#include "parallel/sync/replicated_update.h"
#include "tests/support/catch.h"
#include "tests/support/engine_candidates.h"
#include "tests/support/lone_engine.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

std::unique_ptr<Experiment> make(const char* model, const Overrides& overrides) {
  return make_experiment(test_world(), tiny_config(model), overrides);
}

/// Engines whose ranks are data parallel and nothing else.
bool is_data_parallel(const Experiment& experiment) {
  const EngineDescription description = experiment.engine->describe();
  return description.dp == test_world().info().size;
}

std::string hash_of(const std::vector<StateTensor>& states) {
  std::string hash;
  for (const StateTensor& state : states) {
    std::uint64_t sum = 1469598103934665603ull;
    const auto* bytes = static_cast<const unsigned char*>(state.tensor.raw());
    for (std::int64_t i = 0; i < state.tensor.bytes(); ++i) sum = (sum ^ bytes[i]) * 1099511628211ull;
    hash += str(sum, " ");
  }
  return hash;
}

void check_same_bits(const Outcome& a, const Outcome& b) {
  CHECK(a.losses == b.losses);
  CHECK(a.values == b.values);
  CHECK(a.validation.loss_sum == b.validation.loss_sum);
}

/// The weights after steps of `ranks` replicas on one rank, whose gradients are added in rank order.
std::map<std::string, std::vector<double>> train_one_after_another(const Experiment& of, int ranks, int steps) {
  const std::unique_ptr<Experiment> alone = make_reference_experiment(of);
  const EngineContext& context = *alone->context;
  const EpochPlan plan(context.train_samples, context.training.global_batch, context.training.seed, 0, true, false,
                       steps);
  std::vector<std::unique_ptr<Replica>> replicas;
  std::vector<ReplicatedUpdate> updates;
  for (int rank = 0; rank < ranks; ++rank) {
    replicas.push_back(
        std::make_unique<Replica>(context, DataParallelPlace{.rank = rank, .size = ranks}, LayerFactory()));
    replicas.back()->prepare();
    replicas.back()->begin_training(plan);
    updates.emplace_back(context);
    updates.back().prepare(*replicas.back());
  }
  Observer nobody;
  for (int step = 0; step < steps; ++step) {
    const StepOrder order = {.update = step,
                             .global_samples = static_cast<std::int64_t>(plan.step_ids(step).size()),
                             .lr = context.training.optimizer.lr};
    for (const auto& replica : replicas) replica->accumulate(order, nullptr, nobody);
    const Tensor sum = replicas.front()->store().grads();
    for (std::size_t rank = 1; rank < replicas.size(); ++rank)
      context.backend.add(sum, replicas[rank]->store().grads(), 1.0);
    for (std::size_t rank = 0; rank < replicas.size(); ++rank) {
      if (rank > 0) context.backend.copy(replicas[rank]->store().grads(), sum);
      updates[rank].apply(*replicas[rank], order);
    }
  }
  std::map<std::string, std::vector<double>> weights;
  replicas.front()->visit_parameters([&](const ParamSpec& spec, int, const Tensor& values) {
    std::vector<double>& all = weights[spec.name];
    for (std::int64_t i = 0; i < values.elements(); ++i) {
      all.push_back(values.dtype() == DType::fp64 ? values.data<double>()[i]
                                                  : static_cast<double>(values.data<float>()[i]));
    }
  });
  return weights;
}

}  // namespace

TEST_CASE("E0: replicas hold the same bits after every step", "[equivalence]") {
  World& world = test_world();
  for (const char* model : {"gpt2", "vgg"}) {
    int replicated = 0;
    for (const Candidate& candidate : candidates(world.info().size, model)) {
      const std::unique_ptr<Experiment> experiment =
          make(model, joined(candidate.overrides, {"workload.train_samples=38"}));  // 2 are left for the last step
      if (!experiment->engine->describe().replicated_state) continue;
      ++replicated;
      experiment->engine->prepare();
      Observer nobody;
      for (int step = 1; step <= 4; ++step) {
        INFO(candidate.name << ", " << model << ", after " << step << " more steps");
        experiment->engine->run_epoch(EpochPlan(38, 12, 1, 0, true, false, step), nobody);
        const std::vector<std::string> hashes = world.gather(hash_of(experiment->engine->state()));
        CHECK(std::set<std::string>(hashes.begin(), hashes.end()).size() == 1);
      }
    }
    CHECK(replicated >= 2);
  }
}

TEST_CASE("E1: one rank alone has the bits of the plain loop", "[equivalence]") {
  if (test_world().info().size != 2) return;  // the same on any number
  const std::vector<Overrides> recipes = {
      {},
      {"training.micro_batch_size=1", "workload.train_samples=43",
       R"(training.optimizer={"name": "adamw", "lr": 0.003, "clip_grad_norm": 0.05})"},
      {R"(training.optimizer={"name": "lamb", "lr": 0.01, "weight_decay": 0.01})"}};
  for (const char* model : {"gpt2", "vgg"}) {
    for (const Overrides& recipe : recipes) {
      const std::unique_ptr<Experiment> any = make(model, joined({"engine.name=ddp"}, recipe));
      if (test_world().info().rank == 0) {
        const Outcome serial = train_for_comparison(*make_reference_experiment(*any), 5);
        for (const char* engine : {"ddp", "zero", "lbann"}) {
          std::vector<EngineVariant> variants = find_engine(engine)->variants;
          variants.push_back({.name = "defaults", .knobs = {}});
          for (const EngineVariant& variant : variants) {
            if (!std::string(model).starts_with(variant.models)) continue;
            INFO(engine << ", " << variant.name << ", " << model << ", recipe "
                        << (recipe.empty() ? "plain" : recipe.back()));
            check_same_bits(train_for_comparison(*make_lone_experiment(*any, engine, variant.knobs), 5), serial);
          }
        }
      }
      test_world().barrier();
    }
  }
}

TEST_CASE("E2: DDP has the bits of its ranks' parts one after another on one rank", "[equivalence]") {
  World& world = test_world();
  for (const char* dtype : {"training.dtype=fp64", "training.dtype=fp32"}) {
    for (const char* model : {"gpt2", "vgg"}) {
      INFO(model << " " << dtype);
      const std::unique_ptr<Experiment> ddp =
          make(model, {"engine.name=ddp", "training.deterministic=true", "workload.train_samples=43", dtype});
      const Outcome outcome = train_for_comparison(*ddp, 4);
      if (world.info().rank == 0) {
        CHECK(outcome.values == train_one_after_another(*ddp, world.info().size, 4));
      }
      world.barrier();
    }
  }
}

TEST_CASE("E4: DDP's buckets and their places change no bit", "[equivalence]") {
  for (const char* model : {"gpt2", "vgg"}) {
    const Overrides recipe = {"engine.name=ddp", "training.deterministic=true", "training.dtype=fp32",
                              "workload.train_samples=43"};
    const Outcome plain = train_for_comparison(*make(model, recipe), 5);
    for (const EngineVariant& variant : find_engine("ddp")->variants) {
      INFO(model << ", " << variant.name);
      Overrides overrides = recipe;
      for (const std::string& knob : variant.knobs) overrides.push_back("engine." + knob);
      check_same_bits(train_for_comparison(*make(model, overrides), 5), plain);
    }
  }
}

TEST_CASE("E7: in fp32 every data-parallel engine stays with the plain loop for ten steps", "[equivalence]") {
  World& world = test_world();
  // 7 samples are left in the last step, for a ragged part on every rank.
  const Overrides recipe = {"training.dtype=fp32", "workload.train_samples=115", "training.optimizer.lr=0.01"};
  Outcome serial;
  for (const Candidate& candidate : candidates(world.info().size, "gpt2")) {
    const std::unique_ptr<Experiment> experiment = make("gpt2", joined(recipe, candidate.overrides));
    if (!is_data_parallel(*experiment)) continue;
    INFO(candidate.name);
    const Outcome outcome = train_for_comparison(*experiment, 10);
    REQUIRE(outcome.losses.size() == 10);
    if (world.info().rank == 0) {
      if (serial.losses.empty()) serial = train_for_comparison(*make_reference_experiment(*experiment), 10);
      const Deviation worst = worst_of(compare(outcome, serial));
      INFO("worst: " << worst.what);
      CHECK(worst.error < 1e-4);
    }
    world.barrier();
  }
}
