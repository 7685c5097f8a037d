#pragma once
// Tells a profiler what the training loop is doing, as nested ranges: step, task, phase. Layers tell their names
// themselves, inside of these.

#include <cstdint>

#include "engine/device/profiling.h"
#include "engine/record/observer.h"

namespace pdl {

/// A phase lasts until the next one begins, or a task begins or ends, or the step ends. Steps that overlap become
/// ranges from one end to the next, as in step times.
class RangeObserver final : public Observer {
 public:
  /// `ranges` outlives the observer; null: nobody listens.
  explicit RangeObserver(RangeListener* ranges) : ranges_(ranges) {}

  void step_begin() override;
  void phase(Phase phase) override;
  void task_begin(const Task& task) override;
  void task_end() override;
  void step_end(const StepReport& report) override;

 private:
  void open_step();
  void close_phase();

  RangeListener* ranges_;
  std::int64_t begun_steps_ = 0, ended_steps_ = 0;
  int open_tasks_ = 0;
  bool in_phase_ = false;
};

}  // namespace pdl
