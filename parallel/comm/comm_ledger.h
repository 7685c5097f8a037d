#pragma once
// What communication costs, by kind of operation: calls, bytes, how long operations ran and how long somebody waited.
//
// On a CPU the host's clock tells it all. A GPU lags behind the host, which queues a wait and goes on; what the wait
// costs is how long the compute stream stands still, from a mark in front of it to a mark behind it. Such spans are
// read long after they have passed, so that neither host nor device waits for the measurement.

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/device/device.h"
#include "engine/record/observer.h"
#include "engine/record/trace.h"

namespace pdl {

/// What one kind of operation cost since the last `take`.
struct CommCount {
  std::int64_t calls = 0;
  /// Bytes that this rank sends, by the ring formulas: all_reduce 2 (n-1)/n S, all_gather and reduce_scatter (n-1)/n of
  /// the whole, broadcast and reduce (n-1)/n S, all_to_all what leaves for others, send S, recv 0. Exact rational
  /// arithmetic, rounded once.
  std::int64_t bytes = 0;
  /// How long operations ran, those that overlap counted each. In a stream of the communicator: from when the operation
  /// could start to its end, late peers included. Through the host: from issue to the completion that wait or progress
  /// saw. Of messages in streams only the exposed part is known.
  double busy_s = 0.0;
  /// How long the rank stood still: its compute stream on a GPU, the rank itself on a CPU.
  double exposed_s = 0.0;
};

/// Keyed by "axis.operation", for instance "dp.all_reduce".
using CommCounts = std::map<std::string, CommCount>;

/// Shared by all communicators split from one; outlives them. Listens to the ends of steps.
class CommLedger final : public Observer {
 public:
  /// A device that lags behind the host: its compute stream tells from now on what waits cost. Of a CPU nothing
  /// changes.
  void measure_on(Device& device);
  /// Spans go there too while it records; null: nowhere.
  void trace_to(Trace* trace) { trace_ = trace; }
  /// Hears of the waits that count, as they are queued; null: nobody.
  void tell_waits_to(Observer* listener) { listener_ = listener; }
  /// See Stopwatch::anchor; before a trace begins.
  void anchor();

  /// The counts so far, and starts anew. Waits for spans that have not passed yet.
  CommCounts take();
  /// Exposed seconds of each step that has ended since the last call, waits after the latest end left out. Waits as
  /// `take`.
  std::vector<double> take_steps();
  CommCount& at(const std::string& key) { return counts_[key]; }
  double exposed_s() const;
  void step_done(std::int64_t step) override;
  void step_end(const StepReport& report) override;

  // --- for the counting communicator
  /// A wait that has begun; its mark, or its time on the host's clock.
  struct Wait {
    std::int64_t mark = 0;
    double host_s = 0.0;
    bool counts = true, traced = false;
  };
  /// True when spans are measured in streams.
  bool in_streams() const { return compute_ != nullptr; }
  /// What is queued on `stream` next is a wait. Where spans are measured in streams, only the compute stream's count.
  Wait begin_wait(const Stream& stream);
  /// `is_all_that_is_known`: the operation was busy at least as long.
  void end_wait(const std::string& key, const Wait& wait, bool is_all_that_is_known = false);
  /// A stopwatch of a communicator's own stream.
  std::shared_ptr<Stopwatch> watch(Stream& stream);
  /// An operation of `bytes` ran between two marks of its stream.
  void ran_in_stream(const std::string& key, std::shared_ptr<Stopwatch> watch, std::int64_t from, std::int64_t to,
                     std::int64_t bytes);
  /// An operation ran on the host's clock. `traced`: it began while the trace recorded.
  void ran(const std::string& key, double begin_s, double end_s, std::int64_t bytes, bool traced);
  bool tracing() const { return trace_ != nullptr && trace_->recording(); }

 private:
  /// Between two marks, to be read later.
  struct Span {
    std::string key;
    std::shared_ptr<Stopwatch> watch;
    std::int64_t from, to, bytes;
    std::int64_t step;  ///< of a wait: which of step_exposed_s_; -1: an operation
    bool also_busy, traced;
  };
  void keep(Span span);
  void read(const Span& span);
  void read_all();
  void add_exposed(const std::string& key, std::int64_t step, double seconds);

  Device* device_ = nullptr;
  std::shared_ptr<Stopwatch> compute_;  ///< null: the host's clock tells
  std::vector<std::weak_ptr<Stopwatch>> watches_;
  Trace* trace_ = nullptr;
  Observer* listener_ = nullptr;
  CommCounts counts_;
  std::deque<Span> unread_;
  std::vector<double> step_exposed_s_ = {0.0};  ///< the last entry is of the step under way
  int unreported_steps_ = 0;                    ///< done and not ended
};

}  // namespace pdl
