#pragma once
// A model cut into stages over all ranks, trained with a schedule that flushes: every step's micro-batches go through,
// then the weights are updated once. What its engine adds is the cut and the schedule.

#include <memory>
#include <vector>

#include "parallel/pipeline/pipeline_executor.h"
#include "parallel/pipeline/pipeline_plan.h"
#include "parallel/pipeline/stage_update.h"
#include "parallel/synchronous_engine.h"

namespace pdl {

class StagedModel final : public HeldModel, private PipelineHost {
 public:
  /// Plans only. World rank r is stage r.
  StagedModel(const EngineContext& context, PipelineOptions options);

  void prepare();
  MemoryByKind predicted_memory() const;
  CommCounts predicted_traffic() const;

  /// One step of the training plan, update included.
  StepOutcome train_step(const StepOrder& order, Observer& observer);

  void begin_training(const EpochPlan& plan) override { training_->begin(plan); }
  void begin_evaluation(const EpochPlan& plan) override { validation_->begin(plan); }
  void evaluate_step() override;
  Tensor metrics() const override { return metrics_.tensor(DType::fp64, Shape{2}); }
  void clear_metrics() override { context_.backend.fill(metrics(), 0.0); }
  std::string describe_nonfinite() override { return update_.describe_nonfinite(); }
  void visit_parameters(const Engine::ParameterVisitor& visit) override;
  std::vector<StateTensor> state() const { return update_.state(); }
  /// The state holds a checkpoint: makes the values that layers compute with.
  void restored();

  const PipelinePlan& plan() const { return plan_; }
  const PipelineExecutor& executor() const { return executor_; }

 private:
  MicroBatch load(int micro_batch) override;
  std::int64_t samples(int micro_batch) const override { return pieces_[static_cast<std::size_t>(micro_batch)].count; }
  void release(int micro_batch) override;
  Tensor values(int chunk, int) override { return parts_[static_cast<std::size_t>(chunk)]->store.values(); }
  void reduce(int) override { update_.sum_tied(); }
  void update(int) override { outcome_ = update_.apply(order_); }

  void run(StageFeeder& feeder, const Schedule& schedule, Observer& observer, bool training);
  std::vector<StagePart*> part_pointers() const;
  /// A parameter's range on its owner's rank.
  Tensor held_weights(int dense_index) const;

  const EngineContext& context_;
  int rank_;
  PipelinePlan plan_;
  std::vector<std::unique_ptr<StagePart>> parts_;
  PipelineExecutor executor_;
  StageUpdate update_;
  std::unique_ptr<StageFeeder> training_, validation_;
  Buffer metrics_;
  Buffer landing_;  ///< rank 0: parts of other ranks' parameters
  // Of the step under way.
  StageFeeder* feeder_ = nullptr;
  Observer* observer_ = nullptr;
  std::span<const Part> pieces_;
  StepOrder order_;
  StepOutcome outcome_;
};

}  // namespace pdl
