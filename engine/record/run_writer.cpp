#include "engine/record/run_writer.h"

#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "engine/base/error.h"
#include "engine/record/directory_lock.h"
#include "engine/record/durable_file.h"
#include "engine/record/json_lines.h"
#include "engine/record/stored_run.h"

namespace pdl {
namespace {

constexpr const char* kRunFile = "/run.json";
constexpr const char* kEpochsFile = "/epochs.jsonl";
constexpr const char* kStepsFile = "/steps.csv";
constexpr const char* kLockFile = "/run.lock";
constexpr const char* kTraceFile = "/trace.json";
constexpr const char* kStepsHeader = "epoch,step,step_ms,comm_exposed_ms\n";

bool holds_more_than_the_lock(const std::string& directory) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    if (entry.path().filename() != "run.lock") return true;
  }
  if (error) fail_io("read", directory, error.value());
  return false;
}

void require_empty(const std::string& directory) {
  if (!holds_more_than_the_lock(directory)) return;
  std::string content = "is not empty";
  if (file_exists(directory + kRunFile)) {
    try {
      const RunDocument document = read_run(directory).document;
      content = str("holds a run of ", document.run.start_utc, " (status ", name_of(document.status), ")");
    } catch (const Error&) {
      content = "holds a run that cannot be read";
    }
  }
  throw ConfigError(
      str(directory, " ", content,
          "; use another --out, --resume to go on from its checkpoint, or --force to replace its records"));
}

void remove_records(const std::string& directory) {
  // run.json goes first: without it, nobody takes what is left for a run.
  remove_file(directory + kRunFile);
  sync_directory(directory);
  for (const char* name : {kEpochsFile, kStepsFile, kTraceFile}) remove_file(directory + name);
}

/// Bytes of epochs.jsonl that hold epochs 0 .. first_epoch - 1, and when the last of them ended.
struct Kept {
  std::int64_t bytes = 0;
  double elapsed_s = 0.0;
};

Kept lines_to_keep(const std::string& path, std::int64_t first_epoch) {
  const WholeLines found = whole_lines(file_exists(path) ? read_file(path) : "");
  Kept kept;
  for (std::int64_t epoch = 0; epoch < first_epoch; ++epoch) {
    const auto i = static_cast<std::size_t>(epoch);
    if (i >= found.lines.size()) {
      throw Error(str(path, " ends before epoch ", epoch, ", but the run is to resume at epoch ", first_epoch),
                  ExitCode::data);
    }
    EpochRecord record;
    try {
      record = epoch_from_json_line(found.lines[i]);
    } catch (const Error& error) {
      throw Error(str(path, " line ", i + 1, ": ", error.what()), ExitCode::data);
    }
    if (record.epoch != epoch) {
      throw Error(str(path, " line ", i + 1, " is epoch ", record.epoch, " instead of ", epoch), ExitCode::data);
    }
    kept = {static_cast<std::int64_t>(found.ends[i]), record.elapsed_s};
  }
  return kept;
}

/// Bytes of steps.csv in front of the first row of `first_epoch` or a later one.
std::int64_t rows_to_keep(const std::string& path, std::int64_t first_epoch) {
  const WholeLines found = whole_lines(read_file(path));
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < found.lines.size(); ++i) {
    if (i > 0 && std::strtoll(found.lines[i].c_str(), nullptr, 10) >= first_epoch) break;
    bytes = static_cast<std::int64_t>(found.ends[i]);
  }
  return bytes;
}

}  // namespace

struct RunWriter::State {
  enum class Stage { opened, running, finished };

  State(const std::string& directory, Existing existing)
      : lock(std::in_place, directory + kLockFile, existing == Existing::overwrite) {}

  std::optional<DirectoryLock> lock;
  std::optional<AppendFile> epochs, steps;
  RunDocument document;
  std::optional<ResumeRecord> resume;  // what the run before left, until `begin` knows the rest
  std::string first_start_utc;
  std::int64_t next_epoch = 0;
  double resumed_elapsed_s = 0.0;
  Stage stage = Stage::opened;

  void open_epochs(const std::string& path, std::int64_t bytes) {
    epochs.emplace(path);
    epochs->truncate(bytes);
    epochs->sync();
  }

  void resume_from(const std::string& directory, std::int64_t first_epoch) {
    if (file_exists(directory + kRunFile)) {
      document = read_run(directory).document;
      first_start_utc = document.run.start_utc;
      resume = ResumeRecord{"", first_epoch, std::string(name_of(document.status)), document.run.config_hash};
    }
    const Kept kept = lines_to_keep(directory + kEpochsFile, first_epoch);
    open_epochs(directory + kEpochsFile, kept.bytes);
    if (const std::string path = directory + kStepsFile; file_exists(path)) {
      steps.emplace(path);
      steps->truncate(rows_to_keep(path, first_epoch));
    }
    next_epoch = first_epoch;
    resumed_elapsed_s = kept.elapsed_s;
  }
};

RunWriter::RunWriter(std::string directory, Existing existing, std::int64_t first_epoch)
    : directory_(std::move(directory)) {
  PDL_CHECK(first_epoch == 0 || existing == Existing::resume, "only a resumed run starts at epoch ", first_epoch);
  create_directory(directory_);
  state_ = std::make_unique<State>(directory_, existing);
  if (existing == Existing::refuse) require_empty(directory_);
  if (existing == Existing::overwrite) remove_records(directory_);
  if (existing == Existing::resume) {
    state_->resume_from(directory_, first_epoch);
  } else {
    state_->open_epochs(directory_ + kEpochsFile, 0);
  }
}

RunWriter::~RunWriter() = default;

void RunWriter::begin(const RunRecord& run) {
  PDL_CHECK(state_->stage == State::Stage::opened, "begin comes once, first");
  RunDocument& document = state_->document;
  document = RunDocument{run, RunStatus::running, "", "", state_->next_epoch, std::move(document.resumes)};
  if (state_->resume) {
    state_->resume->start_utc = run.start_utc;
    document.resumes.push_back(*state_->resume);
    document.run.start_utc = state_->first_start_utc;
  }
  replace_file(directory_ + kRunFile, to_json(document));
  state_->stage = State::Stage::running;
}

void RunWriter::epoch(const EpochRecord& record) {
  PDL_CHECK(state_->stage == State::Stage::running, "epoch comes between begin and finish");
  PDL_CHECK(record.epoch == state_->next_epoch, "epoch ", record.epoch, " instead of ", state_->next_epoch);
  if (state_->steps) state_->steps->sync();
  state_->epochs->append(to_json_line(record) + "\n");
  state_->epochs->sync();
  ++state_->next_epoch;
}

void RunWriter::steps(std::int64_t epoch, const std::vector<double>& step_ms, const std::vector<double>& exposed_ms) {
  PDL_CHECK(state_->stage == State::Stage::running, "steps come between begin and finish");
  if (!state_->steps) state_->steps.emplace(directory_ + kStepsFile);
  std::string rows = state_->steps->size() == 0 ? kStepsHeader : "";
  for (std::size_t i = 0; i < step_ms.size(); ++i) {
    const std::string exposed = i < exposed_ms.size() ? json_number(exposed_ms[i]) : "";
    rows += str(epoch, ",", i, ",", json_number(step_ms[i]), ",", exposed, "\n");
  }
  state_->steps->append(rows);
}

void RunWriter::trace(const std::string& text) {
  PDL_CHECK(state_->stage == State::Stage::running, "a trace comes between begin and finish");
  replace_file(directory_ + kTraceFile, text);
}

void RunWriter::ranks(const std::vector<RankRecord>& ranks) {
  PDL_CHECK(state_->stage == State::Stage::running, "ranks come between begin and finish");
  state_->document.run.ranks = ranks;
}

void RunWriter::finish(RunStatus status, const std::string& reason) {
  PDL_CHECK(state_->stage == State::Stage::running, "finish comes once, after begin");
  PDL_CHECK(status != RunStatus::running, "a finished run has ended");
  if (state_->steps) state_->steps->sync();
  state_->epochs->sync();
  RunDocument& document = state_->document;
  document.status = status;
  document.reason = reason;
  document.end_utc = utc_now();
  document.epochs_recorded = state_->next_epoch;
  replace_file(directory_ + kRunFile, to_json(document));
  state_->stage = State::Stage::finished;
  state_->lock.reset();
}

double RunWriter::resumed_elapsed_s() const { return state_->resumed_elapsed_s; }

}  // namespace pdl
