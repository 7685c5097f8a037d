#pragma once
// A model cut into stages that never wait for each other to finish a step: an epoch is one long schedule, each stage
// updates after each of its rounds, and a unit finds the weights that the schedule names. What its engine adds are the
// cut, the schedule and the learning rates.
//
// Between epochs stands validation, and a checkpoint, of one model: so an epoch's last units go through before it, and
// every stage has made all its updates. What becomes of the lags is the engine's choice. Either they begin anew, and
// the first units of an epoch find the newest weights. Or they go on (`keeps_lags`), and these units find the versions
// that they would have found in a pipeline that never runs empty: unit t of the whole training the weights after max(0,
// t / r - W) updates. All of them are still there, as a ring of W + 1 versions holds the last ones up to the newest; so
// nothing is kept in flight over a validation, and a checkpoint has the ring's older versions besides. What this does
// not save is the time to empty and to fill the pipeline, W units an epoch.
//
// A step is a global batch, one unit or several (unit_plan.h). A round of a stage is the units between two updates: one
// on each of its replicas, or so many micro-batches.

#include <memory>
#include <optional>
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
  /// Of so many units in a row. `before`: where lags are kept, the units of earlier epochs.
  std::function<Schedule(int units, std::optional<std::int64_t> before)> schedule;
  std::vector<double> lr_factors;  ///< by stage
  bool keeps_lags = false;         ///< over the end of an epoch

  /// Units between two updates of a stage.
  int round(int stage) const {
    return units_per_update > 0 ? units_per_update : replicas[static_cast<std::size_t>(stage)];
  }
  /// Units that make whole rounds on every stage.
  int multiple() const;
  /// Samples that losses are divided by: those of a round of one replica, when all are there.
  std::int64_t nominal_samples(std::int64_t global_batch) const;
  /// What `schedule` is told in the first epoch.
  std::optional<std::int64_t> start() const { return keeps_lags ? std::optional<std::int64_t>(0) : std::nullopt; }
  /// The schedule that shows all, of the first epoch.
  Schedule shown() const { return schedule(scheduled, start()); }
  /// Of a rank of `plan`, which is made of these options.
  VersionNeeds version_needs(const PipelinePlan& plan, int rank) const;
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
    int copy_version = 0;                               ///< of a tied copy
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
  /// Updates of a tied parameter in earlier epochs.
  std::int64_t owner_rounds_done() const { return units_done_ / options_.round(owner_stage()); }
  RoundOrder order_of(int stage, int round) const;
  void begin(const EpochPlan& plan, Observer& observer, bool training, StageFeeder& feeder);
  int owner_stage() const;
  void apply_totals(int version);
  void apply_last_totals(int newest);
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
