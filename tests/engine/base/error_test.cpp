#include "engine/base/error.h"

#include <unistd.h>

#include <cstdio>
#include <string>

#include "engine/base/log.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

// Text that `write` sends to stderr.
template <typename Write>
std::string captured_stderr(Write write) {
  std::FILE* file = std::tmpfile();
  std::fflush(stderr);
  const int saved = ::dup(STDERR_FILENO);
  ::dup2(::fileno(file), STDERR_FILENO);
  write();
  std::fflush(stderr);
  ::dup2(saved, STDERR_FILENO);
  ::close(saved);
  std::rewind(file);
  std::string text;
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) text += static_cast<char>(c);
  std::fclose(file);
  return text;
}

}  // namespace

TEST_CASE("str joins whatever a stream takes") {
  CHECK(str() == "");
  CHECK(str("rank ", 3, '/', 8, ": ", 0.5) == "rank 3/8: 0.5");
}

TEST_CASE("an error knows its code and its line, counted from the project's root") {
  const int line = __LINE__ + 1;
  const Error error("shard 2 is empty", ExitCode::data);
  CHECK(error.code() == ExitCode::data);
  CHECK(error.where() == str("tests/engine/base/error_test.cpp:", line));
  CHECK(std::string(error.what()) == "shard 2 is empty");
}

TEST_CASE("an internal error shows its line, since its reader is a developer") {
  const Error error("no such slot");
  CHECK(error.code() == ExitCode::internal);
  CHECK(std::string(error.what()) == str("no such slot (", error.where(), ")"));
}

TEST_CASE("a failed check carries condition, parts and the caller's line") {
  const int count = -3;
  const int line = __LINE__ + 2;
  try {
    PDL_CHECK(count >= 0, "count ", count);
    FAIL("the check passed");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::internal);
    CHECK(error.where() == str("tests/engine/base/error_test.cpp:", line));
    CHECK(std::string(error.what()) == str("check failed: count >= 0: count -3 (", error.where(), ")"));
  }
  CHECK_THROWS_WITH([] { PDL_CHECK(1 > 2); }(), StartsWith("check failed: 1 > 2 ("));
}

TEST_CASE("a check evaluates its condition once and its parts only on failure") {
  int conditions = 0, parts = 0;
  PDL_CHECK(++conditions > 0, ++parts);
  CHECK(conditions == 1);
  CHECK(parts == 0);
}

TEST_CASE("a problem says where it is, as far as that is known") {
  CHECK(describe({"/a/b", "wrong", 7}) == "/a/b (line 7): wrong");
  CHECK(describe({"/a/b", "wrong", 7, "base.json"}) == "/a/b (base.json, line 7): wrong");
  CHECK(describe({"/a/b", "wrong", 0, "command line"}) == "/a/b (command line): wrong");
  CHECK(describe({"/a/b", "wrong"}) == "/a/b: wrong");
  CHECK(describe({"", "wrong", 3, "run.json"}) == "run.json, line 3: wrong");
  CHECK(describe({"", "wrong"}) == "wrong");
}

TEST_CASE("a config error lists all its problems and keeps its code") {
  const ConfigError error({{"/a", "first", 2}, {"/b", "second", 5}}, ExitCode::unsupported);
  CHECK(error.code() == ExitCode::unsupported);
  CHECK(std::string(error.what()) == "/a (line 2): first\n/b (line 5): second");
  REQUIRE(error.problems().size() == 2);
  CHECK(error.problems()[1].pointer == "/b");

  const ConfigError plain("4 ranks needed, 2 started");
  CHECK(plain.code() == ExitCode::usage);
  CHECK(std::string(plain.what()) == "4 ranks needed, 2 started");
  CHECK(plain.problems().size() == 1);
}

TEST_CASE("a log writes whole lines, and a quiet one only errors") {
  const Log loud(Log::Level::normal, "rank 3: "), quiet(Log::Level::quiet);
  CHECK(captured_stderr([&] { loud.info("epoch 1\nepoch 2\n"); }) == "rank 3: epoch 1\nrank 3: epoch 2\n");
  CHECK(captured_stderr([&] { loud.warning("slow"); }) == "rank 3: warning: slow\n");
  CHECK(captured_stderr([&] {
          quiet.info("epoch 1");
          quiet.warning("slow");
        }) == "");
  CHECK(captured_stderr([&] { quiet.error("lost"); }) == "error: lost\n");
  CHECK(loud.speaks());
  CHECK_FALSE(quiet.speaks());
}
