#include "cli/progress.h"

#include <cstdio>

#include "engine/base/log.h"
#include "engine/record/recorder.h"

namespace pdl {
namespace {

constexpr double kTerminalInterval_s = 0.1;
constexpr double kLogInterval_s = 5.0;

}  // namespace

Progress::Progress(bool speaks, std::int64_t epochs)
    : speaks_(speaks), redraws_(stderr_is_terminal()), epochs_(epochs), last_s_(PhaseClock::steady_seconds()) {}

void Progress::step_end(const StepReport& report) {
  if (report.skipped) ++skipped_;
  if (!speaks_) return;
  const double now_s = PhaseClock::steady_seconds();
  if (now_s - last_s_ < (redraws_ ? kTerminalInterval_s : kLogInterval_s)) return;
  last_s_ = now_s;
  std::fprintf(stderr, "%sepoch %lld/%lld  step %lld/%lld  loss %.4f  lr %.3g", redraws_ ? "\r\033[K" : "",
               static_cast<long long>(epoch_ + 1), static_cast<long long>(epochs_),
               static_cast<long long>(report.step + 1), static_cast<long long>(report.steps), report.loss, report.lr);
  if (skipped_ > 0) {
    std::fprintf(stderr, "  skipped %lld  loss scale %.4g", static_cast<long long>(skipped_), report.loss_scale);
  }
  if (!redraws_) std::fputc('\n', stderr);
  drawn_ = redraws_;
}

void Progress::epoch_end() {
  if (drawn_) std::fprintf(stderr, "\r\033[K");
  drawn_ = false;
}

}  // namespace pdl
