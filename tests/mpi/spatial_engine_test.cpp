// Whole models with divided images against the serial engine. The engine here is data parallel with one all-reduce of
// all gradients; what is tested is that its replicas may be divided by rows without its knowing.

#include "cli/comparison.h"
#include "parallel/shard/spatial_split.h"
#include "parallel/sync/replica.h"
#include "parallel/sync/replicated_update.h"
#include "parallel/synchronous_engine.h"
#include "tests/support/catch.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

class DividedReplicas final : public StepMethod {
 public:
  DividedReplicas(const EngineContext& context, const SpatialOptions& options)
      : context_(context),
        split_(context, options, dense_),
        replica_(split_.context(), {split_.group(), split_.groups()}, split_.factory()),
        update_(context) {}

  double train_step(const StepOrder& order, Observer& observer) override {
    replica_.accumulate(order, nullptr, observer);
    Stream& stream = context_.device.compute_stream();
    context_.world.all_reduce(replica_.store().grads(), ReduceOp::sum, stream).wait(stream);
    return update_.apply(replica_, order);
  }
  void prepare() override {
    split_.prepare();
    replica_.prepare();
    update_.prepare(replica_);
  }
  EngineDescription describe() const override {
    EngineDescription description;
    description.name = "divided";
    description.dp = split_.groups();
    return description;
  }
  Prediction predict() const override {
    Prediction prediction;
    prediction.memory = replica_.predicted_memory();
    prediction.memory[MemoryKind::optimizer] += update_.predicted_bytes(replica_);
    prediction.memory[MemoryKind::communication] += split_.predicted_bytes();
    prediction.comm_per_step["world.all_reduce"] = {
        .calls = 1,
        .bytes = ring_bytes("all_reduce", context_.world.size(),
                            replica_.store().elements() * size_of(context_.training.dtype))};
    const std::int64_t local = largest_local_batch(context_.training.global_batch, split_.groups());
    for (const Part& micro_batch : split_in_pieces(local, replica_.micro_batch())) {
      for (const auto& [operation, count] : split_.traffic(micro_batch.count)) {
        prediction.comm_per_step[operation].calls += count.calls;
        prediction.comm_per_step[operation].bytes += count.bytes;
      }
    }
    prediction.tables.push_back(split_.table());
    return prediction;
  }
  HeldModel& model() override { return replica_; }
  std::vector<StateTensor> state() override { return update_.state(replica_); }

 private:
  const EngineContext& context_;
  LayerFactory dense_;
  SpatialSplit split_;
  Replica replica_;
  ReplicatedUpdate update_;
};

/// An experiment whose engine divides images into `height` slices.
std::unique_ptr<Experiment> divided(int height, std::vector<std::string> overrides, bool overlap = true) {
  std::unique_ptr<Experiment> experiment = make_experiment(test_world(), tiny_config("vgg"), overrides);
  experiment->engine = make_synchronous_engine(
      *experiment->context,
      std::make_unique<DividedReplicas>(*experiment->context, SpatialOptions{.height = height, .overlap = overlap}));
  return experiment;
}

/// Heights into which images of 32 or, on three ranks, 96 rows can be divided.
std::vector<int> heights() {
  switch (test_world().info().size) {
    case 2:
      return {1, 2};
    case 4:
      return {1, 2, 4};
    default:
      return {test_world().info().size};
  }
}
/// An odd micro-batch where it divides a rank's part.
std::string micro_batch() { return str("training.micro_batch_size=", test_world().info().size == 3 ? 2 : 3); }
std::string image_size() { return test_world().info().size == 3 ? "workload.image_size=96" : "workload.image_size=32"; }

}  // namespace

TEST_CASE("a model with divided images equals the serial engine", "[spatial]") {
  const std::vector<std::vector<std::string>> variants = {
      {},
      {"training.micro_batch_size=1"},               // fewer whole samples than ranks of a group
      {micro_batch(), "workload.train_samples=43"},  // ragged: 7 samples are left
      {"training.optimizer.clip_grad_norm=0.05", "workload.train_samples=37"},  // 1 is left
      {"training.deterministic=true"},
  };
  for (const int height : heights()) {
    for (std::vector<std::string> overrides : variants) {
      INFO(height << " slices, " << (overrides.empty() ? "plain" : overrides.front()));
      overrides.push_back(image_size());
      const std::unique_ptr<Experiment> experiment = divided(height, overrides);
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
    for (const std::string& samples : {std::string("training.micro_batch_size=1"), micro_batch()}) {
      INFO(height << " slices, " << samples);
      const std::unique_ptr<Experiment> experiment =
          divided(height, {samples, image_size(), "training.deterministic=true", "workload.train_samples=24"});
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
      activations[height] = prediction.memory[MemoryKind::activations];
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
    INFO(height << " slices");  // halos and whole samples come on top of 1/p
    if (activations.contains(1)) CHECK(bytes < 1.25 * static_cast<double>(activations.at(1)) / height);
  }
}

TEST_CASE("neither overlap nor a data store changes what is trained", "[spatial]") {
  const int height = heights().back();
  const auto outcome = [&](bool overlap, const std::string& store) {
    return train_for_comparison(
        *divided(height, {image_size(), "training.deterministic=true", "loader.data_store.enabled=" + store}, overlap),
        3);
  };
  const Outcome plain = outcome(true, "false"), waiting = outcome(false, "false"), stored = outcome(true, "true");
  CHECK(plain.losses == stored.losses);
  CHECK(plain.values == stored.values);
  // Weight gradients are added up in another order.
  for (std::size_t step = 0; step < plain.losses.size(); ++step)
    CHECK(std::abs(plain.losses[step] - waiting.losses[step]) <= 1e-12 * plain.losses[step]);
}
