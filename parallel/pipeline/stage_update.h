#pragma once
// The end of a step of a model whose stages lie on different ranks, each perhaps several times and divided:
//
//   sum      gradients over the replicas of a stage (dp), of parameters that two stages hold over these two, of
//            parameters of which tensor-parallel ranks have a part of the gradient each over these (tp)
//   apply    the norm of the whole model: every parameter once, wherever it lies; clip; update what this rank's
//            optimizer has; make the values whole again
//
// A group of one rank sends nothing.

#include <memory>
#include <vector>

#include "engine/optim/optimizer.h"
#include "parallel/pipeline/pipeline_plan.h"
#include "parallel/pipeline/stage_shards.h"
#include "parallel/synchronous_engine.h"

namespace pdl {

/// How a stage is updated; `replica` leaves rank and size to the grid.
struct StageUpdateOptions {
  ReplicaOptions replica;
  /// Whether tensor-parallel ranks have a part of the parameter's gradient each; null: of none.
  std::function<bool(const ParamSpec& spec)> is_partial = nullptr;
};

class StageUpdate {
 public:
  /// Plans only, but lays out the stores of `parts`, which outlive this.
  StageUpdate(const EngineContext& context, const PipelinePlan& plan, const std::vector<StagePart*>& parts,
              const StageUpdateOptions& options);

  /// Takes memory, that of the parts' stores included, and sets the weights. `dp`, `tp`: groups, null for one rank.
  void prepare(Communicator* dp, Communicator* tp);
  /// What `prepare` takes on this rank, and what `sum` and `apply` send.
  MemoryByKind predicted_memory() const;
  CommCounts predicted_traffic() const;

  void begin_step();
  /// See StageShards.
  GradientListener* listener(int chunk) { return parts_[static_cast<std::size_t>(chunk)].shards->listener(); }
  /// Sums gradients. Whoever updates a parameter has the same bits then. Collective.
  void sum();
  /// Clips and updates, unless a scaled gradient overflowed on any rank. Collective.
  StepOutcome apply(const StepOrder& order);
  /// Where gradients stopped being finite on this rank; "" when they did not.
  std::string describe_nonfinite();
  /// What this rank updates: weights and moments.
  std::vector<StateTensor> state() const;
  /// The state was set: makes the values that layers compute with. Collective.
  void restored();
  const StageShards& shards(int chunk) const { return *parts_[static_cast<std::size_t>(chunk)].shards; }

 private:
  struct PartUpdate {
    StagePart* part;
    std::unique_ptr<StageShards> shards;
    int partial = -1;  ///< the block of partial gradients; -1: none
  };
  struct Tie {
    std::unique_ptr<Communicator> pair;  ///< null where the tie is between other ranks
    int part = -1, block = -1;           ///< where it is here
  };
  bool is_member(const TiedPair& tied) const { return stage_ == tied.rank || stage_ == tied.copy_rank; }
  std::vector<std::vector<int>> blocks_alone(const ParamStore& store, bool& has_partial) const;
  void find_tie(const TiedPair& tied, Tie& tie) const;
  /// Whether somebody asks for the norm: clipping, or the search for overflow.
  bool needs_norm() const {
    return context_.training.optimizer.clip_grad_norm > 0.0 || context_.training.loss_scale.name != "none";
  }
  std::int64_t most_segments() const;
  bool is_divided(const Param& param) const { return param.spec.slice.axis >= 0; }
  /// Whether this rank's sum of squares of a parameter goes into the norm.
  bool counts(const PartUpdate& mine, const Param& param) const;
  /// One sum of squares per parameter of a block, on the host.
  std::vector<double> squares_of(const PartUpdate& mine, int block);
  /// Sum of squares of all gradients of the whole model, a tied one once; the same bits on every rank.
  double global_square_sum();
  /// lamb: sums over what other ranks hold of the same parameters.
  void sum_norms(const PartUpdate& mine, int block, const Tensor& norms);
  std::function<void(Tensor)> norm_sum(const PartUpdate& mine, int block);
  void update(PartUpdate& mine, const StepOrder& order, double factor);

  const EngineContext& context_;
  const PipelinePlan& plan_;
  int stage_;
  GridCoordinate place_;
  GridSize size_;
  StageUpdateOptions options_;
  std::vector<PartUpdate> parts_;
  std::vector<Tie> ties_;
  Communicator *dp_ = nullptr, *tp_ = nullptr;
  Buffer sums_, all_sums_;  ///< fp64: of this block's parameters, of the whole model's
};

}  // namespace pdl
