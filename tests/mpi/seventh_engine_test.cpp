// A seventh engine in one file: no buckets, one all-reduce of all gradients after the backward pass. With a line in
// engines.def it would be an engine like any other; here its definition is put into an experiment by hand and held
// against its reference.

#include "cli/comparison.h"
#include "parallel/sync/replica.h"
#include "parallel/sync/replicated_update.h"
#include "parallel/synchronous_engine.h"
#include "tests/support/catch.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

class OneReduction final : public StepMethod {
 public:
  OneReduction(const EngineContext& context, bool forget)
      : context_(context),
        forget_(forget),
        replica_(context, {context.world.rank(), context.world.size()}, LayerFactory()),
        update_(context) {}

  StepOutcome train_step(const StepOrder& order, Observer& observer) override {
    replica_.accumulate(order, nullptr, observer);
    Stream& stream = context_.device.compute_stream();
    if (!forget_) context_.world.all_reduce(replica_.store().grads(), ReduceOp::sum, stream).wait(stream);
    return update_.apply(replica_, order);
  }
  void prepare() override {
    replica_.prepare();
    update_.prepare(replica_);
  }
  EngineDescription describe() const override {
    EngineDescription description;
    description.name = "one_reduction";
    description.dp = context_.world.size();
    return description;
  }
  Prediction predict() const override {
    Prediction prediction;
    prediction.memory = replica_.predicted_memory();
    return prediction;
  }
  HeldModel& model() override { return replica_; }
  std::vector<StateTensor> state() override { return update_.state(replica_); }

 private:
  const EngineContext& context_;
  bool forget_;
  Replica replica_;
  ReplicatedUpdate update_;
};

EngineDefinition definition(bool forget) {
  EngineDefinition made;
  made.name = "one_reduction";
  made.reference = "serial";
  made.make = forget ? [](const EngineContext& context, const ConfigReader&) {
    return make_synchronous_engine(context, std::make_unique<OneReduction>(context, true));
  } : [](const EngineContext& context, const ConfigReader&) {
    return make_synchronous_engine(context, std::make_unique<OneReduction>(context, false));
  };
  return made;
}

double worst_error(const EngineDefinition& engine) {
  const std::unique_ptr<Experiment> experiment = make_experiment(test_world(), tiny_config("gpt2"), {});
  experiment->engine = engine.make(*experiment->context, engine_block(*experiment->document));
  experiment->config.engine = &engine;
  const Outcome outcome = train_for_comparison(*experiment, 3);
  if (test_world().info().rank != 0) return 0.0;
  const std::unique_ptr<Experiment> reference = make_reference_experiment(*experiment);
  return worst_of(compare(outcome, train_for_comparison(*reference, 3))).error;
}

}  // namespace

TEST_CASE("an engine in one file equals its reference", "[engines]") { CHECK(worst_error(definition(false)) <= 1e-11); }

TEST_CASE("an engine that forgets to reduce is found out", "[engines]") {
  const double error = worst_error(definition(true));
  if (test_world().info().rank == 0) CHECK(error > 1e-6);
}
