#pragma once
// How long a schedule takes when every pass takes as long as it is told: start and end of each action, bubbles, and the
// picture of it that `plan` prints.

#include <string>
#include <vector>

#include "parallel/pipeline/schedule.h"

namespace pdl {

/// What a virtual stage costs for one micro-batch, in any unit of time.
struct StageCost {
  double forward = 1.0, backward = 2.0, recompute = 1.0;
  double transfer = 0.0;  ///< of its activation to the next stage, and of that one's gradient back
  double loss = 0.0;      ///< where it is computed apart
  double update = 0.0;    ///< of the rank's weights: counts for the rank's first virtual stage
};

struct TimeSpan {
  double begin = 0.0, end = 0.0;
};

/// A schedule in time. Spans go with the actions; those of a message are empty, a receive ends when its message is
/// there.
struct Timeline {
  std::vector<std::vector<TimeSpan>> ranks;
  double makespan = 0.0;
  double computing = 0.0;  ///< passes and updates, mean over ranks
  double useful = 0.0;     ///< forward, loss and backward only, mean over ranks
  /// Part of the ranks' time in which they wait. Recomputation counts as work, so a schedule that recomputes while it
  /// waits looks better by this number than by the next.
  double idle_fraction() const { return 1.0 - computing / makespan; }
  /// Part of the ranks' time in which they do what a single rank would have to do too.
  double useful_fraction() const { return useful / makespan; }
};

/// `costs` has an entry for each virtual stage. The schedule passes its check. Reductions take no time, sends never
/// wait.
Timeline simulate(const Schedule& schedule, const std::vector<StageCost>& costs);

/// One line for each rank: what it does when, on a scale on which the shortest pass has room for its name where `width`
/// columns allow it. "F0", "B0", "R0" begin a pass ("F" where there is no room), "-" goes on with it, "." is waiting.
std::vector<std::string> draw(const Schedule& schedule, const Timeline& timeline, int width = 110);

}  // namespace pdl
