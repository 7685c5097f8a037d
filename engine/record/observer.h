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
  /// A task of the step's schedule, such as "forward" of micro-batch 3 in a pipeline, for traces and profilers. `what`
  /// is a literal. Tasks may lie inside each other: the latest to begin is the first to end.
  virtual void task_begin([[maybe_unused]] const char* what, [[maybe_unused]] std::int64_t number) {}
  virtual void task_end() {}
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
  void task_begin(const char* what, std::int64_t number) override {
    for (Observer* listener : listeners_) listener->task_begin(what, number);
  }
  void task_end() override {
    for (std::size_t i = listeners_.size(); i-- > 0;) listeners_[i]->task_end();
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
