#pragma once
// What an engine says while it works: the one upward call of a training loop. Engines say what they are doing; who
// listens decides whether to time it. No engine reads a clock.

#include <cstdint>

namespace pdl {

/// What a rank is doing from now on.
enum class Phase : int { data, forward, backward, communication, optimizer, other };
inline constexpr int kPhases = 6;

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
  virtual void step_end(const StepReport&) {}
};

}  // namespace pdl
