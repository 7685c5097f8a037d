#pragma once
// What ends a round of a stage in a pipeline that never stops: the gradients of the stage's replicas become one, and
// the newest weights step to the next version. A stage asks no other stage, so a norm is the stage's own.

#include <memory>
#include <string>
#include <vector>

#include "parallel/pipeline/tied_exchange.h"
#include "parallel/pipeline/weight_ring.h"

namespace pdl {

/// The step of a stage.
struct RoundOrder {
  int version = 0;          ///< of the weights that it starts from, counted as the schedule does
  std::int64_t update = 0;  ///< of this stage over the whole run, from 0
  double lr = 0.0;
  double divisor = 1.0;  ///< gradients are divided by it: what they are a sum of, in units of what losses were
};

class RoundUpdate {
 public:
  /// Plans only. `versions` are held at a time; `tied_delay` as in TiedExchange.
  RoundUpdate(const EngineContext& context, const PipelinePlan& plan, StagePart& part, int rank, int versions,
              int tied_delay);

  /// Collective. The weights are set.
  void prepare();
  MemoryByKind predicted_memory() const;
  /// Of one round.
  CommCounts predicted_traffic() const;

  WeightRing& ring() { return ring_; }
  const WeightRing& ring() const { return ring_; }
  TiedExchange& tied() { return tied_; }
  const TiedExchange& tied() const { return tied_; }

  /// Sums gradients over the replicas, and those of a tied parameter over both its places. Collective over the stage.
  void reduce(int round);
  /// Clips, and makes the next version. A tied copy stays behind until `apply_total`. Returns the norm of the stage's
  /// gradients before clipping; -1 when nobody asked for it.
  double apply(const RoundOrder& order);
  /// The tied copy's update with the owner's next total; `order` is the owner's.
  void apply_total(const RoundOrder& order);

  /// || newest - oldest || / || oldest || over the versions that are held: how far weights move while a micro-batch is
  /// under way. Uses the gradients' memory, between updates. 0 with a single version; waits for the device.
  double drift();
  std::vector<StateTensor> state() const;
  void restored() { ring_.restored(context_.backend); }

 private:
  double square_sum(const Tensor& flat);
  void step(const RoundOrder& order, double factor, int first, int count);
  int parameters() const { return static_cast<int>(part_.store.params().size()); }
  bool clips() const { return context_.training.optimizer.clip_grad_norm > 0.0; }

  const EngineContext& context_;
  const PipelinePlan& plan_;
  StagePart& part_;
  int rank_;
  WeightRing ring_;
  TiedExchange tied_;
  std::vector<UpdateSegment> segments_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Communicator> replicas_;  ///< of the stage; null when there is one
  Buffer sums_;                             ///< fp64: a square sum for each parameter
};

}  // namespace pdl
