#pragma once
// Turns a method that finishes every step before the next one into an Engine: loops over the plan, learning rate,
// agreement on loss, stop and failure. Five of the six engines are such methods.

#include <memory>

#include "parallel/engine.h"

namespace pdl {

/// What a method is told about a step.
struct StepOrder {
  std::int64_t update = 0;          ///< over the whole run, from 0
  std::int64_t global_samples = 0;  ///< of this step over all ranks
  double lr = 0.0;
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
};

/// The part of a synchronous engine that is its own.
class StepMethod {
 public:
  virtual ~StepMethod() = default;
  virtual EngineDescription describe() const = 0;
  virtual Prediction predict() const = 0;
  virtual void prepare() = 0;
  /// Forward, backward, reduction and update. Returns the gradient norm before clipping, -1 when it was not computed.
  virtual double train_step(const StepOrder& order, Observer& observer) = 0;
  virtual HeldModel& model() = 0;
  virtual std::vector<StateTensor> state() = 0;
};

std::unique_ptr<Engine> make_synchronous_engine(const EngineContext& context, std::unique_ptr<StepMethod> method);

}  // namespace pdl
