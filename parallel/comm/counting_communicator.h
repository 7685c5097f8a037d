#pragma once
// Counts what passes through a communicator: calls, bytes, time. No engine counts its own traffic or reads a clock.

#include <map>
#include <memory>
#include <string>

#include "parallel/comm/communicator.h"

namespace pdl {

/// What one kind of operation cost since the last reset.
struct CommCount {
  std::int64_t calls = 0;
  /// Bytes that this rank sends, by the ring formulas: all_reduce 2 (n-1)/n S, all_gather and reduce_scatter (n-1)/n of
  /// the whole, broadcast and reduce (n-1)/n S, all_to_all what leaves for others, send S, recv 0. Exact rational
  /// arithmetic, rounded once.
  std::int64_t bytes = 0;
  double busy_s = 0.0;     ///< from issue to completion as seen by wait or progress, overlapping calls counted each
  double exposed_s = 0.0;  ///< time that wait kept the caller
};

/// Keyed by "axis.operation", for instance "dp.all_reduce".
using CommCounts = std::map<std::string, CommCount>;

/// Shared by all communicators split from one; outlives them.
class CommLedger {
 public:
  CommCounts take();  ///< the counts so far, and starts anew
  CommCount& at(const std::string& key) { return counts_[key]; }
  double exposed_s() const;

 private:
  CommCounts counts_;
};

std::unique_ptr<Communicator> make_counting_communicator(std::unique_ptr<Communicator> inner, CommLedger& ledger);

/// Bytes that one rank sends in a collective over `size` ranks whose whole tensor (all_gather: the output;
/// reduce_scatter: the input) has `bytes`: the formula behind CommCount::bytes, for plans.
std::int64_t ring_bytes(const std::string& operation, int size, std::int64_t bytes);

}  // namespace pdl
