#pragma once
// A model cut into stages, trained with a schedule that flushes: every step's micro-batches go through, then the
// weights are updated once. There may be replicas of the whole pipeline, which share a step's samples, and ranks that
// divide the layers of a stage. What an engine adds is the grid, the cut and the schedule.

#include <memory>
#include <vector>

#include "parallel/pipeline/pipeline_executor.h"
#include "parallel/pipeline/pipeline_plan.h"
#include "parallel/pipeline/stage_update.h"
#include "parallel/pipeline/staged_parameters.h"
#include "parallel/synchronous_engine.h"

namespace pdl {

class StagedModel final : public HeldModel, private PipelineHost {
 public:
  /// Plans only. World ranks stand as options.grid says.
  StagedModel(const EngineContext& context, PipelineOptions options, const StageUpdateOptions& update = {});

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
  void explain_pipeline(const EpochPlan& plan, PipelineRecord& record) override;
  std::vector<StateTensor> state() const { return update_.state(); }
  /// The state holds a checkpoint: makes the values that layers compute with.
  void restored() { update_.restored(); }

  const PipelinePlan& plan() const { return plan_; }
  const StageUpdate& update() const { return update_; }
  /// The group of this rank along an axis, from `prepare` on; null where it is alone.
  Communicator* group(const std::string& axis) const { return (axis == "dp" ? dp_ : tp_).get(); }
  const PipelineExecutor& executor() const { return executor_; }

 private:
  MicroBatch load(int micro_batch) override;
  std::int64_t samples(int micro_batch) const override { return pieces_[static_cast<std::size_t>(micro_batch)].count; }
  void release(int micro_batch) override;
  Tensor values(int chunk, int) override { return parts_[static_cast<std::size_t>(chunk)]->store.values(); }
  GradientListener* listener(int chunk) override { return update_.listener(chunk); }
  void reduce(int) override { update_.sum(); }
  void update(int) override { outcome_ = update_.apply(order_); }

  void run(StageFeeder& feeder, const Schedule& schedule, Observer& observer, bool training);
  std::unique_ptr<Communicator> split(const std::string& axis, const std::string& name) const;
  std::vector<StagePart*> part_pointers() const;
  HeldPart held(int dense_index) const;
  /// World ranks that may know a part of the parameter.
  std::vector<int> holders(int dense_index) const;

  const EngineContext& context_;
  int rank_;  ///< in the world
  PipelinePlan plan_;
  int stage_;
  std::vector<std::unique_ptr<StagePart>> parts_;
  PipelineExecutor executor_;
  StageUpdate update_;
  StagedParameters parameters_;
  std::unique_ptr<StageFeeder> training_, validation_;
  Buffer metrics_, unheard_;
  std::unique_ptr<Communicator> dp_, tp_;  ///< null where the axis has one rank
  // Of the step under way.
  StageFeeder* feeder_ = nullptr;
  Observer* observer_ = nullptr;
  std::span<const Part> pieces_;
  StepOrder order_;
  StepOutcome outcome_;
};

}  // namespace pdl
