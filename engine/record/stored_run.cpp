#include "engine/record/stored_run.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "engine/base/error.h"
#include "engine/record/durable_file.h"

namespace pdl {
namespace {

RunDocument read_document(const std::string& path) {
  try {
    return run_from_json(read_file(path));
  } catch (const Error& error) {
    const std::string what = error.what();
    throw Error(what.find(path) == std::string::npos ? str(path, ": ", what) : what, ExitCode::data);
  }
}

void read_epochs(const std::string& path, StoredRun& run) {
  if (!file_exists(path)) return;
  const WholeLines found = whole_lines(read_file(path));
  for (std::size_t i = 0; i < found.lines.size(); ++i) {
    try {
      run.epochs.push_back(epoch_from_json_line(found.lines[i]));
    } catch (const Error& error) {
      run.warnings.push_back(str(path, " line ", i + 1, ": ", error.what(), "; it and what follows is dropped"));
      return;
    }
  }
  if (found.partial_bytes > 0) {
    run.warnings.push_back(
        str(path, ": a last line of ", found.partial_bytes, " bytes is not finished; it is dropped"));
  }
}

void check_order(const std::vector<EpochRecord>& epochs, std::vector<std::string>& problems) {
  double elapsed_s = 0.0;
  for (std::size_t i = 0; i < epochs.size(); ++i) {
    if (epochs[i].epoch != static_cast<std::int64_t>(i)) {
      problems.push_back(str("line ", i + 1, " of epochs.jsonl is epoch ", epochs[i].epoch, " instead of ", i));
    }
    if (!(epochs[i].elapsed_s >= elapsed_s)) {
      problems.push_back(str("elapsed_s runs backwards at epoch ", epochs[i].epoch));
    }
    elapsed_s = epochs[i].elapsed_s;
  }
}

}  // namespace

WholeLines whole_lines(const std::string& text) {
  WholeLines found;
  std::size_t begin = 0;
  for (std::size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', begin)) {
    found.lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
    found.ends.push_back(begin);
  }
  found.partial_bytes = text.size() - begin;
  return found;
}

StoredRun read_run(const std::string& directory) {
  StoredRun run;
  run.directory = directory;
  run.document = read_document(directory + "/run.json");
  read_epochs(directory + "/epochs.jsonl", run);
  return run;
}

std::vector<std::string> check_run(const StoredRun& run) {
  std::vector<std::string> problems = run.warnings;
  const RunDocument& document = run.document;
  if (document.run.config_hash.empty()) problems.push_back("run.json has no config_hash");
  if (document.run.ranks.empty()) problems.push_back("run.json lists no ranks");
  check_order(run.epochs, problems);
  const auto count = static_cast<std::int64_t>(run.epochs.size());
  if (document.status != RunStatus::running && document.epochs_recorded != count) {
    problems.push_back(str("run.json counts ", document.epochs_recorded, " epochs, epochs.jsonl has ", count));
  }
  if (document.status == RunStatus::success) {
    if (count != document.run.epochs_planned) {
      problems.push_back(str("a success with ", count, " of ", document.run.epochs_planned, " epochs"));
    }
    if (document.end_utc.empty()) problems.push_back("a success without an end");
  }
  return problems;
}

std::vector<std::string> find_runs(const std::string& directory) {
  namespace fs = std::filesystem;
  if (file_exists(directory + "/run.json")) return {directory};
  std::vector<std::string> found;
  std::error_code error;
  for (fs::recursive_directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename() == "run.json") found.push_back(entry->path().parent_path().string());
  }
  if (error) throw Error(str("cannot read ", directory, ": ", error.message()), ExitCode::data);
  if (found.empty()) throw Error(str(directory, " holds no run.json, nor does any directory below it"), ExitCode::data);
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace pdl
