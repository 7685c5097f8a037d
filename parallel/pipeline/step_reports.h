#pragma once
// Loss and stop request of each step, summed over the ranks of a pipeline that never stops. A rank adds what it has
// when it is through with a step, and asks for the sum much later, when every other rank has long been through as well:
// so nobody waits.

#include <memory>
#include <vector>

#include "parallel/engine.h"

namespace pdl {

/// What the ranks know together about a step, or about a pass.
struct StepSums {
  double loss_sum = 0.0, correct = 0.0, ranks_asked_to_stop = 0.0;
};

class StepReports {
 public:
  /// Plans only. At most `open` steps at a time between the first pass and `collect`.
  StepReports(const EngineContext& context, int open) : context_(context), open_(open) {}

  /// Collective.
  void prepare();
  MemoryByKind predicted_memory() const;
  /// Of one step.
  CommCounts predicted_traffic() const;

  /// fp64 [2] of this rank: loss sum and correct predictions of the step, added up by its passes.
  Tensor metrics(std::int64_t step) const { return sums(step).range(0, 2); }
  /// This rank is through with the step: its part is on the way. Every rank closes every step, in order.
  void close(std::int64_t step);
  /// The sums; waits for them. In order; the step's place is free then.
  StepSums collect(std::int64_t step);

 private:
  Tensor sums(std::int64_t step) const {
    return memory_.tensor(DType::fp64, Shape{3}, step % open_ * 3 * size_of(DType::fp64));
  }

  const EngineContext& context_;
  std::int64_t open_;
  std::unique_ptr<Communicator> control_;
  std::unique_ptr<Stream> stream_;  ///< of its own, so that the host can wait for a sum without waiting for the stage
  std::unique_ptr<Event> closed_;
  Buffer memory_;
  std::vector<Work> works_;
};

}  // namespace pdl
