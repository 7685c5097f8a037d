// serial: one rank, one loop. The reference that every synchronous engine must equal.
//
//   for each step:
//     for each micro-batch of the global batch, in order:
//       forward; backward, adding to the gradients          (losses are divided by all predictions of the global batch)
//     norm over all gradients, clip                         (with loss scaling: unscale, look for overflow)
//     update the weights, unless a scaled gradient overflowed
//
// Paper: none; this is plain mini-batch training with gradient accumulation.
// Knobs: none.

#include "parallel/sync/replica.h"
#include "parallel/sync/replicated_update.h"
#include "parallel/synchronous_engine.h"

namespace pdl {
namespace {

class Serial final : public StepMethod {
 public:
  explicit Serial(const EngineContext& context)
      : replica_(context, DataParallelPlace{}, LayerFactory()), update_(context) {}

  EngineDescription describe() const override {
    EngineDescription description;
    description.name = "serial";
    description.replicated_state = true;
    description.micro_batches = replica_.micro_batches_per_step();
    return description;
  }

  Prediction predict() const override {
    Prediction prediction;
    prediction.memory = replica_.predicted_memory();
    prediction.memory[MemoryKind::optimizer] += update_.predicted_bytes(replica_);
    return prediction;
  }

  void prepare() override {
    replica_.prepare();
    update_.prepare(replica_);
  }

  StepOutcome train_step(const StepOrder& order, Observer& observer) override {
    replica_.accumulate(order, nullptr, observer);
    observer.phase(Phase::optimizer);
    return update_.apply(replica_, order);
  }

  HeldModel& model() override { return replica_; }
  std::vector<StateTensor> state() override { return update_.state(replica_); }
  void restored() override { update_.restored(replica_); }

 private:
  Replica replica_;
  ReplicatedUpdate update_;
};

std::unique_ptr<Engine> make_serial(const EngineContext& context, const ConfigReader& knobs) {
  if (context.world.size() != 1) {
    knobs.problem("name", str("the serial engine runs on one rank, not on ", context.world.size(),
                              "; start one rank, or choose ddp"));
    return nullptr;
  }
  return make_synchronous_engine(context, std::make_unique<Serial>(context));
}

}  // namespace

EngineDefinition serial_definition() {
  return {.name = "serial",
          .summary = "one rank, plain gradient accumulation: the reference of the synchronous engines",
          .paper = "",
          .reference = "serial",
          .make = make_serial,
          .document = [](const ConfigReader&) {},
          .data_parallel_size = [](int, const ConfigReader&) { return 1; }};
}

}  // namespace pdl
