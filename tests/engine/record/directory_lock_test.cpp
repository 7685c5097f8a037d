#include "engine/record/directory_lock.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <thread>
#include <vector>

#include "engine/base/error.h"
#include "engine/record/durable_file.h"
#include "tests/engine/record/sample_records.h"
#include "tests/support/catch.h"

using namespace pdl;
using pdl::test::content_of;
using pdl::test::put_content;
using pdl::test::TemporaryDirectory;

namespace {

std::string replaced(std::string text, const std::string& key, const std::string& value) {
  const std::size_t begin = text.find(key + "=") + key.size() + 1;
  return text.replace(begin, text.find('\n', begin) - begin, value);
}

/// What a lock of this very process says.
std::string own_facts() {
  const TemporaryDirectory directory;
  const DirectoryLock lock(directory / "run.lock", false);
  return content_of(directory / "run.lock");
}

}  // namespace

TEST_CASE("a lock names its holder and goes away with it") {
  const TemporaryDirectory directory;
  const std::string path = directory / "run.lock";
  {
    const DirectoryLock lock(path, false);
    CHECK_THAT(content_of(path), ContainsSubstring("\npid=" + std::to_string(::getpid()) + "\n"));
    CHECK_THROWS_WITH(DirectoryLock(path, false), ContainsSubstring("process " + std::to_string(::getpid())));
    CHECK_THROWS_WITH(DirectoryLock(path, true), ContainsSubstring("still running"));
    CHECK(file_exists(path));
  }
  CHECK_FALSE(file_exists(path));
}

TEST_CASE("the refusal of a second run is a user mistake") {
  const TemporaryDirectory directory;
  const DirectoryLock lock(directory / "run.lock", false);
  try {
    const DirectoryLock second(directory / "run.lock", false);
    FAIL("two holders");
  } catch (const ConfigError& error) {
    CHECK(error.code() == ExitCode::usage);
  }
}

TEST_CASE("the lock of a killed process is taken over") {
  const TemporaryDirectory directory;
  const std::string path = directory / "run.lock";
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const DirectoryLock lock(path, false);
    [[maybe_unused]] const ssize_t told = ::write(ready[1], "x", 1);
    ::pause();
    ::_exit(0);
  }
  char byte;
  REQUIRE(::read(ready[0], &byte, 1) == 1);
  CHECK_THROWS_WITH(DirectoryLock(path, false), ContainsSubstring("process " + std::to_string(child)));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  REQUIRE(file_exists(path));
  const DirectoryLock lock(path, false);
  CHECK_THAT(content_of(path), ContainsSubstring("pid=" + std::to_string(::getpid())));
}

TEST_CASE("without file locks, process, its start and the boot decide") {
  const TemporaryDirectory directory;
  const std::string path = directory / "run.lock";
  const std::string facts = own_facts();
  const auto taken_over = [&path](const std::string& content) {
    put_content(path, content);
    try {
      const DirectoryLock lock(path, false);
      return true;
    } catch (const ConfigError&) {
      return false;
    }
  };
  CHECK_FALSE(taken_over(facts));                            // this process lives
  CHECK(taken_over(replaced(facts, "process_start", "1")));  // its number was another process's
  CHECK(taken_over(replaced(facts, "boot", "before the last boot")));
  CHECK(taken_over(replaced(facts, "pid", "999999999")));
}

TEST_CASE("a lock that nobody here can judge is refused, and forced on demand") {
  const TemporaryDirectory directory;
  const std::string path = directory / "run.lock";
  const std::string facts = replaced(own_facts(), "host", "another-node");
  put_content(path, facts);
  CHECK_THROWS_WITH(DirectoryLock(path, false), ContainsSubstring("on another-node since 2"));
  CHECK_THROWS_WITH(DirectoryLock(path, false), ContainsSubstring("--force"));
  CHECK(content_of(path) == facts);
  { const DirectoryLock lock(path, true); }
  put_content(path, "no facts=\n");
  CHECK_THROWS_WITH(DirectoryLock(path, false), ContainsSubstring("an unnamed process"));
  { const DirectoryLock lock(path, true); }
  CHECK_FALSE(file_exists(path));
}

TEST_CASE("a lock whose holder was killed before it could sign is taken over") {
  const TemporaryDirectory directory;
  put_content(directory / "run.lock", "");
  const DirectoryLock lock(directory / "run.lock", false);
  CHECK_THAT(content_of(directory / "run.lock"), StartsWith("host="));
}

TEST_CASE("of many that want a lock at once, one has it at a time") {
  const TemporaryDirectory directory;
  const std::string path = directory / "run.lock";
  for (int round = 0; round < 20; ++round) {
    if (round % 2 == 1) put_content(path, replaced(own_facts(), "pid", "999999999"));  // a stale one to take over
    std::vector<std::unique_ptr<DirectoryLock>> locks(8);
    std::vector<std::thread> threads;
    for (auto& lock : locks) {
      threads.emplace_back([&lock, &path] {
        try {
          lock = std::make_unique<DirectoryLock>(path, false);
        } catch (const ConfigError&) {
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    int holders = 0;
    for (const auto& lock : locks) holders += lock != nullptr;
    CHECK(holders == 1);
  }
}
