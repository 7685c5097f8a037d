#pragma once
// How work on a stream is timed: by marks in its order of work, which are read later.

#include <cstdint>

namespace pdl {

/// Measures when a stream reaches points in its order of work, without stopping it or the host.
class Stopwatch {
 public:
  /// How many marks back `seconds` still knows about.
  static constexpr std::int64_t kRemembered = 4096;

  virtual ~Stopwatch() = default;
  /// The moment when all that is queued so far is done. Later marks have no smaller numbers.
  virtual std::int64_t mark() = 0;
  /// Time between two of the latest `kRemembered` marks, `from` not after `to`. The host waits until both have passed.
  virtual double seconds(std::int64_t from, std::int64_t to) = 0;

  /// Ties the marks to the host's steady clock, anew with each call. Waits for the stream: not for the middle of a
  /// step.
  virtual void anchor() = 0;
  /// When one of the latest `kRemembered` marks passed, in seconds of the host's steady clock: within some ten
  /// microseconds soon after `anchor`, later with the drift of the two clocks. Waits as `seconds` does.
  virtual double host_s(std::int64_t mark) = 0;
};

}  // namespace pdl
