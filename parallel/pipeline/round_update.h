#pragma once
// What ends a round of a stage in a pipeline that never stops: the gradients of the stage's replicas become one, and
// the newest weights step to the next version. A stage asks no other stage, so a norm is the stage's own.

#include <memory>
#include <string>
#include <vector>

#include "parallel/pipeline/tied_exchange.h"
#include "parallel/pipeline/tied_history.h"
#include "parallel/pipeline/weight_ring.h"

namespace pdl {

/// Weights that a stage holds beside the newest.
struct VersionNeeds {
  int versions = 1;          ///< at a time
  int owner_versions = 1;    ///< likewise where a tied parameter is owned
  int tied_delay = 0;        ///< as in TiedExchange
  bool outlive_run = false;  ///< the next run's first units use them, also after a checkpoint
};

/// The step of a stage.
struct RoundOrder {
  int version = 0;          ///< of the weights that it starts from, counted as the schedule does
  std::int64_t update = 0;  ///< of this stage over the whole run, from 0
  double lr = 0.0;
  double divisor = 1.0;  ///< gradients are divided by it: what they are a sum of, in units of what losses were
};

class RoundUpdate {
 public:
  /// Plans only.
  RoundUpdate(const EngineContext& context, const PipelinePlan& plan, StagePart& part, int rank, VersionNeeds needs);

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
  /// The tied copy as it is now is the version of so many updates, which the next run may want to find again. Do
  /// nothing where the copy has as many versions as its owner.
  void keep_copy(std::int64_t version);
  void find_copy(std::int64_t version);

  /// || newest - oldest || / || oldest || over the versions that are held: how far weights move while a micro-batch is
  /// under way. Uses the gradients' memory, between updates. 0 with a single version; waits for the device.
  double drift();
  std::vector<StateTensor> state() const;
  /// The state is restored, as it was after so many rounds.
  void restored(std::int64_t rounds);

 private:
  double square_sum(const Tensor& flat);
  void step(const RoundOrder& order, double factor, int first, int count);
  int history_length() const;
  Tensor copy() const { return part_.store.view(ring_.values(ring_.newest()), tied_.index()); }
  int parameters() const { return static_cast<int>(part_.store.params().size()); }
  bool clips() const { return context_.training.optimizer.clip_grad_norm > 0.0; }

  const EngineContext& context_;
  const PipelinePlan& plan_;
  StagePart& part_;
  int rank_;
  VersionNeeds needs_;
  WeightRing ring_;
  TiedExchange tied_;
  TiedHistory history_;
  std::vector<UpdateSegment> segments_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Communicator> replicas_;  ///< of the stage; null when there is one
  Buffer sums_;                             ///< fp64: a square sum for each parameter
};

}  // namespace pdl
