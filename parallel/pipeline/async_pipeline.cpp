#include "parallel/pipeline/async_pipeline.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "parallel/comm/world.h"
#include "parallel/pipeline/schedule_check.h"

namespace pdl {
namespace {

PipelineOptions pipeline_options(const AsyncOptions& options) {
  return {
      .balance = options.balance,
      .stages = static_cast<int>(options.balance.size()),
      .replicas = options.replicas,
      .micro_batches = options.units_per_step,
      .scheduled = options.scheduled,
      .schedule = [schedule = options.schedule, start = options.start()](int units) { return schedule(units, start); },
      .grid = ProcessGrid({.pp = std::accumulate(options.replicas.begin(), options.replicas.end(), 0)})};
}

/// Units by which the sum over a step's ranks is asked for after its end. No rank's first pass of a unit comes before
/// the last backward pass of one so far behind it, so the other ranks need not wait for this one to get there.
int report_lag(const PipelinePlan& plan) { return 2 * plan.ranks(); }

LrSchedule make_lr_schedule(const EngineContext& context) {
  const TrainingOptions& training = context.training;
  const EpochPlan plan(context.train_samples, training.global_batch, training.seed, 0, false, training.drop_last,
                       context.max_steps_per_epoch);
  return LrSchedule(training.lr_schedule, training.optimizer.lr, plan.steps(), plan.steps() * training.epochs);
}

int first_rank_of_stage(const AsyncOptions& options, int stage) {
  return std::accumulate(options.replicas.begin(), options.replicas.begin() + stage, 0);
}

/// Rounds between a unit's forward and its backward pass on the stage, rounded up.
int rounds_in_flight(const AsyncOptions& options, int stage) {
  const Schedule schedule = options.shown();
  const auto rank = static_cast<std::size_t>(first_rank_of_stage(options, stage));
  const int per_round = std::max(1, options.units_per_update);
  return (schedule.ranks[rank].in_flight + per_round - 1) / per_round;
}

/// Of a parameter that two stages share; 0 without one.
int owner_stage_of(const PipelinePlan& plan) { return plan.tied().empty() ? 0 : plan.stage_of(plan.tied()[0].rank); }

}  // namespace

int AsyncOptions::multiple() const {
  int units = std::max(1, units_per_update);
  for (const int count : replicas) units = std::lcm(units, count);
  return units;
}

std::int64_t AsyncOptions::nominal_samples(std::int64_t global_batch) const {
  return units_per_update > 0 ? global_batch : cut_step(global_batch, units_per_step)[0].count;
}

VersionNeeds AsyncOptions::version_needs(const PipelinePlan& plan, int rank) const {
  const Schedule whole = shown();
  const int owner = owner_stage_of(plan);
  return {.versions = whole.ranks[static_cast<std::size_t>(rank)].versions,
          .owner_versions = whole.ranks[static_cast<std::size_t>(plan.first_rank_of(owner))].versions,
          .tied_delay = rounds_in_flight(*this, owner),
          .outlive_run = keeps_lags};
}

AsyncPipeline::AsyncPipeline(const EngineContext& context, AsyncOptions options)
    : context_(context),
      options_(std::move(options)),
      rank_(context.world.rank()),
      plan_(context, pipeline_options(options_)),
      parts_(plan_.make_parts(rank_)),
      executor_({parts_[0].get()}, plan_.executor_size(rank_), context.device, context.backend),
      update_(context, plan_, *parts_[0], rank_, options_.version_needs(plan_, rank_)),
      reports_(context, report_lag(plan_) + 2 * options_.multiple() + 2),
      lr_(make_lr_schedule(context)),
      parameters_(context, plan_) {
  if (options_.keeps_lags) check_schedule(options_.schedule(options_.scheduled, options_.scheduled));
}

int AsyncPipeline::owner_stage() const { return owner_stage_of(plan_); }

void AsyncPipeline::prepare() {
  ParamStore& store = parts_[0]->store;
  store.allocate(context_.device, context_.training.dtype);
  store.initialise(context_.device, context_.training.seed);
  store.round_master(context_.backend);
  std::unique_ptr<Communicator> activations = context_.world.split(0, rank_, "pp");
  executor_.prepare(std::move(activations), context_.world.split(0, rank_, "pp"));
  update_.prepare();
  reports_.prepare();
  counter_ = context_.device.allocate(size_of(DType::int64), MemoryKind::workspace);
  parameters_.prepare();
  training_ = plan_.make_feeder(rank_, *context_.data.train, true);
  validation_ = plan_.make_feeder(rank_, *context_.data.validation, false);
}

MemoryByKind AsyncPipeline::predicted_memory() const {
  MemoryByKind memory = plan_.predicted_memory(rank_);
  for (const MemoryByKind& more : {parts_[0]->store.predicted_memory(context_.training.dtype),
                                   update_.predicted_memory(), reports_.predicted_memory()}) {
    memory += more;
  }
  memory[MemoryKind::workspace] += size_of(DType::int64);
  memory[MemoryKind::communication] += parameters_.predicted_bytes();
  if (context_.training.deterministic) {  // of the world's group and of the two that carry messages
    memory[MemoryKind::communication] += 3 * deterministic_scratch_bytes(context_.world.size());
  }
  return memory;
}

CommCounts AsyncPipeline::predicted_traffic() const {
  CommCounts counts = reports_.predicted_traffic();
  const auto share = [](std::int64_t count, std::int64_t of) { return (count + of / 2) / of; };
  for (const auto& [key, count] : update_.predicted_traffic()) {
    counts[key] = {.calls = share(count.calls * options_.units_per_step, options_.round(stage())),
                   .bytes = share(count.bytes * options_.units_per_step, options_.round(stage()))};
  }
  const Stage& mine = parts_[0]->stage;
  const int replicas = plan_.replicas_of(stage());
  const bool is_first = stage() == 0, is_last = stage() + 1 == plan_.options().stages;
  CommCount sent, received;
  for (const Part& piece : cut_step(context_.training.global_batch, options_.units_per_step)) {
    sent.calls += (is_first ? 0 : 1) + (is_last ? 0 : 1);
    sent.bytes +=
        (is_first ? 0 : mine.input_spec(piece.count).bytes()) + (is_last ? 0 : mine.output_spec(piece.count).bytes());
  }
  if (sent.calls == 0) return counts;
  counts["pp.send"] = {.calls = share(sent.calls, replicas), .bytes = share(sent.bytes, replicas)};
  counts["pp.recv"].calls = share(sent.calls, replicas);
  return counts;
}

void AsyncPipeline::begin(const EpochPlan& plan, Observer& observer, bool training, StageFeeder& feeder) {
  pass_ = {};
  pass_.units = UnitPlan(plan, options_.units_per_step, training ? options_.multiple() : 1);
  pass_.observer = &observer;
  pass_.training = training;
  pass_.epoch = plan.epoch();
  pass_.versions.assign(static_cast<std::size_t>(pass_.units.units()), 0);
  std::vector<std::span<const std::int64_t>> mine;
  for (int unit = replica(); unit < pass_.units.units(); unit += plan_.replicas_of(stage())) {
    mine.push_back(pass_.units.ids(unit));
  }
  feeder_ = &feeder;
  feeder.begin(std::move(mine));
}

PassResult AsyncPipeline::run_epoch(const EpochPlan& plan, Observer& observer) {
  begin(plan, observer, true, *training_);
  const int units = pass_.units.units();
  if (units == 0) return pass_.result;
  const Schedule schedule = options_.schedule(units, options_.keeps_lags ? std::optional(units_done_) : std::nullopt);
  pass_.owner_versions.assign(static_cast<std::size_t>(units), 0);
  for (int replica = 0; replica < plan_.replicas_of(owner_stage()); ++replica) {
    const int owner = plan_.first_rank_of(owner_stage()) + replica;
    for (const Action& action : schedule.ranks[static_cast<std::size_t>(owner)].actions) {
      if (action.act != Act::forward) continue;
      pass_.owner_versions[static_cast<std::size_t>(action.micro_batch)] = action.version;
    }
  }
  update_.ring().restart();
  update_.tied().begin(units / options_.round(owner_stage()));
  executor_.run(schedule, rank_, *this, observer, true);
  const int trained = std::min(units, pass_.limit);
  observer.phase(Phase::communication);
  apply_last_totals(trained / options_.round(owner_stage()));
  update_.tied().drain();
  close_steps(trained);
  collect_steps(units + report_lag(plan_));
  observer.phase(Phase::other);
  StalenessRecord& staleness = pass_.staleness;
  staleness.stage = stage();
  staleness.samples_per_update = static_cast<double>(pass_.units.samples(0, trained)) /
                                 static_cast<double>(std::max<std::int64_t>(1, staleness.updates));
  staleness.versions = update_.ring().distinct();
  staleness.weight_drift = update_.drift();
  pass_.result.staleness = staleness;
  steps_done_ += pass_.units.steps();
  units_done_ += trained;
  return pass_.result;
}

PassResult AsyncPipeline::evaluate(const EpochPlan& plan) {
  Observer nobody;
  begin(plan, nobody, false, *validation_);
  if (pass_.units.units() > 0) {
    executor_.run(plan_.evaluation(pass_.units.units()), rank_, *this, nobody, false);
  }
  reports_.close(0);
  const StepSums sums = reports_.collect(0);
  return {.loss_sum = sums.loss_sum,
          .correct = sums.correct,
          .predictions = plan.samples() * context_.model.predictions_per_sample,
          .steps = plan.steps()};
}

MicroBatch AsyncPipeline::load(int unit) {
  const std::int64_t step = pass_.units.step_of(unit);
  pass_.observer->phase(Phase::data);
  if (pass_.training) {
    collect_steps(unit);
    begin_steps(step);
    if (update_.tied().copies()) pass_.observer->phase(Phase::optimizer);
    apply_totals(pass_.owner_versions[static_cast<std::size_t>(unit)]);
    pass_.observer->phase(Phase::data);
    pass_.loading = unit;
  }
  MicroBatch batch = feeder_->next(context_.device.compute_stream(), steps_done_ + step);
  pass_.observer->phase(Phase::forward);
  batch.metrics = reports_.metrics(pass_.training ? step : 0);
  batch.seed = context_.training.seed;
  batch.gradient_scale = 1.0 / static_cast<double>(options_.nominal_samples(context_.training.global_batch) *
                                                   context_.model.predictions_per_sample);
  return batch;
}

void AsyncPipeline::release(int unit) {
  feeder_->release(unit / plan_.replicas_of(stage()), context_.device.compute_stream());
  feeder_->send_ahead();
}

Tensor AsyncPipeline::values(int, int version) {
  if (!pass_.training) return update_.ring().values(update_.ring().newest());
  if (pass_.loading >= 0) pass_.versions[static_cast<std::size_t>(pass_.loading)] = version;
  pass_.loading = -1;
  return update_.ring().values(version);
}

RoundOrder AsyncPipeline::order_of(int stage, int round) const {
  const int units = options_.round(stage), first = round * units;
  const std::int64_t step = steps_done_ + pass_.units.step_of(first);
  return {.version = round,
          .update = units_done_ / units + round,
          .lr = lr_.at(step) * options_.lr_factors[static_cast<std::size_t>(stage)],
          .divisor = static_cast<double>(pass_.units.samples(first, first + units)) /
                     static_cast<double>(options_.nominal_samples(context_.training.global_batch))};
}

void AsyncPipeline::update(int round) {
  update_.apply(order_of(stage(), round));
  const int last =
      round * options_.round(stage()) + (options_.units_per_update > 0 ? options_.units_per_update - 1 : replica());
  std::vector<std::int64_t>& behind = pass_.staleness.updates_behind;
  const auto lag = static_cast<std::size_t>(round - pass_.versions[static_cast<std::size_t>(last)]);
  if (behind.size() <= lag) behind.resize(lag + 1, 0);
  ++behind[lag];
  ++pass_.staleness.updates;
  close_steps(options_.units_per_update > 0 ? last + 1 : last + plan_.replicas_of(stage()));
}

/// Brings a tied copy to the version that the owner uses for the next unit: one of before the epoch, up to the newest
/// there was, or one that totals make.
void AsyncPipeline::apply_totals(int version) {
  if (!update_.tied().copies()) return;
  if (const int old = std::min(version, 0); pass_.copy_version <= 0 && pass_.copy_version != old) {
    update_.find_copy(owner_rounds_done() + old);
    pass_.copy_version = old;
  }
  for (; pass_.copy_version < version; ++pass_.copy_version) {
    update_.apply_total(order_of(owner_stage(), pass_.copy_version));
  }
}

/// Brings a tied copy to the newest version of the epoch, and keeps those on the way.
void AsyncPipeline::apply_last_totals(int newest) {
  if (!update_.tied().copies()) return;
  for (int version = pass_.copy_version; version <= newest; ++version) {
    apply_totals(version);
    update_.keep_copy(owner_rounds_done() + version);
  }
}

void AsyncPipeline::begin_steps(std::int64_t step) {
  for (; pass_.begun <= step; ++pass_.begun) pass_.observer->step_begin();
}

/// This rank has nothing more to do for units before `unit`.
void AsyncPipeline::close_steps(int unit) {
  for (; pass_.closed < pass_.units.steps() && pass_.units.end_of(pass_.closed) <= unit; ++pass_.closed) {
    begin_steps(pass_.closed);
    reports_.close(pass_.closed);
    pass_.observer->step_done(pass_.closed);
  }
}

/// Before the first pass of `unit`.
void AsyncPipeline::collect_steps(int unit) {
  while (pass_.collected < pass_.units.steps() && pass_.units.end_of(pass_.collected) + report_lag(plan_) <= unit &&
         pass_.units.end_of(pass_.collected) <= pass_.limit) {
    report(pass_.collected++);
  }
}

void AsyncPipeline::report(std::int64_t step) {
  const StepSums sums = reports_.collect(step);
  const std::int64_t samples = pass_.units.samples(pass_.units.begin_of(step), pass_.units.end_of(step));
  const std::int64_t predictions = samples * context_.model.predictions_per_sample;
  pass_.result.loss_sum += sums.loss_sum;
  pass_.result.correct += sums.correct;
  pass_.result.predictions += predictions;
  pass_.result.steps += 1;
  if (sums.ranks_asked_to_stop > 0.0 && !pass_.result.stopped) stop_after(step);
  pass_.observer->step_end({.step = step,
                            .steps = pass_.units.steps(),
                            .samples = samples,
                            .loss = sums.loss_sum / static_cast<double>(predictions),
                            .lr = lr_.at(steps_done_ + step)});
  if (!std::isfinite(sums.loss_sum)) {
    throw Error(str("the loss stopped being finite in epoch ", pass_.epoch, ", step ", step,
                    "; a smaller learning rate, warm-up or clipping may help"),
                ExitCode::numeric);
  }
}

/// All ranks learn of it with the same step, but have come to different units. The last one that is trained lies beyond
/// all of these, and beyond the messages that ranks expect already.
void AsyncPipeline::stop_after(std::int64_t step) {
  const int owner = owner_stage(), ahead = rounds_in_flight(options_, owner) + 3 + plan_.ranks();
  const int multiple = options_.multiple();
  const int wanted = pass_.units.end_of(step) + 2 * report_lag(plan_) + ahead * options_.round(owner);
  pass_.result.stopped = true;
  pass_.limit = std::min((wanted + multiple - 1) / multiple * multiple, pass_.units.units());
  update_.tied().limit(pass_.limit / options_.round(owner));
}

void AsyncPipeline::visit_parameters(const Engine::ParameterVisitor& visit) {
  const auto held = [this](int index) {
    const std::string& name = plan_.dense().params()[static_cast<std::size_t>(index)].spec.name;
    return HeldPart{.values = range_of(parts_[0]->store, update_.ring().weights(), name)};
  };
  parameters_.visit([this](int index) { return std::vector{plan_.owner_of(index)}; }, held, visit);
}

std::vector<StateTensor> AsyncPipeline::state() {
  const Tensor count = counter_.tensor(DType::int64, Shape{1});
  context_.device.copy(count.raw(), &units_done_, sizeof units_done_, context_.device.compute_stream());
  std::vector<StateTensor> tensors = update_.state();
  tensors.push_back({"units", count});
  return tensors;
}

void AsyncPipeline::set_position(const TrainingPosition& position) {
  Stream& stream = context_.device.compute_stream();
  steps_done_ = position.updates;
  context_.device.copy(&units_done_, counter_.raw(), sizeof units_done_, stream);
  stream.synchronize();
  update_.restored(units_done_ / options_.round(stage()));
}

}  // namespace pdl
