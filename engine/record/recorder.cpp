#include "engine/record/recorder.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "engine/base/error.h"

namespace pdl {
namespace {

constexpr double kMsPerS = 1000.0;

// Moments behind the latest whose times are not read yet: more work than a device has queued, so reading never waits.
// The second bound holds within a step of many micro-batches, and keeps them within the stopwatch's memory.
constexpr std::size_t kUnreadAtStepEnd = 1024, kMostUnread = 3072;
static_assert(kMostUnread < Stopwatch::kRemembered);

/// A function of the host as a stopwatch.
class FunctionStopwatch final : public Stopwatch {
 public:
  explicit FunctionStopwatch(PhaseClock::Clock clock) : clock_(std::move(clock)), times_s_(kRemembered, 0.0) {}
  std::int64_t mark() override {
    times_s_[slot(marks_)] = clock_();
    return marks_++;
  }
  double seconds(std::int64_t from, std::int64_t to) override { return times_s_[slot(to)] - times_s_[slot(from)]; }
  void anchor() override {}
  double host_s(std::int64_t mark) override { return times_s_[slot(mark)]; }

 private:
  static std::size_t slot(std::int64_t mark) { return static_cast<std::size_t>(mark % kRemembered); }
  PhaseClock::Clock clock_;
  std::vector<double> times_s_;
  std::int64_t marks_ = 0;
};

template <typename Value>
Spread spread_over(const std::vector<RankEpoch>& ranks, Value value) {
  std::vector<double> values;
  for (const RankEpoch& rank : ranks) values.push_back(static_cast<double>(value(rank)));
  return spread_of(values);
}

bool is_on_axis(const std::string& operation, const std::string& axis) { return operation.starts_with(axis + "."); }

/// Waits of one rank for operations of one axis, wherever they happened.
double exposed_s(const RankEpoch& rank, const std::string& axis) {
  double sum = 0.0;
  for (const auto& [operation, record] : rank.comm) sum += is_on_axis(operation, axis) ? record.exposed_s : 0.0;
  return sum;
}

/// Waits of one rank for training traffic. Waits for samples are waits for data, as they would be without a data store.
std::optional<double> training_exposed_s(const RankEpoch& rank) {
  std::optional<double> sum;
  for (const auto& [operation, record] : rank.comm) {
    if (!is_on_axis(operation, "data_store")) sum = sum.value_or(0.0) + record.exposed_s;
  }
  return sum;
}

void merge_times(const std::vector<RankEpoch>& ranks, EpochRecord& record) {
  const auto phase_spread = [&ranks](Phase phase) {
    return spread_over(ranks, [phase](const RankEpoch& rank) { return rank.phase(phase); });
  };
  record.train_s = spread_over(ranks, [](const RankEpoch& rank) { return rank.train_s; });
  record.eval_s = spread_over(ranks, [](const RankEpoch& rank) { return rank.eval_s; }).max;
  record.data_s = phase_spread(Phase::data);
  record.forward_s = phase_spread(Phase::forward);
  record.backward_s = phase_spread(Phase::backward);
  record.optimizer_s = phase_spread(Phase::optimizer);
  // Waits inside forward and backward (tensor and pipeline parallelism) count too, so the ledger of the communicator
  // knows better than the phase; without one, the phase is all there is.
  record.comm_exposed_s = spread_over(
      ranks, [](const RankEpoch& rank) { return training_exposed_s(rank).value_or(rank.phase(Phase::communication)); });
  const double pipeline_s = spread_over(ranks, [](const RankEpoch& rank) { return exposed_s(rank, "pp"); }).mean;
  record.bubble_fraction = record.train_s.mean > 0.0 ? pipeline_s / record.train_s.mean : 0.0;
}

/// The shares of all ranks' time together.
void merge_pipeline(const std::vector<RankEpoch>& ranks, EpochRecord& record) {
  double train_s = 0.0, idle_s = 0.0, useful_s = 0.0;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!ranks[rank].pipeline) continue;
    if (!record.pipeline) record.pipeline.emplace();
    PipelineRankRecord& mine = record.pipeline->ranks.emplace_back(*ranks[rank].pipeline);
    mine.rank = static_cast<int>(rank);
    train_s += mine.train_s;
    idle_s += mine.idle_s();
    useful_s += mine.forward_s + mine.backward_s;
  }
  if (!(train_s > 0.0)) return;
  record.pipeline->idle_fraction = idle_s / train_s;
  record.pipeline->useful_fraction = useful_s / train_s;
}

void merge_memory(const std::vector<RankEpoch>& ranks, EpochRecord& record) {
  for (std::size_t kind = 0; kind < kMemoryKinds; ++kind) {
    record.memory_peak_bytes[kind] =
        spread_over(ranks, [kind](const RankEpoch& rank) { return rank.memory_peak.bytes[kind]; });
  }
  record.memory_peak_total_bytes = spread_over(ranks, [](const RankEpoch& rank) { return rank.memory_peak_total; });
  const Spread data_store = spread_over(ranks, [](const RankEpoch& rank) { return rank.data_store; });
  if (data_store.max > 0.0) record.data_store_bytes = data_store;
  for (const RankEpoch& rank : ranks) {
    record.device_memory_used_bytes = std::max(record.device_memory_used_bytes, rank.device_memory_used);
    record.library_bytes = std::max(record.library_bytes, rank.library_bytes);
    // One rank's prediction as a whole: the largest of each kind, taken from different ranks, would describe no rank.
    if (rank.memory_predicted.total() > record.memory_predicted_bytes.total()) {
      record.memory_predicted_bytes = rank.memory_predicted;
    }
  }
}

void merge_comm(const std::vector<RankEpoch>& ranks, EpochRecord& record) {
  const auto count = static_cast<double>(ranks.size());
  for (const RankEpoch& rank : ranks) {
    for (const auto& [operation, mine] : rank.comm) {
      CommRecord& merged = record.comm[operation];
      merged.calls = std::max(merged.calls, mine.calls);
      merged.bytes = std::max(merged.bytes, mine.bytes);
      merged.busy_s += mine.busy_s / count;
      merged.exposed_s += mine.exposed_s / count;
    }
  }
}

/// Flops as shares of what the devices could do.
void merge_efficiency(const EpochFacts& facts, EpochRecord& record) {
  record.flops_per_s = record.samples_per_s * facts.flops_per_sample;
  if (facts.gemm_flops_per_s) record.of_gemm = record.flops_per_s / *facts.gemm_flops_per_s;
  if (!facts.peak_flops_per_s) return;
  const double samples_per_peak = record.samples_per_s / *facts.peak_flops_per_s;
  record.mfu = samples_per_peak * facts.flops_per_sample;
  if (facts.palm_flops_per_sample) record.mfu_palm = samples_per_peak * *facts.palm_flops_per_sample;
  if (facts.recomputed_flops_per_sample) {
    record.hfu = samples_per_peak * (facts.flops_per_sample + *facts.recomputed_flops_per_sample);
  }
}

/// Where the time of this kind of pass is added up; null for a task that is no pass of a pipeline.
PassTotal* total_of(const Task& task, std::vector<StagePasses>& passes) {
  const auto chunk = static_cast<std::size_t>(task.chunk);
  if (task.kind == TaskKind::micro_batch) return nullptr;
  if (passes.size() <= chunk) passes.resize(chunk + 1);
  if (task.kind == TaskKind::forward) return &passes[chunk].forward;
  if (task.kind == TaskKind::recompute) return &passes[chunk].recompute;
  return task.kind == TaskKind::backward ? &passes[chunk].backward : &passes[chunk].loss;
}

double& seconds_of(TaskKind kind, PipelineRankRecord& rank) {
  if (kind == TaskKind::recompute) return rank.recompute_s;
  return kind == TaskKind::backward ? rank.backward_s : rank.forward_s;
}

/// Without the first `warmup` entries.
std::vector<double> after_warmup(std::vector<double> steps, std::int64_t warmup) {
  steps.erase(steps.begin(), steps.begin() + std::min(warmup, static_cast<std::int64_t>(steps.size())));
  return steps;
}

double scaled(double seconds, std::int64_t measured, std::int64_t whole) {
  return measured > 0 && whole > measured ? seconds * static_cast<double>(whole) / static_cast<double>(measured)
                                          : seconds;
}

void merge_speed(const std::vector<RankEpoch>& ranks, const EpochFacts& facts, EpochRecord& record) {
  const std::vector<double> step_ms = after_warmup(slowest_step_ms(ranks), ranks.front().warmup_steps);
  const std::vector<double> exposed_ms = after_warmup(mean_exposed_ms(ranks), ranks.front().warmup_steps);
  const double counted_s = std::accumulate(step_ms.begin(), step_ms.end(), 0.0) / kMsPerS;
  const auto counted_steps = static_cast<std::int64_t>(step_ms.size());
  if (counted_s > 0.0) record.samples_per_s = static_cast<double>(ranks.front().counted_samples) / counted_s;
  record.step_ms = percentiles(step_ms);
  if (!exposed_ms.empty()) record.comm_exposed_step_ms = percentiles(exposed_ms).median;
  if (record.step_ms.median > 0.0) {
    record.samples_per_s_median = static_cast<double>(facts.step_samples) * kMsPerS / record.step_ms.median;
  }
  if (facts.samples > 0) {
    const double tokens_per_sample = static_cast<double>(facts.tokens) / static_cast<double>(facts.samples);
    record.tokens_per_s = record.samples_per_s * tokens_per_sample;
    record.tokens_per_s_median = record.samples_per_s_median * tokens_per_sample;
  }
  merge_efficiency(facts, record);

  const bool partial_training = facts.full_steps > facts.steps;
  record.extrapolated = partial_training || facts.full_eval_steps > facts.eval_steps;
  // Warm-up would be multiplied as well, so a whole epoch is made of the steps that count.
  const double train_s = partial_training ? scaled(counted_s, counted_steps, facts.full_steps) : record.train_s.max;
  record.epoch_s = train_s + scaled(record.eval_s, facts.eval_steps, facts.full_eval_steps);
}

}  // namespace

PhaseClock::PhaseClock(std::int64_t warmup_steps, std::unique_ptr<Stopwatch> stopwatch)
    : stopwatch_(std::move(stopwatch)), warmup_left_(warmup_steps) {}

PhaseClock::PhaseClock(std::int64_t warmup_steps, Clock clock)
    : PhaseClock(warmup_steps, std::make_unique<FunctionStopwatch>(std::move(clock))) {}

double PhaseClock::steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void PhaseClock::epoch_begin() {
  epoch_ = RankEpoch();
  if (is_pipeline_) epoch_.pipeline.emplace();
  tasks_.clear();
  part_ = SchedulePart::warm_up;
  step_samples_.clear();
  unread_.clear();
  phase_ = Phase::other;
  drawn_from_s_.reset();
  open_tasks_.clear();
  open_steps_ = unreported_steps_ = 0;
  now_s_ = step_start_s_ = 0.0;
  mark_ = stopwatch_->mark();
}

void PhaseClock::note(Moment moment) {
  moment.mark = stopwatch_->mark();
  moment.traced = trace_ != nullptr && trace_->recording();
  unread_.push_back(moment);
  if (unread_.size() > kMostUnread) read_oldest(kUnreadAtStepEnd);
}

void PhaseClock::read_oldest(std::size_t keep) {
  for (; unread_.size() > keep; unread_.pop_front()) read(unread_.front());
}

/// Times are added up from moment to moment, so an epoch may hold more marks than the stopwatch remembers.
void PhaseClock::read(const Moment& moment) {
  const double passed_s = stopwatch_->seconds(mark_, moment.mark);
  mark_ = moment.mark;
  now_s_ += passed_s;
  epoch_.phase_s[static_cast<std::size_t>(phase_)] += passed_s;
  draw(moment);
  if (epoch_.pipeline) account(moment, passed_s);
  if (moment.event == Event::step_begin) step_start_s_ = now_s_;
  if (moment.event == Event::phase || moment.event == Event::step_end) phase_ = moment.next;
  if (moment.event != Event::step_end) return;
  epoch_.step_ms.push_back((now_s_ - step_start_s_) * kMsPerS);
  step_start_s_ = now_s_;
}

/// Where the time since the moment before went in a pipeline. What ends a wait says whom it was for; what a pass waits
/// for is part of how long it takes, but no work.
void PhaseClock::account(const Moment& moment, double passed_s) {
  PipelineRankRecord& mine = *epoch_.pipeline;
  const bool waited = moment.event == Event::wait_end;
  PassTotal* const pass = tasks_.empty() ? nullptr : total_of(tasks_.back(), mine.passes);
  if (pass != nullptr) {
    pass->s += passed_s;
    (waited ? mine.comm_passes_s : seconds_of(tasks_.back().kind, mine)) += passed_s;
  } else if (waited && moment.for_neighbour) {
    mine.wait_s[static_cast<std::size_t>(part_)] += passed_s;
  } else if (waited || phase_ == Phase::communication) {
    mine.comm_s += passed_s;
  } else {
    (phase_ == Phase::optimizer ? mine.optimizer_s : mine.other_s) += passed_s;
  }

  if (moment.event == Event::schedule_part) part_ = moment.part;
  if (moment.event == Event::task_begin) {
    tasks_.push_back(moment.task);
    if (PassTotal* const begun = total_of(moment.task, mine.passes)) ++begun->count;
  }
  if (moment.event == Event::task_end && !tasks_.empty()) tasks_.pop_back();
}

/// What ends at this moment goes into the trace, and what begins is remembered for it.
void PhaseClock::draw(const Moment& moment) {
  if (!moment.traced) {
    drawn_from_s_.reset();
    open_tasks_.clear();
    return;
  }
  const double at_s = stopwatch_->host_s(moment.mark);
  if (moment.event == Event::task_begin) {
    const std::string chunk = moment.task.chunk > 0 ? str(".", moment.task.chunk) : "";
    const char* const name = kTaskNames[static_cast<int>(moment.task.kind)];
    open_tasks_.emplace_back(str(name, " ", moment.task.number, chunk), at_s);
    return;
  }
  if (moment.event == Event::task_end) {
    if (open_tasks_.empty()) return;  // it began before the trace
    trace_->span(Trace::Row::schedule, open_tasks_.back().first, open_tasks_.back().second, at_s);
    open_tasks_.pop_back();
    return;
  }
  if (moment.event != Event::phase && moment.event != Event::step_begin && moment.event != Event::step_end) return;
  if (drawn_from_s_) trace_->span(Trace::Row::steps, kPhaseNames[static_cast<int>(phase_)], *drawn_from_s_, at_s);
  drawn_from_s_ = at_s;
  if (moment.event == Event::phase) return;
  if (moment.event == Event::step_end) {
    trace_->span(Trace::Row::steps, str("step ", moment.step), step_drawn_from_s_, at_s);
  }
  step_drawn_from_s_ = at_s;
}

void PhaseClock::phase(Phase phase) { note({.event = Event::phase, .next = phase}); }

void PhaseClock::task_begin(const Task& task) {
  if (hears_tasks()) note({.event = Event::task_begin, .task = task});
}

void PhaseClock::task_end() {
  if (hears_tasks()) note({.event = Event::task_end});
}

void PhaseClock::schedule_part(SchedulePart part) {
  if (!is_pipeline_) {
    is_pipeline_ = true;
    epoch_.pipeline.emplace().other_s = now_s_;  // what was read before; the rest is still to be read
  }
  note({.event = Event::schedule_part, .part = part});
}

void PhaseClock::wait_begin() {
  if (epoch_.pipeline) note({.event = Event::wait_begin});
}

void PhaseClock::wait_end(bool for_neighbour) {
  if (epoch_.pipeline) note({.event = Event::wait_end, .for_neighbour = for_neighbour});
}

void PhaseClock::step_begin() {
  if (open_steps_++ == 0) note({.event = Event::step_begin});
}

void PhaseClock::step_done(std::int64_t step) {
  note({.event = Event::step_end, .step = step});
  open_steps_ = std::max(open_steps_ - 1, 0);
  ++unreported_steps_;
}

void PhaseClock::step_end(const StepReport& report) {
  if (unreported_steps_ == 0) step_done(report.step);
  --unreported_steps_;
  read_oldest(kUnreadAtStepEnd);
  step_samples_.push_back(report.samples);
  last_step_ = report;
}

RankEpoch PhaseClock::epoch_end() {
  note({.event = Event::phase});
  read_oldest(0);
  epoch_.train_s = now_s_;
  if (epoch_.pipeline) epoch_.pipeline->train_s = now_s_;
  const auto steps = static_cast<std::int64_t>(step_samples_.size());
  epoch_.warmup_steps = std::clamp<std::int64_t>(steps - 1, 0, std::max<std::int64_t>(warmup_left_, 0));
  warmup_left_ -= epoch_.warmup_steps;
  epoch_.counted_samples =
      std::accumulate(step_samples_.begin() + epoch_.warmup_steps, step_samples_.end(), std::int64_t{0});
  return std::exchange(epoch_, {});
}

std::vector<double> slowest_step_ms(const std::vector<RankEpoch>& ranks) {
  std::vector<double> slowest;
  for (const RankEpoch& rank : ranks) {
    slowest.resize(std::max(slowest.size(), rank.step_ms.size()), 0.0);
    for (std::size_t step = 0; step < rank.step_ms.size(); ++step) {
      slowest[step] = std::max(slowest[step], rank.step_ms[step]);
    }
  }
  return slowest;
}

std::vector<double> mean_exposed_ms(const std::vector<RankEpoch>& ranks) {
  std::vector<double> mean;
  for (const RankEpoch& rank : ranks) {
    if (rank.step_exposed_ms.empty()) return {};
    mean.resize(std::max(mean.size(), rank.step_exposed_ms.size()), 0.0);
    for (std::size_t step = 0; step < rank.step_exposed_ms.size(); ++step) {
      mean[step] += rank.step_exposed_ms[step] / static_cast<double>(ranks.size());
    }
  }
  return mean;
}

EpochRecord merge(const std::vector<RankEpoch>& ranks, const EpochFacts& facts) {
  PDL_CHECK(!ranks.empty(), "an epoch of no ranks");
  EpochRecord record;
  record.epoch = facts.epoch;
  record.steps = facts.steps;
  record.samples = facts.samples;
  record.tokens = facts.tokens;
  record.train_loss = facts.train_loss;
  record.val_loss = facts.val_loss;
  record.val_metric_name = facts.val_metric_name;
  record.val_metric = facts.val_metric;
  record.lr = facts.lr;
  record.loss_scale = facts.loss_scale;
  record.skipped_steps = facts.skipped_steps;
  record.elapsed_s = facts.elapsed_s;
  merge_times(ranks, record);
  merge_memory(ranks, record);
  merge_comm(ranks, record);
  merge_pipeline(ranks, record);
  for (const RankEpoch& rank : ranks) {  // the replicas of a stage all have its numbers
    const bool is_new =
        rank.staleness && (record.staleness.empty() || record.staleness.back().stage < rank.staleness->stage);
    if (is_new) record.staleness.push_back(*rank.staleness);
  }
  merge_speed(ranks, facts, record);
  return record;
}

}  // namespace pdl
