#pragma once
// All layers of a model on one rank, one slot, and the passes over micro-batches that every engine needs whose ranks
// run whole models (serial, DDP, ZeRO, LBANN). What becomes of the gradients is the engine's affair; where parameters
// and gradients lie too, if it says so. Layers may be divided over the data-parallel ranks: each then holds slices of
// their parameters.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "engine/nn/stage.h"
#include "parallel/sync/batch_feeder.h"
#include "parallel/sync/sliced_parameters.h"
#include "parallel/synchronous_engine.h"

namespace pdl {

class Replica final : public HeldModel {
 public:
  /// Plans only. The micro-batch on this rank is `training.micro_batch`, or the largest part of a global batch when
  /// that is 0. `parts`: what of the parameters is held here. `factory` is used here only; slices of parameters are
  /// spread over context.world, which then are the data-parallel ranks.
  Replica(const EngineContext& context, DataParallelPlace place, const LayerFactory& factory, StoreParts parts = {});

  /// Takes memory and, when all parameters are held here, sets the initial weights.
  void prepare();
  /// Layers find parameters and gradients where `host` says from now on; in the store's ranges otherwise.
  void use(ParameterHost& host) { host_ = &host; }
  /// Bytes that `prepare` takes, optimizer and communication aside.
  MemoryByKind predicted_memory() const;

  /// Forward and backward over this rank's micro-batches of one step, gradients added up in micro-batch order. The
  /// listener hears the last micro-batch only; a rank without samples has zero gradients and its listener hears
  /// nothing, unless there is a host: hosts see as many passes as on the rank with most micro-batches, so that what
  /// they and the listener do stays in step. Losses are divided by the predictions of the whole global batch, so
  /// gradients need only be summed over ranks; they are too large by the order's loss scale.
  void accumulate(const StepOrder& order, GradientListener* listener, Observer& observer);

  /// The same micro-batch by micro-batch, for engines that reduce the gradients of each: `begin_step`, then so many
  /// rounds as it says, on every rank alike. In each round gradients start from nothing and the listener hears all of
  /// them. A rank that has no micro-batch left takes part with gradients of zero.
  std::int64_t begin_step(Observer& observer);
  void run_round(std::int64_t round, const StepOrder& order, GradientListener* listener, Observer& observer);

  void begin_training(const EpochPlan& plan) override { training_feeder_->begin(plan); }
  void begin_evaluation(const EpochPlan& plan) override { validation_feeder_->begin(plan); }
  void evaluate_step() override;
  Tensor metrics() const override { return metrics_.tensor(DType::fp64, Shape{2}); }
  void clear_metrics() override;
  std::string describe_nonfinite() override;
  void visit_parameters(const Engine::ParameterVisitor& visit) override;

  /// Sum of squares over all gradients, loss scale and all: one fp64 sum per parameter, added in parameter order, so
  /// that every engine gets the same bits from the same gradients. Slices count once each. Waits for the device.
  double gradient_square_sum();

  ParamStore& store() { return store_; }
  const ParamStore& store() const { return store_; }
  const SlicedParameters& slices() const { return slices_; }
  const LayerList& layers() const { return layers_; }
  std::int64_t micro_batch() const { return micro_batch_; }
  std::int64_t micro_batches_per_step() const;
  std::vector<UpdateSegment> segments() const {
    return store_.segments(context_.training.optimizer.decay_biases_and_norms);
  }

 private:
  const EngineContext& context_;
  DataParallelPlace place_;
  LayerList layers_;
  ParamStore store_;
  StoreParts parts_;
  SlicedParameters slices_;
  std::int64_t micro_batch_ = 0;
  Stage stage_;
  Slot slot_;
  /// One sum of squares per parameter, on the host.
  std::vector<double> gradient_squares();
  void forward(const MicroBatch& batch, bool training);
  void train_micro_batch(std::int64_t piece, const StepOrder& order, GradientListener* listener, Observer& observer);

  Buffer metrics_, norms_;
  std::vector<char> touched_;
  std::vector<UpdateSegment> segments_;
  std::int64_t pieces_ = 0;        ///< micro-batches of this rank in this step
  ParameterHost* host_ = nullptr;  ///< null: the store's ranges
  std::unique_ptr<BatchFeeder> training_feeder_, validation_feeder_;
};

/// The largest part of a global batch that one of `size` data-parallel ranks holds.
std::int64_t largest_local_batch(std::int64_t global_batch, int size);

}  // namespace pdl
