#pragma once
// Writes a run's directory so that a crash never looks like a result:
//   run.json      whole file by temporary name, fsync, rename; status goes running -> success | failed | diverged |
//                 interrupted
//   epochs.jsonl  one whole line per write to an append-only descriptor, fsynced; a partial last line is dropped by
//                 readers (stored_run.h)
//   steps.csv     raw step times on request
//   trace.json    what the ranks did during a few steps, on request (trace.h)
//   run.lock      host, pid and start time while the run lasts; a second run in the same place is refused
// Used on rank 0 only. Every failure to write throws Error(internal) with the path and the system's words; what was
// written before stays.

#include <memory>
#include <string>
#include <vector>

#include "engine/record/records.h"

namespace pdl {

/// What to do with a directory that already holds something.
enum class Existing { refuse, overwrite, resume };

class RunWriter {
 public:
  /// Creates the directory and takes its lock. Throws ConfigError(usage) when it is not empty (refuse) or locked.
  /// overwrite removes the records, and nothing else. resume keeps the lines of epochs before `first_epoch` and drops
  /// the others; it throws Error(data) when one of those to keep is missing. A run that resumes from a checkpoint never
  /// misses any if the checkpoint is written after the epoch's line.
  RunWriter(std::string directory, Existing existing, std::int64_t first_epoch = 0);
  /// Gives the lock back. Without `finish` the status stays "running", which no reader takes for a result.
  ~RunWriter();
  RunWriter(const RunWriter&) = delete;
  RunWriter& operator=(const RunWriter&) = delete;

  /// Writes run.json with status running. A resumed run keeps its first start time and notes the resumption.
  void begin(const RunRecord& run);
  /// On the medium when it returns. Epochs come in order.
  void epoch(const EpochRecord& record);
  /// Appends raw step times and exposed communication (ms; empty when not measured) to steps.csv, on the medium with
  /// the next `epoch` or `finish`.
  void steps(std::int64_t epoch, const std::vector<double>& step_ms, const std::vector<double>& exposed_ms);
  /// Replaces trace.json.
  void trace(const std::string& text);
  /// The ranks with what is known about them at the end; on the medium with `finish`.
  void ranks(const std::vector<RankRecord>& ranks);
  /// Rewrites run.json with the final status; `reason` is empty for success. Gives the lock back. Call once, last.
  void finish(RunStatus status, const std::string& reason);

  const std::string& directory() const { return directory_; }
  /// Elapsed time of the last epoch that was kept, for a resumed run to count on from; 0 for a fresh one.
  double resumed_elapsed_s() const;

 private:
  struct State;
  std::string directory_;
  std::unique_ptr<State> state_;
};

}  // namespace pdl
