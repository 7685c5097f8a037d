#include "engine/record/durable_file.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "engine/base/error.h"
#include "tests/engine/record/sample_records.h"
#include "tests/support/catch.h"

using namespace pdl;
using pdl::test::content_of;
using pdl::test::put_content;
using pdl::test::TemporaryDirectory;

namespace {

const std::string kLine = std::string(1499, 'x') + "\n";  // no divisor of a page: the last one fits in part

/// Appends lines until the file takes no more; returns the message of the failure.
std::string fill(AppendFile& file) {
  for (int i = 0; i < 10000; ++i) {
    try {
      file.append(kLine);
      file.sync();
    } catch (const Error& error) {
      return error.what();
    }
  }
  return "never full";
}

/// Runs `work` in a child process, which returns what the child returns.
template <typename Work>
int exit_code_of(Work work) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(work());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

TEST_CASE("an append file keeps what is there and grows by whole pieces") {
  const TemporaryDirectory directory;
  put_content(directory / "log", "first\n");
  {
    AppendFile file(directory / "log");
    file.append("second\n");
    CHECK(file.size() == 13);
    file.truncate(6);
    file.append("third\n");
    file.sync();
  }
  CHECK(content_of(directory / "log") == "first\nthird\n");
}

TEST_CASE("a full device is an error that names path and cause") {
  AppendFile file("/dev/full");
  CHECK_THROWS_WITH(file.append("line\n"), ContainsSubstring("/dev/full: No space left on device"));
}

TEST_CASE("a place that cannot hold files is an error that names path and cause") {
  const TemporaryDirectory directory;
  CHECK_THROWS_WITH(AppendFile(directory / "absent/log"), ContainsSubstring("absent/log: No such file or directory"));
  put_content(directory / "plain", "");
  CHECK_THROWS_WITH(create_directory(directory / "plain/run"), ContainsSubstring("Not a directory"));
  CHECK_THROWS_WITH(create_directory(directory / "plain"), ContainsSubstring("Not a directory"));
  CHECK_THROWS_WITH(replace_file(directory / "absent/run.json", "{}"), ContainsSubstring("No such file or directory"));
  CHECK_THROWS_AS(read_file(directory / "absent"), Error);
}

TEST_CASE("writing to a file that was removed or replaced is an error, since its content would be lost") {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "run");
  AppendFile inside(directory / "run/log");
  inside.append("line\n");
  std::filesystem::remove_all(directory / "run");
  CHECK_THROWS_WITH(inside.append("line\n"), ContainsSubstring("No such file or directory"));
  CHECK_THROWS_AS(inside.sync(), Error);
  std::filesystem::create_directory(directory / "run");
  put_content(directory / "run/log", "of somebody else\n");
  CHECK_THROWS_WITH(inside.append("line\n"), ContainsSubstring("another file"));
  CHECK(content_of(directory / "run/log") == "of somebody else\n");
}

TEST_CASE("the size limit of the shell is an error, not a death, and leaves whole lines") {
  const TemporaryDirectory directory;
  const std::string path = directory / "log";
  const int code = exit_code_of([&path] {
    const rlimit limit{10000, 10000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    AppendFile file(path);
    return fill(file).find("File too large") == std::string::npos ? 1 : 0;
  });
  CHECK(code == 0);
  const std::string content = content_of(path);
  CHECK(content.size() == 6 * kLine.size());
}

TEST_CASE("a file system that fills up keeps the lines before and the old run.json") {
  const TemporaryDirectory directory;
  if (::mount("tmpfs", directory.path().c_str(), "tmpfs", 0, "size=64k") != 0) {
    WARN("no right to mount a small file system: not tested");
    return;
  }
  const std::string run_file = directory / "run.json";
  std::string message;
  std::size_t lines_bytes = 0;
  {
    replace_file(run_file, "{\"old\": 1}\n");
    AppendFile file(directory / "log");
    message = fill(file);
    lines_bytes = content_of(directory / "log").size();
  }
  CHECK_THROWS_WITH(replace_file(run_file, std::string(8192, 'y')), ContainsSubstring("No space left on device"));
  const std::string old = content_of(run_file);
  const bool temporary_left = file_exists(run_file + ".tmp");
  ::umount(directory.path().c_str());
  CHECK_THAT(message, ContainsSubstring("log: No space left on device"));
  CHECK(lines_bytes > 0);
  CHECK(lines_bytes % kLine.size() == 0);
  CHECK(old == "{\"old\": 1}\n");
  CHECK_FALSE(temporary_left);
}

TEST_CASE("a file system that is read-only is an error that names the cause") {
  const TemporaryDirectory directory;
  if (::mount("tmpfs", directory.path().c_str(), "tmpfs", MS_RDONLY, "size=64k") != 0) {
    WARN("no right to mount a read-only file system: not tested");
    return;
  }
  std::string message;
  try {
    AppendFile file(directory / "log");
  } catch (const Error& error) {
    message = error.what();
  }
  ::umount(directory.path().c_str());
  CHECK_THAT(message, ContainsSubstring("Read-only file system"));
}

TEST_CASE("replacing a file leaves the new content and nothing else") {
  const TemporaryDirectory directory;
  put_content(directory / "run.json.tmp", "left by a crash, and longer than what comes now");
  replace_file(directory / "run.json", "one");
  replace_file(directory / "run.json", "two");
  CHECK(content_of(directory / "run.json") == "two");
  CHECK_FALSE(file_exists(directory / "run.json.tmp"));
}
