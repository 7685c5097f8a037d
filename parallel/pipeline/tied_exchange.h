#pragma once
// A parameter that the first and the last stage share, in a pipeline that never stops (GPT-2's embedding, which is also
// its head). Both places use the weights that the owner uses for the same micro-batch, the first stage's, so that
// gradients are exact and both copies keep the same bits:
//
//   last stage, after its round's backward:  send the gradient of the copy to the owner
//   owner, before its round's update:        add what came to its own gradient; then send the total back
//   last stage, before a forward:            apply the totals up to the version that the owner used
//
// The last stage has come so far before the owner has, so gradients wait at the owner, up to one for each round between
// the owner's forward and backward. Totals wait at the last stage, as many: its single copy must not be newer than the
// micro-batch's weights. Nothing waits that did not have to anyway.

#include <memory>
#include <vector>

#include "parallel/pipeline/pipeline_plan.h"

namespace pdl {

class TiedExchange {
 public:
  /// Plans only. `delay`: updates between a micro-batch's first stage forward and backward.
  TiedExchange(const EngineContext& context, const PipelinePlan& plan, StagePart& part, int rank, int delay);

  /// Whether this rank has the parameter, or a copy of it in another stage.
  bool owns() const { return owns_; }
  bool copies() const { return copies_; }
  /// Its place in the part's store; -1 where there is none.
  int index() const { return index_; }

  /// Collective.
  void prepare();
  MemoryByKind predicted_memory() const;
  /// Messages of one round of the first stage, whose replicas take part in `units` micro-batches.
  CommCounts predicted_traffic() const;

  /// A run begins over so many rounds of the owner's stage, each with one gradient from each micro-batch of its
  /// replicas. Everything of the run before has been taken.
  void begin(int rounds);
  /// Rounds from this one on are left out.
  void limit(int rounds);

  // The copy's side.
  void send_gradient(int round);
  /// Puts the next total in the place of the copy's gradient.
  void take_total();
  // The owner's side.
  void add_gradient();
  void send_total(int round);

  void progress();
  /// Everything sent has left its buffer.
  void drain();

 private:
  int replica() const;
  /// Ranks of the other stage with which this one exchanges totals.
  std::vector<int> total_peers() const;
  Tensor gradient() const { return part_.store.view(part_.store.grads(), index_); }
  std::int64_t bytes() const;
  int pending() const;

  const EngineContext& context_;
  const PipelinePlan& plan_;
  StagePart& part_;
  int rank_, delay_;
  bool owns_ = false, copies_ = false;
  int index_ = -1;
  int owner_stage_ = 0, copy_stage_ = 0;
  std::unique_ptr<Communicator> gradients_, totals_;
  Inbox inbox_;    ///< owner: gradients; copy: totals
  Outbox outbox_;  ///< owner: totals; copy: gradients
};

}  // namespace pdl
