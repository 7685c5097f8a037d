#pragma once
// Every failure in pdlbench is one of two types, and each carries the exit code that the process ends with.
//
//   Error        something of ours, of a library or of the machine failed: carries rank, source line.
//   ConfigError  the user asked for something that cannot be: one sentence each, all problems at once.
//
// Nothing here knows tensors, MPI or the command line: `cli/main.cpp` turns these into messages and exit codes.

#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace pdl {

/// Process exit codes, the same on every rank (mpirun combines the ranks' codes with a bitwise or).
enum class ExitCode : int {
  ok = 0,
  internal = 1,
  usage = 2,        ///< command line or configuration
  data = 3,         ///< missing or corrupt data
  unsupported = 4,  ///< a combination that cannot run here, too few devices, a broken launch
  out_of_memory = 5,
  communication = 6,  ///< timeout, desynchronised ranks, a lost rank
  numeric = 7,        ///< NaN or infinity, diverged
  check_failed = 8,   ///< `verify` found a mismatch
  interrupted = 75,   ///< stopped on request, resumable (EX_TEMPFAIL)
};

/// "usage", "out_of_memory", ...: one word for scripts.
std::string_view name_of(ExitCode code);

/// Joins values with operator<<: the stand-in for std::format, which GCC 12 lacks.
template <typename... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream out;
  ((out << parts), ...);
  return out.str();
}

/// A failure with the code that the process should end with. `what()` is one line, ready to print; an internal failure
/// ends with its source line, because there the reader is a developer.
class Error : public std::runtime_error {
 public:
  explicit Error(std::string message, ExitCode code = ExitCode::internal,
                 std::source_location where = std::source_location::current());

  ExitCode code() const { return code_; }
  /// "folder/file.cpp:123", from the project's root.
  const std::string& where() const { return where_; }

 private:
  ExitCode code_;
  std::string where_;
};

/// One thing that is wrong with what the user wrote.
struct Problem {
  std::string pointer;      ///< JSON pointer such as "/training/epochs"; empty for the command line
  std::string message;      ///< one sentence: key, value, nearest legal values
  int line = 0;             ///< line in the file, 0 when it came from the command line or a default
  std::string origin = {};  ///< the file of `line` when it is not the main one, or "command line"
};

/// `/training/epoch (line 7): unknown key ...`, or `(base.json, line 7)`, or `(command line)`.
std::string describe(const Problem& problem);

/// User mistakes, all of them at once: `what()` has one line for each. Exit code 2 unless the combination is legal but
/// impossible here (4).
class ConfigError : public Error {
 public:
  explicit ConfigError(std::vector<Problem> problems, ExitCode code = ExitCode::usage);
  explicit ConfigError(std::string message, ExitCode code = ExitCode::usage);

  const std::vector<Problem>& problems() const { return problems_; }

 private:
  std::vector<Problem> problems_;
};

namespace detail {
[[noreturn]] void fail_check(const char* condition, const std::string& message, std::source_location where);
}  // namespace detail

/// Our own invariants: throws Error with the condition's text, the joined parts and the source line.
#define PDL_CHECK(condition, ...)                                                                                      \
  do {                                                                                                                 \
    if (!(condition)) ::pdl::detail::fail_check(#condition, ::pdl::str(__VA_ARGS__), std::source_location::current()); \
  } while (false)

}  // namespace pdl
