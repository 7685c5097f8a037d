#pragma once
// The optimizer step of a rank that holds all gradients of all parameters: norm, overflow, clipping, update. Equal
// gradients on every rank give equal weights on every rank, without communication.

#include <memory>
#include <vector>

#include "engine/optim/optimizer.h"
#include "parallel/sync/replica.h"

namespace pdl {

/// Parameters that are updated together, as a range of ParamStore::params().
struct UpdateGroup {
  int first = 0, count = 0;
};

/// Groups of neighbours, the last parameters first; a group is closed by the parameter that brings it to `elements`.
std::vector<UpdateGroup> update_groups(const ParamStore& store, std::int64_t elements);

class ReplicatedUpdate {
 public:
  explicit ReplicatedUpdate(const EngineContext& context);

  void prepare(const Replica& replica);
  std::int64_t predicted_bytes(const Replica& replica) const;
  /// Updates the weights, or leaves everything as it is where a gradient is not finite and the order says so. Without
  /// clipping and loss scaling nobody looks at the gradients, and the host does not wait for them.
  StepOutcome apply(Replica& replica, const StepOrder& order);

  // The same in parts, for engines that have some sums before others.
  /// Whether anybody looks at the gradients: no parameter can then be stepped before all are reduced.
  bool needs_all_gradients() const;
  /// What all gradients together decide. `overflow`: the order says that the step is to be skipped.
  GradientScaling scaling(Replica& replica, const StepOrder& order) const;
  /// Steps `count` parameters from `first` on, in the order of ParamStore::params(); -1: all. Steps of parts that make
  /// up the whole leave the same bits as one.
  void step(Replica& replica, const StepOrder& order, const GradientScaling& scaling, std::int64_t first = 0,
            std::int64_t count = -1);
  /// Weights and moments, for checkpoints.
  std::vector<StateTensor> state(Replica& replica) const;
  /// These hold a checkpoint: makes the values that layers compute with.
  void restored(Replica& replica) const { replica.store().round_master(context_.backend); }

 private:
  const EngineContext& context_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace pdl
