#pragma once
// What the ranks did during a few steps, as a timeline for chrome://tracing and Perfetto.
//
// Each rank keeps a Trace while it is `recording`; who measures something anyway (the phase clock, the communicators'
// ledger, the device's activity log) also puts it there. The file is Chrome's trace format: one process for each rank,
// one thread for each row, times in microseconds.

#include <cstdint>
#include <string>
#include <vector>

#include "engine/device/memory_tracker.h"
#include "engine/device/profiling.h"

namespace pdl {

/// The timeline of one rank. All times are seconds of the host's steady clock.
class Trace {
 public:
  /// Rows of spans, each inside or beside the others of its row. Streams of a device have rows of their own.
  enum class Row : int {
    steps,     ///< steps, and in them the phases
    schedule,  ///< tasks of the engine's schedule
    waits      ///< what the device's compute stream (on a CPU: the rank) waited for
  };

  /// Whether what happens now belongs to the trace.
  bool recording() const { return recording_; }
  void record(bool on) { recording_ = on; }

  void span(Row row, std::string name, double begin_s, double end_s);
  /// An operation that may overlap others of its kind: gets a place where there is one.
  void operation(std::string name, double begin_s, double end_s, std::int64_t bytes);
  void activity(const DeviceActivity& activity);
  void memory(double at_s, const MemoryByKind& held);

  /// JSON objects with commas between them, for trace_file. `zero_s` is the time 0 of the file on this host's clock;
  /// `title` names the rank.
  std::string events(int rank, const std::string& title, double zero_s) const;

 private:
  struct Span {
    int row;
    std::string name;
    double begin_s, end_s;
    std::int64_t bytes;
  };
  struct Held {
    double at_s;
    MemoryByKind memory;
  };
  std::vector<Span> spans_, operations_;
  std::vector<Held> held_;
  bool recording_ = false;
};

/// A whole file from the events of all ranks.
std::string trace_file(const std::vector<std::string>& events_of_ranks);

}  // namespace pdl
