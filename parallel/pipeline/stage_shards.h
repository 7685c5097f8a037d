#pragma once
// The parameters of one virtual stage, over the ranks that train replicas of it: how they lie, how their gradients are
// summed, and which of them this rank's optimizer updates.
//
//                    gradients               optimizer, and master weights          after the update
//   replicated       all-reduced             all of them, on every replica          nothing
//   distributed      reduce-scattered        this replica's slice of each block     values are all-gathered
//
// Parameters that are summed once more, with another stage or over tensor-parallel ranks, have blocks of their own:
// replicas of the same place then hold the same slice of them, and only slices need to be summed.

#include <memory>
#include <vector>

#include "engine/optim/optimizer.h"
#include "parallel/pipeline/pipeline_executor.h"
#include "parallel/sync/gradient_shards.h"
#include "parallel/sync/sharded_weights.h"

namespace pdl {

/// How replicas of a stage share the work of an update.
struct ReplicaOptions {
  int rank = 0, size = 1;    ///< among the replicas
  bool distributed = false;  ///< the optimizer is divided over them
  bool overlap = false;      ///< gradients are reduced under the last backward pass
  std::int64_t bucket_elements = 1ll << 50;
};

class StageShards {
 public:
  /// Plans only, but lays out `part`'s store, which has no memory yet. Each of `alone` is a list of parameters that get
  /// a block to themselves; empty ones are passed over.
  StageShards(StagePart& part, const std::vector<std::vector<int>>& alone, const OptimizerOptions& optimizer,
              DType dtype, const ReplicaOptions& replica);

  /// Takes memory, the store's included, and sets the initial weights. `replicas`: the group, null for one replica.
  void prepare(Device& device, Backend& backend, Communicator* replicas, std::uint64_t seed);
  /// Bytes that `prepare` takes, and what a step sends among the replicas.
  MemoryByKind predicted_memory() const;
  CommCounts predicted_traffic() const;

  const ParamStore& store() const { return part_.store; }
  const ShardMap& map() const { return map_; }
  int blocks() const { return static_cast<int>(map_.blocks().size()); }
  bool distributed() const { return replica_.distributed && replica_.size > 1; }
  /// The block that holds a parameter.
  int block_of(int param) const { return map_.block_of(param); }

  /// Before a step.
  void begin_step() { gradients_->begin(true); }
  /// Whom the last backward pass of a step tells of gradients; null when nobody asks.
  GradientListener* listener() { return replica_.size > 1 && replica_.overlap ? gradients_.get() : nullptr; }
  /// After the last backward pass: launches what is left of the sums.
  void end_backward() { gradients_->end_pass(); }
  void wait_for_sums() { gradients_->collect_all(); }

  /// Of a block, what this rank updates: gradients (sums, once they have been waited for), weights, values of a half
  /// type that are made from these (else undefined), and what lies where in them.
  Tensor gradients(int block) const { return part_.store.grads().range(begin(block), count(block)); }
  Tensor weights(int block) const;
  Tensor rounded(int block) const;
  std::vector<UpdateSegment> segments(int block) const;
  Optimizer& optimizer(int block) { return *optimizers_[static_cast<std::size_t>(block)]; }
  const Optimizer& optimizer(int block) const { return *optimizers_[static_cast<std::size_t>(block)]; }
  std::int64_t count(int block) const { return distributed() ? at(block).slice : at(block).elements; }

  /// Makes the values whole on every replica, once the weights of all blocks are set or updated. `round`: also makes
  /// values of a half type from the weights.
  void gather(bool round);

  /// What this rank knows of the weights of a parameter: elements [first, first + values.elements()) of it.
  struct Piece {
    std::int64_t first = 0;
    Tensor values;
  };
  Piece known_weights(int param) const;

 private:
  const ShardBlock& at(int block) const { return map_.blocks()[static_cast<std::size_t>(block)]; }
  std::int64_t begin(int block) const {
    return distributed() ? map_.slice_begin(at(block), replica_.rank) : at(block).offset;
  }
  /// Half types have their weights in slices where the optimizer is divided, else in the store.
  bool sliced_master() const { return distributed() && is_half(dtype_); }
  StoreParts store_parts() const { return {.values = true, .gradients = true, .master = !sliced_master()}; }
  std::unique_ptr<GradientShards> make_gradients(Communicator& replicas) const;

  StagePart& part_;
  OptimizerOptions options_;
  DType dtype_;
  ReplicaOptions replica_;
  ShardMap map_;
  ShardedWeights sliced_;
  std::unique_ptr<Communicator> planned_;  ///< the group as a plan knows it
  std::unique_ptr<GradientShards> gradients_;
  std::vector<std::unique_ptr<Optimizer>> optimizers_;  ///< of each block
  Communicator* replicas_ = nullptr;
  Device* device_ = nullptr;
  Backend* backend_ = nullptr;
};

}  // namespace pdl
