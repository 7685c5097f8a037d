#include "engine/base/error.h"

#include <utility>

namespace pdl {
namespace {

// Compilers spell __FILE__ as the build system named the file; what stands before this file's own place is the root.
std::string from_project_root(std::string_view file) {
  constexpr std::string_view kThisFile = "engine/base/error.cpp";
  const std::string_view spelled = __FILE__;
  if (!spelled.ends_with(kThisFile)) return std::string(file);
  const std::string_view root = spelled.substr(0, spelled.size() - kThisFile.size());
  return std::string(file.starts_with(root) ? file.substr(root.size()) : file);
}

std::string source_line(const std::source_location& where) {
  return str(from_project_root(where.file_name()), ":", where.line());
}

std::string with_source_line(std::string message, ExitCode code, const std::source_location& where) {
  if (code == ExitCode::internal) message += str(" (", source_line(where), ")");
  return message;
}

std::string describe_all(const std::vector<Problem>& problems) {
  std::string text;
  for (const Problem& problem : problems) {
    if (!text.empty()) text += '\n';
    text += describe(problem);
  }
  return text;
}

}  // namespace

Error::Error(std::string message, ExitCode code, std::source_location where)
    : std::runtime_error(with_source_line(std::move(message), code, where)), code_(code), where_(source_line(where)) {}

std::string_view name_of(ExitCode code) {
  switch (code) {
    case ExitCode::ok: return "ok";
    case ExitCode::internal: return "internal";
    case ExitCode::usage: return "usage";
    case ExitCode::data: return "data";
    case ExitCode::unsupported: return "unsupported";
    case ExitCode::out_of_memory: return "out_of_memory";
    case ExitCode::communication: return "communication";
    case ExitCode::numeric: return "numeric";
    case ExitCode::check_failed: return "check_failed";
    case ExitCode::interrupted: return "interrupted";
  }
  return "internal";
}

std::string describe(const Problem& problem) {
  std::string place = problem.origin;
  if (problem.line > 0) place += str(place.empty() ? "" : ", ", "line ", problem.line);
  if (problem.pointer.empty()) return place.empty() ? problem.message : str(place, ": ", problem.message);
  if (!place.empty()) place = str(" (", place, ")");
  return str(problem.pointer, place, ": ", problem.message);
}

ConfigError::ConfigError(std::vector<Problem> problems, ExitCode code)
    : Error(describe_all(problems), code), problems_(std::move(problems)) {}

ConfigError::ConfigError(std::string message, ExitCode code)
    : ConfigError(std::vector<Problem>{Problem{"", std::move(message)}}, code) {}

namespace detail {

void fail_check(const char* condition, const std::string& message, std::source_location where) {
  throw Error(str("check failed: ", condition, message.empty() ? "" : ": ", message), ExitCode::internal, where);
}

}  // namespace detail
}  // namespace pdl
