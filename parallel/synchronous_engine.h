#pragma once
// Turns a method that finishes every step before the next one into an Engine: loops over the plan, learning rate, loss
// scale, agreement on loss, stop and failure. Five of the six engines are such methods.
//
// A step with a gradient that is not finite is skipped when there is a loss scale: weights, moments, the count of
// updates and with it the learning rate stay as they are, as after GradScaler.step() in PyTorch and in DeepSpeed and
// Megatron-LM, which leave their schedules where they are as well. A loss that is not finite ends the run with or
// without loss scaling: the scale enters behind the loss, so no other scale can mend it.

#include <memory>

#include "parallel/engine.h"

namespace pdl {

/// What a method is told about a step.
struct StepOrder {
  std::int64_t update = 0;          ///< over the whole run, from 0
  std::int64_t global_samples = 0;  ///< of this step over all ranks
  double lr = 0.0;
  double loss_scale = 1.0;      ///< the gradient of the loss is multiplied by it: all gradients are that much too large
  bool skips_overflow = false;  ///< look for gradients that are not finite, and leave everything as it is if there are
};

/// What came of it, the same on every rank.
struct StepOutcome {
  double grad_norm = -1.0;  ///< without the loss scale, before clipping; -1 when it was not computed
  bool skipped = false;     ///< a gradient was not finite
};

/// The model as a rank holds it (a replica, a shard, a stage), for everything that needs no gradient exchange.
class HeldModel {
 public:
  virtual ~HeldModel() = default;
  virtual void begin_training(const EpochPlan& plan) = 0;
  virtual void begin_evaluation(const EpochPlan& plan) = 0;
  /// Forward over the next step of the evaluation plan.
  virtual void evaluate_step() = 0;
  /// fp64 [2] of this rank: loss sum and correct predictions since clear_metrics().
  virtual Tensor metrics() const = 0;
  virtual void clear_metrics() = 0;
  /// Where numbers stopped being finite on this rank; empty when they did not.
  virtual std::string describe_nonfinite() = 0;
  virtual void visit_parameters(const Engine::ParameterVisitor& visit) = 0;
  /// See Engine.
  virtual void explain_pipeline(const EpochPlan&, PipelineRecord&) {}
};

/// The part of a synchronous engine that is its own.
class StepMethod {
 public:
  virtual ~StepMethod() = default;
  virtual EngineDescription describe() const = 0;
  virtual Prediction predict() const = 0;
  virtual void prepare() = 0;
  /// Forward, backward, reduction and update.
  virtual StepOutcome train_step(const StepOrder& order, Observer& observer) = 0;
  /// After the last step of an epoch: waits for what steps leave under way.
  virtual void finish_epoch() {}
  virtual HeldModel& model() = 0;
  virtual std::vector<StateTensor> state() = 0;
  /// The tensors of `state` hold a checkpoint on every rank: makes what follows from them. Collective.
  virtual void restored() {}
};

std::unique_ptr<Engine> make_synchronous_engine(const EngineContext& context, std::unique_ptr<StepMethod> method);

}  // namespace pdl
