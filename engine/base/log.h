#pragma once
// Text for people, on stderr. Only the rank that was told to speak does; a Log is passed, there is no global one.

#include <string>
#include <string_view>
#include <utility>

namespace pdl {

/// Writes whole lines to stderr. Copyable; a quiet Log swallows everything but errors.
class Log {
 public:
  enum class Level { quiet, normal };
  explicit Log(Level level = Level::normal, std::string prefix = "") : level_(level), prefix_(std::move(prefix)) {}

  void info(std::string_view text) const;     ///< one line, only at Level::normal
  void warning(std::string_view text) const;  ///< "warning: ...", only at Level::normal
  void error(std::string_view text) const;    ///< "error: ...", always
  bool speaks() const { return level_ == Level::normal; }

 private:
  Level level_;
  std::string prefix_;
};

/// True when stderr is a terminal: only then a progress bar may redraw its line.
bool stderr_is_terminal();

}  // namespace pdl
