#include "parallel/comm/mpi_wait.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

namespace pdl {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// At first a wait just looks, for a moment that costs less than a nap: longer when every rank of the host can have a
// core of its own. Then it naps, each time for an eighth of the wait so far, so that the wait grows by no more than
// that. It never calls sched_yield: recent kernels let a task that yields run again only after all others have had
// their turn, which makes a small all-reduce take milliseconds as soon as some rank still computes; a nap ends on time.
constexpr microseconds kLookWithOwnCore{200};
constexpr microseconds kLookWithSharedCore{20};
constexpr double kNapShare = 1.0 / 8.0;
constexpr microseconds kShortestNap{50};
constexpr double kBetweenSignsS = 0.2;
constexpr std::chrono::seconds kPeersExplain{3};

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

/// Lets the others see what this rank waits for, once it has waited for a while.
class WaitSign {
 public:
  explicit WaitSign(HostBoard& board) : board_(board) {}
  ~WaitSign() {
    if (shown_) board_.mine().waiting.write("");
  }
  WaitSign(const WaitSign&) = delete;
  WaitSign& operator=(const WaitSign&) = delete;
  void show(const MpiWaitable& what, double waited_s) {
    if (waited_s < next_s_) return;
    board_.mine().waiting.write(what.describe());
    next_s_ = waited_s + kBetweenSignsS;
    shown_ = true;
  }

 private:
  HostBoard& board_;
  double next_s_ = kBetweenSignsS;
  bool shown_ = false;
};

}  // namespace

MpiWaiter::MpiWaiter(HostBoard& board) : board_(board) {
  // Not the cores that this process may use: a rank bound to one core has that one for itself.
  look_s_ = seconds(board.ranks() <= ::sysconf(_SC_NPROCESSORS_ONLN) ? kLookWithOwnCore : kLookWithSharedCore);
  ::prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);  // by default the kernel may stretch a nap of 50 us to 100
}

void MpiWaiter::advance() {
  for (MpiMachine* machine : machines_) machine->advance();
}

void MpiWaiter::wait(MpiWaitable& what, double timeout_s, const WaitPace& pace) {
  const Clock::time_point start = Clock::now();
  WaitSign sign(board_);
  while (true) {
    for (int repeat = 0; repeat < pace.tests_per_nap; ++repeat) {
      advance();
      if (what.test()) return;
    }
    const double waited_s = seconds(Clock::now() - start);
    if (waited_s < look_s_) continue;
    board_.heartbeat();
    what.check_peers();
    check_failed_peer();
    if (timeout_s > 0.0 && waited_s > timeout_s) give_up(what.describe(), what.describe_late(waited_s), waited_s);
    sign.show(what, waited_s);
    const microseconds nap(static_cast<std::int64_t>(1e6 * kNapShare * waited_s));
    std::this_thread::sleep_for(std::clamp(nap, kShortestNap, pace.longest_nap));
  }
}

void MpiWaiter::check_failed_peer() const {
  const FirstFailure failure = board_.first_failure();
  if (failure.rank < 0 || failure.rank == board_.world_rank()) return;
  throw Error(str("stopped by rank ", failure.rank, ": ", failure.message), failure.code);
}

void MpiWaiter::await_explanation() const {
  if (board_.ranks() == 1) return;
  const Clock::time_point start = Clock::now();
  do {
    check_failed_peer();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  } while (Clock::now() - start < kPeersExplain);
}

void MpiWaiter::give_up(const std::string& what, const std::string& late, double waited_s) const {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", waited_s);
  throw Error(str("rank ", board_.world_rank(), " waited ", text, " s in vain for ", what, ": ", late),
              ExitCode::communication);
}

}  // namespace pdl
