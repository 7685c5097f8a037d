// The pipeline machine on several ranks, with every schedule that flushes: against one rank that runs the same
// schedule, and against plain accumulation. fp64, dropout on.

#include "cli/comparison.h"
#include "parallel/pipeline/staged_model.h"
#include "tests/support/catch.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

struct Scheme {
  std::string schedule;  ///< "always", "except_last", "never": fill-drain; "1F1B"; "interleaved"
  int micro_batches = 1;
  bool gathered_loss = false;
};

Schedule schedule_of(const Scheme& scheme, int stages, int micro_batches) {
  if (scheme.schedule == "1F1B") return one_forward_one_backward(stages, micro_batches);
  if (scheme.schedule == "interleaved") {
    const bool is_whole = micro_batches < stages || micro_batches % stages == 0;
    return interleaved(stages, micro_batches, 2, is_whole ? stages : micro_batches);
  }
  const Checkpoint mode = scheme.schedule == "always"  ? Checkpoint::always
                          : scheme.schedule == "never" ? Checkpoint::never
                                                       : Checkpoint::except_last;
  return fill_drain(stages, micro_batches, mode, scheme.gathered_loss);
}

/// Micro-batches that interleave on this number of ranks: a multiple of it that leaves a step of 7 samples whole.
int interleavable() {
  const int ranks = test_world().info().size;
  return ranks == 2 ? 4 : ranks;
}

/// An engine of one schedule.
class Scheduled final : public StepMethod {
 public:
  Scheduled(const EngineContext& context, const Scheme& scheme) : model_(context, options(context, scheme)) {}

  StepOutcome train_step(const StepOrder& order, Observer& observer) override {
    return model_.train_step(order, observer);
  }
  void prepare() override { model_.prepare(); }
  EngineDescription describe() const override { return {}; }
  Prediction predict() const override {
    return {
        .memory = model_.predicted_memory(), .comm_per_step = model_.predicted_traffic(), .tables = {}, .warnings = {}};
  }
  StagedModel& model() override { return model_; }
  std::vector<StateTensor> state() override { return model_.state(); }

 private:
  static PipelineOptions options(const EngineContext& context, const Scheme& scheme) {
    const int stages = context.world.size(), chunks = scheme.schedule == "interleaved" && stages > 1 ? 2 : 1;
    const LayerList layers = context.model.build(LayerFactory());
    const std::vector<double> costs(layers.size() - 1, 1.0);
    return {.balance = minimax_balance(costs, stages * chunks),
            .stages = stages,
            .chunks = chunks,
            .micro_batches = scheme.micro_batches,
            .gathered_loss = scheme.gathered_loss,
            .schedule =
                [scheme, stages](int micro_batches) {
                  return stages == 1 && scheme.schedule == "interleaved" ? one_forward_one_backward(1, micro_batches)
                                                                         : schedule_of(scheme, stages, micro_batches);
                },
            .grid = ProcessGrid({.pp = stages})};
  }
  StagedModel model_;
};

/// The experiment with its engine replaced; the method stays reachable.
Scheduled& replace_engine(Experiment& experiment, const Scheme& scheme) {
  auto method = std::make_unique<Scheduled>(*experiment.context, scheme);
  Scheduled& reachable = *method;
  experiment.engine = make_synchronous_engine(*experiment.context, std::move(method));
  return reachable;
}

/// An experiment whose ranks do not divide the batch.
std::unique_ptr<Experiment> undivided_experiment(const std::string& model, std::vector<std::string> overrides) {
  overrides.push_back("engine.name=torchgpipe");
  return make_experiment(test_world(), tiny_config(model), overrides);
}

struct Trained {
  Outcome outcome;
  PipelineExecutor::PassCounts counts;
};

Trained train(const std::string& model, const std::vector<std::string>& overrides, const Scheme& scheme, int steps) {
  const std::unique_ptr<Experiment> experiment = undivided_experiment(model, overrides);
  Scheduled& method = replace_engine(*experiment, scheme);
  Trained trained{.outcome = train_for_comparison(*experiment, steps), .counts = {}};
  trained.counts = method.model().executor().counts();
  return trained;
}

/// On rank 0 alone: the same schedule on one rank, or the serial engine without one.
Outcome train_alone(const std::string& model, const std::vector<std::string>& overrides, const Scheme* scheme,
                    int steps) {
  const std::unique_ptr<Experiment> experiment = undivided_experiment(model, overrides);
  if (test_world().info().rank != 0) return {};
  const std::unique_ptr<Experiment> alone = make_reference_experiment(*experiment);
  if (scheme != nullptr) replace_engine(*alone, *scheme);
  return train_for_comparison(*alone, steps);
}

double worst_error(const Outcome& outcome, const Outcome& reference) {
  return test_world().info().rank == 0 ? worst_of(compare(outcome, reference)).error : 0.0;
}

}  // namespace

TEST_CASE("stages on many ranks compute what one rank computes", "[pipeline]") {
  const std::string model = GENERATE("gpt2", "vgg");
  // A model of enough layers for two chunks on four ranks; a last step of 7 samples; clipping in force.
  const std::vector<std::string> overrides = {model == "gpt2" ? "workload.layers=6" : "workload.classifier_width=20",
                                              "workload.train_samples=43", "training.optimizer.clip_grad_norm=0.05"};
  for (const Scheme& scheme : std::vector<Scheme>{{"always", 4},
                                                  {"except_last", 5},
                                                  {"never", 3},
                                                  {"never", 1},
                                                  {"except_last", 4, true},
                                                  {"1F1B", 6},
                                                  {"1F1B", 2},
                                                  {"interleaved", interleavable()}}) {
    INFO(model << " on " << test_world().info().size << " ranks, " << scheme.schedule << ", " << scheme.micro_batches
               << " micro-batches");
    const Outcome outcome = train(model, overrides, scheme, 4).outcome;
    const double error = worst_error(outcome, train_alone(model, overrides, &scheme, 4));
    // One rank adds the two gradients of the tied embedding micro-batch by micro-batch, two ranks add two sums.
    CHECK(error <= (model == "gpt2" ? 1e-11 : 0.0));
    test_world().barrier();
  }
}

TEST_CASE("backwards in micro-batch order are plain accumulation, bit by bit", "[pipeline]") {
  for (int micro_batches : {2, 4, 12}) {
    const std::vector<std::string> overrides = {"training.micro_batch_size=" + std::to_string(12 / micro_batches)};
    const Scheme scheme{"1F1B", micro_batches};
    const Outcome outcome = train("vgg", overrides, scheme, 4).outcome;
    INFO(micro_batches << " micro-batches on " << test_world().info().size << " ranks");
    CHECK(worst_error(outcome, train_alone("vgg", overrides, nullptr, 4)) == 0.0);
    test_world().barrier();
  }
}

TEST_CASE("recomputation changes no bit, and is done as often as it should", "[pipeline]") {
  const std::string model = GENERATE("gpt2", "vgg");
  for (int m : {1, 3, 4, 8}) {  // of 12 samples: 8 are not all of one size
    INFO(model << ", " << m << " micro-batches on " << test_world().info().size << " ranks");
    const Trained always = train(model, {}, {"always", m}, 3);
    const Trained except_last = train(model, {}, {"except_last", m}, 3);
    const Trained never = train(model, {}, {"never", m}, 3);
    const Trained gathered = train(model, {}, {"never", m, true}, 3);
    CHECK(always.counts.recomputations == 3 * m);
    CHECK(except_last.counts.recomputations == 3 * (m - 1));
    CHECK(never.counts.recomputations == 0);
    CHECK(worst_error(never.outcome, train_alone(model, {}, nullptr, 3)) <= 1e-11);
    for (const Trained* trained : {&always, &except_last, &never, &gathered}) {
      CHECK(trained->counts.forwards == (3 + 1) * m);  // and one step of evaluation
      CHECK(trained->counts.backwards == 3 * m);
      CHECK(trained->outcome.losses == never.outcome.losses);
      CHECK(trained->outcome.values == never.outcome.values);
      CHECK(trained->outcome.validation.loss_sum == never.outcome.validation.loss_sum);
      CHECK(trained->outcome.validation.correct == never.outcome.validation.correct);
    }
  }
}

TEST_CASE("both copies of the tied embedding stay equal, bit by bit", "[pipeline]") {
  World& world = test_world();
  const std::unique_ptr<Experiment> experiment =
      undivided_experiment("gpt2", {"training.optimizer.clip_grad_norm=0.05"});
  Scheduled& method = replace_engine(*experiment, {"except_last", 4});
  REQUIRE(method.model().plan().tied().size() == 1);
  const TiedPair tied = method.model().plan().tied()[0];
  CHECK(tied.rank == 0);
  CHECK(tied.copy_rank == world.info().size - 1);
  experiment->engine->prepare();
  Observer nobody;
  std::string before;
  for (int step = 1; step <= 3; ++step) {
    experiment->engine->run_epoch(EpochPlan(60, 12, 1, 0, true, false, step), nobody);
    // What two stages share has a block of its own: the first one of the first rank, the last one of the last.
    Tensor weights;
    for (const StateTensor& tensor : experiment->engine->state()) {
      const bool is_it = tensor.name.starts_with("weights") && tensor.tensor.elements() == tied.elements;
      if (is_it && (world.info().rank > 0 || !weights.defined())) weights = tensor.tensor;
    }
    std::string bits;
    if (world.info().rank == tied.rank || world.info().rank == tied.copy_rank) {
      REQUIRE(weights.defined());
      const double* values = weights.data<double>();
      std::uint64_t hash = 1469598103934665603ull;
      for (std::int64_t i = 0; i < tied.elements * 8; ++i) {
        hash = (hash ^ reinterpret_cast<const unsigned char*>(values)[i]) * 1099511628211ull;
      }
      bits = str(hash);
    }
    const std::vector<std::string> all = world.gather(bits);
    CHECK(all.front() == all.back());
    CHECK(all.front() != before);
    before = all.front();
  }
}

TEST_CASE("memory and traffic of every schedule are the predicted ones", "[pipeline]") {
  World& world = test_world();
  const std::string model = GENERATE("gpt2", "vgg");
  for (const Scheme& scheme : std::vector<Scheme>{{"1F1B", 6}, {"interleaved", interleavable()}, {"never", 5, true}}) {
    const std::unique_ptr<Experiment> experiment =
        make_experiment(world, tiny_config(model),
                        {"workload.train_samples=48", "training.deterministic=true",
                         model == "gpt2" ? "workload.layers=6" : "workload.dropout=0.2"});
    replace_engine(*experiment, scheme);
    const Prediction prediction = experiment->engine->predict();
    experiment->engine->prepare();
    Observer nobody;
    experiment->ledger.take();
    experiment->engine->run_epoch(EpochPlan(48, 12, 1, 0, true, false, 2), nobody);
    const CommCounts counted = experiment->ledger.take();
    CHECK(counted.size() == prediction.comm_per_step.size());
    for (const auto& [operation, count] : prediction.comm_per_step) {
      INFO(model << ", " << scheme.schedule << ", " << operation);
      REQUIRE(counted.count(operation) == 1);
      CHECK(counted.at(operation).calls == 2 * count.calls);
      CHECK(counted.at(operation).bytes == 2 * count.bytes);
    }
    for (int kind = 0; kind < kMemoryKinds; ++kind) {
      INFO(model << ", " << scheme.schedule << ", " << kMemoryKindNames[static_cast<std::size_t>(kind)]);
      const auto tag = static_cast<MemoryKind>(kind);
      CHECK(experiment->device->memory().peak()[tag] == prediction.memory[tag]);
    }
  }
}
