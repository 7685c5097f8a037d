#pragma once
// The optimizer step of a rank that holds all gradients of all parameters: norm, clipping, update. Equal gradients on
// every rank give equal weights on every rank, without communication.

#include <memory>
#include <vector>

#include "engine/optim/optimizer.h"
#include "parallel/sync/replica.h"

namespace pdl {

class ReplicatedUpdate {
 public:
  explicit ReplicatedUpdate(const EngineContext& context);

  void prepare(const Replica& replica);
  std::int64_t predicted_bytes(const Replica& replica) const;
  /// Returns the gradient norm before clipping; -1 when clipping is off and the norm was not needed.
  double apply(Replica& replica, const StepOrder& order);
  /// Weights and moments, for checkpoints.
  std::vector<StateTensor> state(Replica& replica) const;

 private:
  const EngineContext& context_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace pdl
