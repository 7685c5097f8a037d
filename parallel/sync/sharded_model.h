#pragma once
// A model whose weights are divided over ranks, as the harness sees it: passes are the replica's, whole parameters have
// to be collected.

#include "parallel/sync/parameter_gatherer.h"
#include "parallel/sync/replica.h"
#include "parallel/sync/sharded_update.h"

namespace pdl {

class ShardedModel final : public HeldModel {
 public:
  /// All of them outlive this.
  ShardedModel(const EngineContext& context, Replica& replica, const ShardMap& map, const ShardedWeights& weights,
               const GradientShards& gradients, ShardedUpdate& update)
      : context_(context), replica_(replica), map_(map), weights_(weights), gradients_(gradients), update_(update) {}

  void begin_training(const EpochPlan& plan) override { replica_.begin_training(plan); }
  void begin_evaluation(const EpochPlan& plan) override { replica_.begin_evaluation(plan); }
  void evaluate_step() override { replica_.evaluate_step(); }
  Tensor metrics() const override { return replica_.metrics(); }
  void clear_metrics() override { replica_.clear_metrics(); }
  std::string describe_nonfinite() override { return update_.describe_nonfinite(); }
  void visit_parameters(const Engine::ParameterVisitor& visit) override;

 private:
  /// All weights of a block in host memory of rank 0; elsewhere nothing.
  std::vector<char> collect(int block);

  const EngineContext& context_;
  Replica& replica_;
  const ShardMap& map_;
  const ShardedWeights& weights_;
  const GradientShards& gradients_;
  ShardedUpdate& update_;
};

}  // namespace pdl
