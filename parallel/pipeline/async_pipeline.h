#pragma once
// A model cut into stages that never wait for each other to finish a step: an epoch is one long schedule, each stage
// updates after each of its rounds, and a unit finds the weights that the schedule names. What its engine adds are the
// cut, the schedule and the learning rates.
//
// A step is a global batch, one unit or several (unit_plan.h). A round of a stage is the units between two updates: one
// on each of its replicas, or so many micro-batches.

#include <memory>
#include <vector>

#include "parallel/pipeline/pipeline_executor.h"
#include "parallel/pipeline/pipeline_plan.h"
#include "parallel/pipeline/round_update.h"
#include "parallel/pipeline/staged_parameters.h"
#include "parallel/pipeline/step_reports.h"
#include "parallel/pipeline/unit_plan.h"

namespace pdl {

struct AsyncOptions {
  Balance balance;
  std::vector<int> replicas;
  int units_per_step = 1;
  int units_per_update = 0;  ///< 0: one from each replica of the stage; else there are no replicas
  /// Units of a schedule that shows all that a longer one would.
  int scheduled = 1;
  std::function<Schedule(int units)> schedule;  ///< of so many units in a row
  std::vector<double> lr_factors;               ///< by stage

  /// Units between two updates of a stage.
  int round(int stage) const {
    return units_per_update > 0 ? units_per_update : replicas[static_cast<std::size_t>(stage)];
  }
  /// Units that make whole rounds on every stage.
  int multiple() const;
  /// Samples that losses are divided by: those of a round of one replica, when all are there.
  std::int64_t nominal_samples(std::int64_t global_batch) const;
};

class AsyncPipeline final : private PipelineHost {
 public:
  /// Plans only.
  AsyncPipeline(const EngineContext& context, AsyncOptions options);

  void prepare();
  MemoryByKind predicted_memory() const;
  /// Of a step, on average where a rank has not the same part in each.
  CommCounts predicted_traffic() const;

  /// The result has this rank's staleness.
  PassResult run_epoch(const EpochPlan& plan, Observer& observer);
  PassResult evaluate(const EpochPlan& plan);
  void visit_parameters(const Engine::ParameterVisitor& visit);
  std::vector<StateTensor> state();
  TrainingPosition position() const { return {.updates = steps_done_, .loss_scale = {}}; }
  void set_position(const TrainingPosition& position);

  const PipelinePlan& plan() const { return plan_; }
  int stage() const { return plan_.stage_of(rank_); }

 private:
  /// A pass over a plan that is under way.
  struct Pass {
    UnitPlan units;
    Observer* observer = nullptr;
    bool training = true;
    std::int64_t epoch = 0;
    std::vector<int> owner_versions;  ///< by unit: the weights that it finds where a tied parameter is owned
    std::vector<int> versions;        ///< by unit: the weights that it found here
    std::int64_t begun = 0, closed = 0, collected = 0;  ///< steps
    int loading = -1;                                   ///< unit whose forward is next
    int totals = 0;                                     ///< updates of a tied copy
    int limit = INT_MAX;
    StalenessRecord staleness;
    PassResult result;
  };

  MicroBatch load(int unit) override;
  std::int64_t samples(int unit) const override { return pass_.units.samples(unit); }
  void release(int unit) override;
  Tensor values(int chunk, int version) override;
  void reduce(int round) override { update_.reduce(round); }
  void update(int round) override;
  int limit() const override { return pass_.limit; }
  void progress() override { update_.tied().progress(); }

  int replica() const { return rank_ - plan_.first_rank_of(stage()); }
  int owner_stage() const;
  RoundOrder order_of(int stage, int round) const;
  void begin(const EpochPlan& plan, Observer& observer, bool training, StageFeeder& feeder);
  void apply_totals(int version);
  void begin_steps(std::int64_t step);
  void close_steps(int unit);
  void collect_steps(int unit);
  void report(std::int64_t step);
  void stop_after(std::int64_t step);

  const EngineContext& context_;
  AsyncOptions options_;
  int rank_;
  PipelinePlan plan_;
  std::vector<std::unique_ptr<StagePart>> parts_;
  PipelineExecutor executor_;
  RoundUpdate update_;
  StepReports reports_;
  LrSchedule lr_;
  StagedParameters parameters_;
  std::unique_ptr<StageFeeder> training_, validation_;
  StageFeeder* feeder_ = nullptr;
  Buffer counter_;  ///< int64: units_done_, for checkpoints
  std::int64_t steps_done_ = 0, units_done_ = 0;
  Pass pass_;
};

}  // namespace pdl
