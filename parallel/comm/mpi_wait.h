#pragma once
// The one place that waits for MPI.
//
// A blocking MPI call spins. With more ranks than cores that makes a small all-reduce a hundred times slower, and a
// rank that waits for a lost peer waits for ever. So all of pdlbench's communication is non-blocking and waits here:
// test for a moment, nap, look at the peers' boards, look at the clock.

#include <chrono>
#include <string>
#include <vector>

#include "parallel/comm/rank_board.h"

namespace pdl {

/// Something that is over when a test says so.
class MpiWaitable {
 public:
  virtual ~MpiWaitable() = default;
  /// Never waits. May be called again after it said true.
  virtual bool test() = 0;
  /// Throws when the peers' boards show that this will never be over.
  virtual void check_peers() = 0;
  /// What it is, for a report: "all_reduce of 64 fp32 (operation 17 of axis dp)".
  virtual std::string describe() const = 0;
  /// Who keeps it waiting, after `waited_s` seconds.
  virtual std::string describe_late(double waited_s) const = 0;
};

/// Communication in several phases. Whoever waits for anything moves all machines of the process: the peer that is
/// waited for may itself wait for the next phase of one of ours.
class MpiMachine {
 public:
  virtual ~MpiMachine() = default;
  virtual void advance() = 0;  ///< never waits
};

/// How often a wait tests once it has looked for a moment.
struct WaitPace {
  // MPI may take only one step of a collective or of a long message at each test. Napping between steps would make a
  // small all-reduce among busy ranks ten times slower.
  int tests_per_nap = 8;
  std::chrono::microseconds longest_nap{1000};
};

class MpiWaiter {
 public:
  explicit MpiWaiter(HostBoard& board);

  void add(MpiMachine& machine) { machines_.push_back(&machine); }
  void remove(MpiMachine& machine) { std::erase(machines_, &machine); }
  void advance();

  /// Returns when the test says so. Throws Error(communication) after `timeout_s` seconds (0: never) and what
  /// check_peers throws; Error("stopped by rank r: ...") when another rank of this host has failed.
  void wait(MpiWaitable& what, double timeout_s, const WaitPace& pace = {});

  /// Throws the Error(communication) of a wait in vain for `what`; `late` says who did not come.
  [[noreturn]] void give_up(const std::string& what, const std::string& late, double waited_s) const;
  /// To be called when something broke that a failing peer may have caused: gives it a moment to say so, and throws
  /// Error("stopped by rank r: ...") when it does.
  void await_explanation() const;

 private:
  void check_failed_peer() const;

  HostBoard& board_;
  double look_s_ = 0.0;  ///< how long a wait looks before it naps
  std::vector<MpiMachine*> machines_;
};

}  // namespace pdl
