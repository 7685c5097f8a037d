#pragma once
// Records as read back from a run's directory, whether the run finished or broke off.

#include <string>
#include <vector>

#include "engine/record/json_lines.h"
#include "engine/record/records.h"

namespace pdl {

/// Whole lines of a file that only grows by lines.
struct WholeLines {
  std::vector<std::string> lines;  ///< without their newlines
  std::vector<std::size_t> ends;   ///< offset in bytes behind each line's newline
  std::size_t partial_bytes = 0;   ///< what follows the last newline
};
WholeLines whole_lines(const std::string& text);

struct StoredRun {
  std::string directory;
  RunDocument document;
  std::vector<EpochRecord> epochs;    ///< those that could be read, up to the first that could not
  std::vector<std::string> warnings;  ///< what was dropped and why
};

/// Throws Error(data) when there is no run.json or it cannot be read.
StoredRun read_run(const std::string& directory);

/// What keeps the records from being a result, one sentence each: order and number of epochs, times that run backwards,
/// a missing configuration hash, dropped lines. Empty for a sound run; one that did not succeed can be sound too.
std::vector<std::string> check_run(const StoredRun& run);

/// DIRECTORY itself when it holds run.json, else all directories below it that do, sorted. Throws Error(data) when
/// there is none.
std::vector<std::string> find_runs(const std::string& directory);

}  // namespace pdl
