#pragma once
// What an engine says while it works: the one upward call of a training loop. Engines say what they are doing; who
// listens decides whether to time it. No engine reads a clock.

#include <cstdint>
#include <utility>
#include <vector>

namespace pdl {

/// What a rank is doing from now on.
enum class Phase : int { data, forward, backward, communication, optimizer, other };
inline constexpr int kPhases = 6;
inline constexpr const char* kPhaseNames[kPhases] = {"data",          "forward",   "backward",
                                                     "communication", "optimizer", "other"};

/// A task of a step's schedule: what it is, and of which micro-batch. In a pipeline a task is one pass over a virtual
/// stage, the one that the rank calls `chunk`.
enum class TaskKind : int { micro_batch, forward, recompute, backward, loss };
inline constexpr int kTaskKinds = 5;
inline constexpr const char* kTaskNames[kTaskKinds] = {"micro-batch", "forward", "recompute", "backward", "loss"};
struct Task {
  TaskKind kind = TaskKind::micro_batch;
  std::int64_t number = 0;
  int chunk = 0;
};

/// Where a rank stands in the schedule of a pipeline: before the end of its first backward pass, between, after its
/// last forward pass. When both hold it is the drain.
enum class SchedulePart : int { warm_up, steady, drain };
inline constexpr int kScheduleParts = 3;

/// One finished optimizer step, the same on every rank.
struct StepReport {
  std::int64_t step = 0;     ///< within the epoch, from 0
  std::int64_t steps = 0;    ///< of the epoch
  std::int64_t samples = 0;  ///< in the global batch
  double loss = 0.0;         ///< mean over all predictions of the global batch
  double lr = 0.0;
  double grad_norm = -1.0;  ///< before clipping; -1 when it was not computed
  double loss_scale = 1.0;  ///< that the gradients of this step were multiplied by
  bool skipped = false;     ///< without update: a gradient was not finite
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void step_begin() {}
  virtual void phase(Phase) {}
  /// Tasks may lie inside each other: the latest to begin is the first to end. A pass of a pipeline begins when all
  /// that it needs is there.
  virtual void task_begin(const Task&) {}
  virtual void task_end() {}
  /// A pipeline of several stages says where it is in its schedule, before the first task and whenever it changes.
  virtual void schedule_part(SchedulePart) {}
  /// Not engines but the ledger of their communicators says when the compute stream stands still for other ranks: for a
  /// neighbour in the pipeline, or for others. Nothing else is said in between; a beginning may remain without its end.
  virtual void wait_begin() {}
  virtual void wait_end([[maybe_unused]] bool for_neighbour) {}
  /// This rank is through with a step whose report comes later, with others open in between. Steps are done in order;
  /// engines that report at once need not say so.
  virtual void step_done([[maybe_unused]] std::int64_t step) {}
  virtual void step_end(const StepReport&) {}
};

/// Several listeners as one. The first hears of each beginning first and of each end last: it is around the others.
class Observers final : public Observer {
 public:
  explicit Observers(std::vector<Observer*> listeners = {}) : listeners_(std::move(listeners)) {}

  void step_begin() override {
    for (Observer* listener : listeners_) listener->step_begin();
  }
  void phase(Phase phase) override {
    for (Observer* listener : listeners_) listener->phase(phase);
  }
  void task_begin(const Task& task) override {
    for (Observer* listener : listeners_) listener->task_begin(task);
  }
  void task_end() override {
    for (std::size_t i = listeners_.size(); i-- > 0;) listeners_[i]->task_end();
  }
  void schedule_part(SchedulePart part) override {
    for (Observer* listener : listeners_) listener->schedule_part(part);
  }
  void wait_begin() override {
    for (Observer* listener : listeners_) listener->wait_begin();
  }
  void wait_end(bool for_neighbour) override {
    for (std::size_t i = listeners_.size(); i-- > 0;) listeners_[i]->wait_end(for_neighbour);
  }
  void step_done(std::int64_t step) override {
    for (std::size_t i = listeners_.size(); i-- > 0;) listeners_[i]->step_done(step);
  }
  void step_end(const StepReport& report) override {
    for (std::size_t i = listeners_.size(); i-- > 0;) listeners_[i]->step_end(report);
  }

 private:
  std::vector<Observer*> listeners_;
};

}  // namespace pdl
