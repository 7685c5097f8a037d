#include "engine/record/run_writer.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "engine/base/error.h"
#include "engine/record/durable_file.h"
#include "engine/record/json_lines.h"
#include "engine/record/stored_run.h"
#include "tests/engine/record/sample_records.h"
#include "tests/support/catch.h"

using namespace pdl;
using pdl::test::content_of;
using pdl::test::put_content;
using pdl::test::sample_epoch;
using pdl::test::sample_run;
using pdl::test::TemporaryDirectory;

namespace {

void write_run(const std::string& directory, std::int64_t epochs, std::int64_t planned, RunStatus status) {
  RunWriter writer(directory, Existing::refuse);
  writer.begin(sample_run(planned));
  for (std::int64_t epoch = 0; epoch < epochs; ++epoch) writer.epoch(sample_epoch(epoch));
  writer.finish(status, status == RunStatus::success ? "" : "some reason");
}

std::string message_of_opening(const std::string& directory, Existing existing, std::int64_t first_epoch = 0) {
  try {
    const RunWriter writer(directory, existing, first_epoch);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// Writes epochs for ever, going on where the directory's records end; killed from outside.
[[noreturn]] void write_until_killed(const std::string& directory) {
  std::int64_t next = 0;
  if (file_exists(directory + "/run.json")) next = static_cast<std::int64_t>(read_run(directory).epochs.size());
  RunWriter writer(directory, Existing::resume, next);
  writer.begin(sample_run(1000000));
  for (;; ++next) {
    writer.steps(next, {1.5, 2.5, 3.5}, {});
    writer.epoch(sample_epoch(next));
  }
}

}  // namespace

TEST_CASE("a finished run reads back whole, sound and unlocked") {
  const TemporaryDirectory directory;
  const std::string path = directory / "a path with spaces/and \xff no UTF-8";
  write_run(path, 3, 3, RunStatus::success);
  const StoredRun run = read_run(path);
  CHECK(run.warnings.empty());
  CHECK(check_run(run).empty());
  CHECK(run.document.status == RunStatus::success);
  CHECK(run.document.epochs_recorded == 3);
  CHECK(run.document.end_utc.size() == 20);
  CHECK(run.epochs.size() == 3);
  CHECK_FALSE(file_exists(path + "/run.lock"));
  CHECK_FALSE(file_exists(path + "/run.json.tmp"));
}

TEST_CASE("a run that breaks off stays \"running\", which is no result") {
  const TemporaryDirectory directory;
  {
    RunWriter writer(directory / "run", Existing::refuse);
    writer.begin(sample_run(3));
    writer.epoch(sample_epoch(0));
  }
  const StoredRun run = read_run(directory / "run");
  CHECK(run.document.status == RunStatus::running);
  CHECK(run.epochs.size() == 1);
}

TEST_CASE("a diverged run is recorded as such") {
  const TemporaryDirectory directory;
  {
    RunWriter writer(directory / "run", Existing::refuse);
    writer.begin(sample_run(3));
    EpochRecord record = sample_epoch(0);
    record.train_loss = std::numeric_limits<double>::quiet_NaN();
    writer.epoch(record);
    writer.finish(RunStatus::diverged, "loss is nan in epoch 0, step 7");
  }
  const StoredRun run = read_run(directory / "run");
  CHECK(name_of(run.document.status) == "diverged");
  CHECK(run.document.reason == "loss is nan in epoch 0, step 7");
  CHECK(check_run(run).empty());
}

TEST_CASE("a directory that holds something is refused, with the ways out") {
  const TemporaryDirectory directory;
  write_run(directory / "run", 1, 1, RunStatus::success);
  const std::string message = message_of_opening(directory / "run", Existing::refuse);
  CHECK_THAT(message, ContainsSubstring("status success"));
  CHECK_THAT(message, ContainsSubstring("--resume"));
  CHECK_THAT(message, ContainsSubstring("--force"));
  CHECK_FALSE(file_exists(directory / "run/run.lock"));

  std::filesystem::create_directory(directory / "other");
  put_content(directory / "other/notes.txt", "mine");
  CHECK_THAT(message_of_opening(directory / "other", Existing::refuse), ContainsSubstring("is not empty"));
  std::filesystem::create_directory(directory / "empty");
  CHECK(message_of_opening(directory / "empty", Existing::refuse).empty());
}

TEST_CASE("a second run in the same place is refused while the first lives") {
  const TemporaryDirectory directory;
  RunWriter writer(directory / "run", Existing::refuse);
  writer.begin(sample_run(1));
  for (const Existing existing : {Existing::refuse, Existing::overwrite, Existing::resume}) {
    CHECK_THAT(message_of_opening(directory / "run", existing), ContainsSubstring("still running"));
  }
  writer.epoch(sample_epoch(0));
  writer.finish(RunStatus::success, "");
  CHECK(check_run(read_run(directory / "run")).empty());
}

TEST_CASE("overwriting removes the records and nothing else") {
  const TemporaryDirectory directory;
  write_run(directory / "run", 2, 2, RunStatus::success);
  put_content(directory / "run/steps.csv", "old");
  put_content(directory / "run/trace.json", "old");
  put_content(directory / "run/notes.txt", "mine");
  {
    RunWriter writer(directory / "run", Existing::overwrite);
    CHECK_FALSE(file_exists(directory / "run/run.json"));
    CHECK_FALSE(file_exists(directory / "run/steps.csv"));
    CHECK_FALSE(file_exists(directory / "run/trace.json"));
    writer.begin(sample_run(1));
    writer.epoch(sample_epoch(0));
    writer.finish(RunStatus::success, "");
  }
  CHECK(read_run(directory / "run").epochs.size() == 1);
  CHECK(content_of(directory / "run/notes.txt") == "mine");
}

TEST_CASE("resuming keeps earlier epochs and drops later and partial lines") {
  const TemporaryDirectory directory;
  const std::string path = directory / "run";
  {
    RunWriter writer(path, Existing::refuse);
    writer.begin(sample_run(5));
    for (std::int64_t epoch = 0; epoch < 4; ++epoch) {
      writer.steps(epoch, {1.0, 2.0}, {0.5, 0.25});
      writer.epoch(sample_epoch(epoch));
    }
    writer.finish(RunStatus::interrupted, "stopped on request");
  }
  const std::string line = to_json_line(sample_epoch(4));
  put_content(path + "/epochs.jsonl", line.substr(0, line.size() / 2), true);
  put_content(path + "/steps.csv", "4,0,1.", true);

  const StoredRun broken = read_run(path);
  CHECK(broken.epochs.size() == 4);
  REQUIRE(broken.warnings.size() == 1);
  CHECK_THAT(broken.warnings[0], ContainsSubstring("not finished"));

  {
    RunWriter writer(path, Existing::resume, 2);
    CHECK(writer.resumed_elapsed_s() == 26.0);
    RunRecord again = sample_run(5);
    again.start_utc = "2026-02-03T09:00:00Z";
    writer.begin(again);
    writer.steps(2, {7.0}, {});
    writer.trace("{}\n");
    for (std::int64_t epoch = 2; epoch < 5; ++epoch) writer.epoch(sample_epoch(epoch));
    writer.finish(RunStatus::success, "");
  }
  const StoredRun run = read_run(path);
  CHECK(check_run(run).empty());
  CHECK(run.epochs.size() == 5);
  CHECK(run.document.run.start_utc == "2026-02-03T04:05:06Z");
  REQUIRE(run.document.resumes.size() == 1);
  CHECK(run.document.resumes[0].start_utc == "2026-02-03T09:00:00Z");
  CHECK(run.document.resumes[0].first_epoch == 2);
  CHECK(run.document.resumes[0].previous_status == "interrupted");
  CHECK(run.document.resumes[0].previous_config_hash == "0123456789abcdef");
  CHECK(content_of(path + "/steps.csv") ==
        "epoch,step,step_ms,comm_exposed_ms\n0,0,1.0,0.5\n0,1,2.0,0.25\n1,0,1.0,0.5\n1,1,2.0,0.25\n2,0,7.0,\n");
  CHECK(content_of(path + "/trace.json") == "{}\n");
}

TEST_CASE("resuming where records are missing is an error in the data") {
  const TemporaryDirectory directory;
  write_run(directory / "run", 2, 5, RunStatus::interrupted);
  CHECK_THAT(message_of_opening(directory / "run", Existing::resume, 3), ContainsSubstring("ends before epoch 2"));
  CHECK(read_run(directory / "run").epochs.size() == 2);
  put_content(directory / "run/epochs.jsonl", to_json_line(sample_epoch(1)) + "\n");
  CHECK_THAT(message_of_opening(directory / "run", Existing::resume, 1),
             ContainsSubstring("line 1 is epoch 1 instead of 0"));
  CHECK_THAT(message_of_opening(directory / "new", Existing::resume, 1), ContainsSubstring("ends before epoch 0"));
  CHECK(message_of_opening(directory / "new", Existing::resume, 0).empty());
}

TEST_CASE("calls out of order are our own mistakes") {
  const TemporaryDirectory directory;
  RunWriter writer(directory / "run", Existing::refuse);
  CHECK_THROWS_AS(writer.epoch(sample_epoch(0)), Error);
  writer.begin(sample_run(1));
  CHECK_THROWS_AS(writer.begin(sample_run(1)), Error);
  CHECK_THROWS_AS(writer.epoch(sample_epoch(1)), Error);
  CHECK_THROWS_AS(writer.finish(RunStatus::running, ""), Error);
  writer.finish(RunStatus::failed, "nothing to do");
  CHECK_THROWS_AS(writer.epoch(sample_epoch(0)), Error);
}

TEST_CASE("a directory that is removed while the run writes is an error with its path") {
  const TemporaryDirectory directory;
  const std::string path = directory / "run";
  RunWriter writer(path, Existing::refuse);
  writer.begin(sample_run(2));
  writer.epoch(sample_epoch(0));
  std::filesystem::remove_all(path);
  CHECK_THROWS_WITH(writer.epoch(sample_epoch(1)), ContainsSubstring(path + "/epochs.jsonl: No such file"));
  CHECK_THROWS_AS(writer.finish(RunStatus::failed, "disk"), Error);
}

TEST_CASE("a run killed at any moment leaves whole lines and at most one partial one, and can be resumed") {
  const TemporaryDirectory directory;
  const std::string path = directory / "run";
  std::mt19937 random(20260203);
  std::uniform_int_distribution<int> delay_us(0, 12000), patient_us(0, 200000);
  std::size_t epochs_before = 0;
  int with_lines = 0;
  for (int kill = 0; kill < 60; ++kill) {
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        write_until_killed(path);
      } catch (const std::exception& error) {
        ::dprintf(STDERR_FILENO, "writer: %s\n", error.what());
        ::_exit(1);
      }
    }
    ::usleep(static_cast<useconds_t>(epochs_before > 0 ? delay_us(random) : patient_us(random)));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    REQUIRE(WIFSIGNALED(status));  // else the writer gave up by itself
    if (!file_exists(path + "/run.json")) continue;
    const StoredRun run = read_run(path);
    CHECK(run.document.status == RunStatus::running);
    for (const std::string& warning : run.warnings) CHECK_THAT(warning, ContainsSubstring("not finished"));
    CHECK(run.warnings.size() <= 1);
    for (std::size_t i = 0; i < run.epochs.size(); ++i) REQUIRE(run.epochs[i].epoch == static_cast<std::int64_t>(i));
    CHECK(run.epochs.size() >= epochs_before);  // what was on the medium once stays
    epochs_before = run.epochs.size();
    with_lines += epochs_before > 0;
  }
  CHECK(with_lines > 0);
}
