#pragma once
// Proves before launch that a schedule can be run: every message that is sent is received in the order of sending, no
// rank waits for ever, and bounds on micro-batches in flight and on weight versions hold.

#include <string>

#include "parallel/pipeline/schedule.h"

namespace pdl {

/// The first thing that is wrong, as a sentence that names ranks and micro-batches; "" when nothing is.
///
/// The schedule is played through. A receive waits for its message; of each kind (activations, gradients) a rank has at
/// most Schedule::send_buffers messages under way; the replicas of a stage wait for each other to reduce. Each virtual
/// stage runs every micro-batch forward once and then backward once (evaluation: never), with the same weights, which
/// exist by then and are still held.
std::string schedule_fault(const Schedule& schedule);

/// Throws Error(internal) with the fault.
void check_schedule(const Schedule& schedule);

}  // namespace pdl
