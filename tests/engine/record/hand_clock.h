#pragma once
// Time as a test says it is, and steps to report.

#include "engine/record/recorder.h"

namespace pdl {

/// A clock that a test moves.
struct HandClock {
  double now = 100.0;
  PhaseClock::Clock reader() {
    return [this] { return now; };
  }
};

inline StepReport step_of(std::int64_t samples) {
  StepReport report;
  report.samples = samples;
  return report;
}

}  // namespace pdl
