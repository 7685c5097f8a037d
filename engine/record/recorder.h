#pragma once
// From what a training loop reports to an EpochRecord, in three moves:
//
//   PhaseClock clock(warmup_steps, device.make_stopwatch());  // on every rank; the Observer of Engine::run_epoch
//   clock.epoch_begin();  engine.run_epoch(plan, clock);  RankEpoch mine = clock.epoch_end();
//   mine.eval_s = ...; mine.memory_peak = ...;    // what clocks do not see
//   gather encode(mine) from all ranks            // the caller's one collective; nothing here knows MPI
//   EpochRecord record = merge(decoded, facts);   // on rank 0
//
// Step times and throughput leave out the first steps of the run (warm-up); the seconds of the phases do not, so that
// they add up to the epoch's training time.

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/device/device.h"
#include "engine/record/observer.h"
#include "engine/record/records.h"
#include "engine/record/trace.h"

namespace pdl {

/// One epoch as one rank lived it.
struct RankEpoch {
  double train_s = 0.0;                   ///< from epoch_begin to epoch_end
  std::array<double, kPhases> phase_s{};  ///< they add up to train_s
  std::vector<double> step_ms;            ///< of every step
  std::vector<double> step_exposed_ms;    ///< of it exposed communication; empty when nobody measured it
  std::int64_t warmup_steps = 0;          ///< how many of them, from the start, do not count
  std::int64_t counted_samples = 0;       ///< global samples of the steps that count
  /// Of a rank in a pipeline; which rank and stage that is the clock does not know.
  std::optional<PipelineRankRecord> pipeline;

  // For the caller to fill in.
  double eval_s = 0.0;
  MemoryByKind memory_peak, memory_predicted;
  std::int64_t memory_peak_total = 0;
  std::int64_t device_memory_used = 0, library_bytes = 0;
  std::int64_t data_store = 0;  ///< bytes of host memory that samples of the data store take; 0 without one
  std::optional<StalenessRecord> staleness;  ///< of this rank's stage
  std::map<std::string, CommRecord> comm;    ///< of this rank's training, without evaluation, keyed by "axis.operation"

  double phase(Phase phase) const { return phase_s[static_cast<std::size_t>(phase)]; }
};

/// Times what an engine says it does.
///
/// Times are those of the device: a phase lasts from the moment when its first work could start to the moment when its
/// last work is done, and holds what the compute stream waited for in between. Inside an epoch the clock only marks
/// these moments; it reads them long after they have passed, so that neither host nor device waits for it.
class PhaseClock final : public Observer {
 public:
  using Clock = std::function<double()>;  ///< seconds since some fixed moment, never running backwards
  /// `warmup_steps` counts from the start of the process, over all epochs. An epoch that has no other steps still
  /// counts its last one.
  PhaseClock(std::int64_t warmup_steps, std::unique_ptr<Stopwatch> stopwatch);
  /// Reads a clock of the host instead.
  explicit PhaseClock(std::int64_t warmup_steps, Clock clock = steady_seconds);

  void epoch_begin();
  /// Waits for all work of the epoch on the compute stream.
  RankEpoch epoch_end();

  void step_begin() override;
  void phase(Phase phase) override;
  /// Outside pipelines tasks matter to a trace only, and waits to nobody.
  void task_begin(const Task& task) override;
  void task_end() override;
  void schedule_part(SchedulePart part) override;
  void wait_begin() override;
  void wait_end(bool for_neighbour) override;
  /// A step lasts from its step_begin or, when steps overlap, from the end of the step before; to step_done or, without
  /// it, to its report.
  void step_done(std::int64_t step) override;
  void step_end(const StepReport& report) override;

  /// Steps, phases and tasks go there too while it records; null: nowhere.
  void trace_to(Trace* trace) { trace_ = trace; }
  /// See Stopwatch::anchor; before a trace begins.
  void anchor() { stopwatch_->anchor(); }

  /// The latest report: loss and learning rate for progress lines.
  const StepReport& last_step() const { return last_step_; }
  static double steady_seconds();

 private:
  enum class Event { phase, task_begin, task_end, schedule_part, wait_begin, wait_end, step_begin, step_end };
  /// What happened at a mark, until its time is read.
  struct Moment {
    std::int64_t mark = 0;
    Event event = Event::phase;
    Phase next = Phase::other;  ///< from here on
    Task task = {};             ///< that begins
    SchedulePart part = SchedulePart::warm_up;
    bool for_neighbour = false;
    std::int64_t step = 0;
    bool traced = false;
  };
  void note(Moment moment);
  void read_oldest(std::size_t keep);
  void read(const Moment& moment);
  void draw(const Moment& moment);
  void account(const Moment& moment, double passed_s);
  bool hears_tasks() const { return epoch_.pipeline || (trace_ != nullptr && trace_->recording()); }

  std::unique_ptr<Stopwatch> stopwatch_;
  std::int64_t warmup_left_;
  RankEpoch epoch_;
  std::vector<std::int64_t> step_samples_;
  int open_steps_ = 0;        // begun and not done
  int unreported_steps_ = 0;  // done and not ended
  StepReport last_step_;
  std::deque<Moment> unread_;
  // As of the latest moment that was read: its mark, the phase from there on, seconds since the epoch's begin.
  std::int64_t mark_ = 0;
  Phase phase_ = Phase::other;
  double now_s_ = 0.0, step_start_s_ = 0.0;
  bool is_pipeline_ = false;  ///< as was said in some epoch; while one is under way, epoch_.pipeline is there
  // As of that moment, in a pipeline.
  SchedulePart part_ = SchedulePart::warm_up;
  std::vector<Task> tasks_;  ///< under way
  // For the trace: since when, on the host's clock, the phase, the step and the tasks under way last.
  Trace* trace_ = nullptr;
  std::optional<double> drawn_from_s_;
  double step_drawn_from_s_ = 0.0;
  std::vector<std::pair<std::string, double>> open_tasks_;
};

// --- epoch_encoding.cpp
/// A RankEpoch as numbers only, so that one gather brings all ranks together. Lengths differ between ranks; zeros
/// behind the end are ignored by `decode`, so pad to the longest.
std::vector<double> encode(const RankEpoch& epoch);
/// Throws Error(internal) when the numbers are no encoded epoch.
RankEpoch decode(std::span<const double> numbers);
// ---

/// What is the same on every rank.
struct EpochFacts {
  std::int64_t epoch = 0, steps = 0, samples = 0, tokens = 0;  ///< trained in this epoch; tokens 0 for images
  std::int64_t full_steps = 0;  ///< of the whole epoch; more than `steps` means that epoch_s is extrapolated
  std::int64_t eval_steps = 0;  ///< evaluated, and of the whole evaluation
  std::int64_t full_eval_steps = 0;
  double train_loss = 0.0, val_loss = 0.0;
  std::string val_metric_name;
  double val_metric = 0.0;
  double lr = 0.0;
  double loss_scale = 1.0;         ///< of the last step
  std::int64_t skipped_steps = 0;  ///< of `steps`
  double elapsed_s = 0.0;
  std::int64_t step_samples = 0;  ///< of a whole step
  double flops_per_sample = 0.0;  ///< of the model, forward and backward, without recomputation
  std::optional<double> palm_flops_per_sample, recomputed_flops_per_sample;  ///< as in ModelDescription
  std::optional<double> peak_flops_per_s;  ///< of all devices together; empty when not known
  std::optional<double> gemm_flops_per_s;  ///< likewise, as measured
};

/// Merges all ranks' epochs, in rank order. A global step lasts as long as on its slowest rank.
EpochRecord merge(const std::vector<RankEpoch>& ranks, const EpochFacts& facts);

/// Global step times (ms), warm-up included: a column of steps.csv.
std::vector<double> slowest_step_ms(const std::vector<RankEpoch>& ranks);
/// Exposed communication of each step (ms) as the mean over ranks, warm-up included: the next one. Empty when some rank
/// has not measured it.
std::vector<double> mean_exposed_ms(const std::vector<RankEpoch>& ranks);

}  // namespace pdl
