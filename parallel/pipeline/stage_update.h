#pragma once
// The optimizer step of a model whose stages lie on different ranks: gradients of tied parameters are summed between
// the two ranks that hold them, the norm is that of the whole model, every rank updates what it has.

#include <memory>
#include <vector>

#include "engine/optim/optimizer.h"
#include "parallel/pipeline/pipeline_plan.h"
#include "parallel/synchronous_engine.h"

namespace pdl {

class StageUpdate {
 public:
  /// Plans only. `parts` outlive this.
  StageUpdate(const EngineContext& context, const PipelinePlan& plan, const std::vector<StagePart*>& parts, int rank);

  void prepare();
  /// What `prepare` takes on this rank, and what `sum_tied` and `apply` send.
  MemoryByKind predicted_memory() const;
  CommCounts predicted_traffic() const;

  /// Sums the gradients of parameters that two stages hold; both then have the same bits. Collective.
  void sum_tied();
  /// Clips and updates, unless a scaled gradient overflowed on any rank. Collective.
  StepOutcome apply(const StepOrder& order);
  /// Where gradients stopped being finite on this rank; "" when they did not.
  std::string describe_nonfinite();
  /// Weights and moments.
  std::vector<StateTensor> state() const;

 private:
  struct PartUpdate {
    StagePart* part;
    std::vector<UpdateSegment> segments;
    std::unique_ptr<Optimizer> optimizer;
  };
  struct Tie {
    std::unique_ptr<Communicator> pair;  ///< null where the tie is between other ranks
    Tensor gradient;
  };
  /// Whether somebody asks for the norm: clipping, or the search for overflow.
  bool needs_norm() const {
    return context_.training.optimizer.clip_grad_norm > 0.0 || context_.training.loss_scale.name != "none";
  }
  std::int64_t most_segments() const;
  /// One sum of squares per parameter of the part, on the host.
  std::vector<double> squares_of(const PartUpdate& mine);
  /// Sum of squares of all gradients of the whole model, a tied one once; the same bits on every rank.
  double global_square_sum();

  const EngineContext& context_;
  const PipelinePlan& plan_;
  int rank_;
  std::vector<PartUpdate> parts_;
  std::vector<Tie> ties_;
  Buffer sums_, all_sums_;  ///< fp64: of this part's parameters, of the whole model's
};

}  // namespace pdl
