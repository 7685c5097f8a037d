#pragma once
// measure.trace: which steps are drawn, and how the ranks' drawings become one file.

#include <cstdint>
#include <memory>
#include <string>

#include "engine/record/recorder.h"
#include "engine/record/trace.h"
#include "parallel/comm/comm_ledger.h"
#include "parallel/comm/world.h"

namespace pdl {

/// Lets the trace record during some steps of the run. Stands around all other observers, so that nothing of these
/// steps is missed. When it starts and when it stops it waits for the device. The device's activity is logged, and
/// forgotten, from the set-up on: else work that is recorded for replay before those steps would not show.
class StepTracer final : public Observer {
 public:
  /// Steps [first, first + count) of this process; count 0: none. `device`, `clock` and `ledger` outlive the tracer.
  /// Comes before Engine::prepare.
  StepTracer(std::int64_t first, std::int64_t count, Device& device, PhaseClock& clock, CommLedger& ledger);
  ~StepTracer() override;
  StepTracer(const StepTracer&) = delete;
  StepTracer& operator=(const StepTracer&) = delete;

  void step_begin() override;
  void step_end(const StepReport& report) override;

  /// True from the end of the last step on, until `write` was called.
  bool complete() const { return complete_; }
  /// All ranks' traces as one file, on every rank; collective. What clock and ledger have not read yet is not in it:
  /// call it after the end of an epoch. `zero_s` comes from common_zero_s.
  std::string write(World& world, double zero_s);

 private:
  void start();
  void stop();

  std::int64_t first_, end_;
  Device& device_;
  PhaseClock& clock_;
  CommLedger& ledger_;
  Trace trace_;
  std::unique_ptr<ActivityLog> activity_;
  double begin_s_ = 0.0;  ///< of the first step
  std::int64_t begun_ = 0, ended_ = 0;
  bool complete_ = false;
};

/// One moment on the steady clocks of all hosts: a barrier. Ranks of a host have one clock, and get one answer.
double common_zero_s(World& world);

}  // namespace pdl
