#pragma once
// The optimizer step of a rank that holds slices: norm over all ranks, clipping, update of its own slices. Each block
// has moments of its own, so that a block can be sent as soon as it is updated.
//
// The norm is one fp64 sum per parameter, added in parameter order, as everywhere. The parts of a parameter that is cut
// are added in rank order; that can differ from one sum over the whole in the last bit of fp64, and every rank gets the
// same bits.

#include <functional>
#include <memory>
#include <vector>

#include "engine/optim/optimizer.h"
#include "parallel/sync/gradient_shards.h"
#include "parallel/sync/sharded_weights.h"
#include "parallel/synchronous_engine.h"

namespace pdl {

class ShardedUpdate {
 public:
  /// Plans only. `weights` and `gradients` are of this rank.
  ShardedUpdate(const EngineContext& context, const ParamStore& store, const ShardMap& map,
                const ShardedWeights& weights, const GradientShards& gradients);

  void prepare();
  /// Bytes that `prepare` takes.
  MemoryByKind predicted_memory() const;
  /// What `apply` sends besides gradients and parameters, and what of it the steps of the blocks do.
  CommCount predicted_all_reduces() const;
  CommCount predicted_in_steps() const;

  /// Updates block by block, first to last, and calls `updated` after each; or leaves everything as it is where a
  /// gradient of any rank is not finite and the order says so.
  StepOutcome apply(const StepOrder& order, const std::function<void(int block)>& updated);
  /// The update of one block alone, for engines that have some sums before others and know what all gradients decide.
  void step(const StepOrder& order, const GradientScaling& scaling, int block);
  /// Where this rank's part of the gradients is not finite; empty when it is.
  std::string describe_nonfinite();
  /// This rank's weights and moments, for checkpoints.
  std::vector<StateTensor> state() const;

 private:
  std::vector<UpdateSegment> segments_of(const ShardBlock& block) const;
  void add_all_reduce(std::size_t numbers, CommCount& count) const;
  Tensor own_squares();
  /// Over all gradients of all ranks, the same bits on each.
  double sum_of_squares();
  std::vector<double> read(const Tensor& numbers);

  const EngineContext& context_;
  const ParamStore& store_;
  const ShardMap& map_;
  const ShardedWeights& weights_;
  const GradientShards& gradients_;
  std::vector<std::unique_ptr<Optimizer>> optimizers_;  ///< of each block
  std::vector<UpdateSegment> norm_segments_;            ///< of each parameter, in GradientShards::shard
  Buffer norms_;
};

}  // namespace pdl
