#include "engine/base/log.h"

#include <unistd.h>

#include <cstdio>

namespace pdl {
namespace {

// One fwrite for the whole text: the lines of ranks that share a terminal then do not cut into one another.
void write_lines(std::string_view prefix, std::string_view text) {
  if (text.ends_with('\n')) text.remove_suffix(1);
  std::string out(prefix);
  for (const char c : text) {
    out += c;
    if (c == '\n') out += prefix;
  }
  out += '\n';
  std::fwrite(out.data(), 1, out.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

void Log::info(std::string_view text) const {
  if (speaks()) write_lines(prefix_, text);
}

void Log::warning(std::string_view text) const {
  if (speaks()) write_lines(prefix_ + "warning: ", text);
}

void Log::error(std::string_view text) const { write_lines(prefix_ + "error: ", text); }

bool stderr_is_terminal() { return ::isatty(STDERR_FILENO) == 1; }

}  // namespace pdl
