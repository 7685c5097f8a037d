#pragma once
// Weights divided over ranks tensor by tensor, while gradients stay whole: each weight is cut into N equal slices, of
// which rank r holds slice r together with its moments.
//
//   before a layer runs, forward or backward:  gather its weights from all ranks, and wait
//   after it:                                  let go of them
//   update:                                    of this rank's slice alone, from the sums of whole gradients
//
// Of the gradients each rank sums more than it needs; in return what comes out has the bits of whole weights, norms of
// all gradients included.

#include <memory>
#include <vector>

#include "parallel/sync/sharded_model.h"

namespace pdl {

class TensorShards {
 public:
  /// What a replica holds itself whose weights are divided so.
  static StoreParts store_parts() { return {.values = false, .gradients = true, .master = false}; }

  /// Plans only: lays out the replica's store. Both outlive this.
  TensorShards(const EngineContext& context, Replica& replica);

  /// Takes memory and sets the initial weights, once the replica has its own. Collective.
  void prepare();
  /// Bytes that `prepare` takes.
  MemoryByKind predicted_memory() const;
  /// What `micro_batches` forward and backward passes and one update send, gradients aside.
  CommCounts predicted_comm(std::int64_t micro_batches) const;

  /// Updates this rank's slice of params()[index], whose gradient is summed.
  void step(const StepOrder& order, const GradientScaling& scaling, int index) {
    update_.step(order, scaling, map_.block_of(index));
  }

  HeldModel& model() { return model_; }
  std::vector<StateTensor> state() const { return update_.state(); }
  /// These hold a checkpoint: makes the values that layers compute with.
  void restored() { weights_.round(context_.backend); }

  const ShardMap& map() const { return map_; }
  /// Who holds what, and what is gathered and let go over a micro-batch.
  std::vector<PlanTable> tables() const;

 private:
  static ShardMap lay_out(ParamStore& store, int ranks);
  int layers() const { return static_cast<int>(replica_.layers().size()); }

  const EngineContext& context_;
  Replica& replica_;
  std::vector<std::vector<int>> users_;  ///< of each parameter: the layers that use it
  ShardMap map_;
  ShardedWeights weights_;
  GradientShards gradients_;  ///< tells where they lie; the engine sums them
  ParameterGatherer gatherer_;
  ShardedUpdate update_;
  ShardedModel model_;
  std::unique_ptr<Communicator> group_;  ///< for gathering beside the sums
};

}  // namespace pdl
