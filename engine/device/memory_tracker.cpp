#include "engine/device/memory_tracker.h"

#include <algorithm>
#include <cstdio>

namespace pdl {

void MemoryTracker::add(MemoryKind kind, std::int64_t bytes) {
  current_[kind] += bytes;
  peak_[kind] = std::max(peak_[kind], current_[kind]);
  const std::int64_t total = current_.total();
  if (total > peak_total_) {
    peak_total_ = total;
    at_peak_ = current_;
  }
}

void MemoryTracker::reset_peak() {
  peak_ = current_;
  at_peak_ = current_;
  peak_total_ = current_.total();
}

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  if (bytes < 0) return "-" + format_bytes(-bytes);
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  // 1023.5 would be written as 1024 of the smaller unit.
  while (value >= 1023.5 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  const int decimals = unit == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  char text[32];
  std::snprintf(text, sizeof text, "%.*f %s", decimals, value, kUnits[unit]);
  return text;
}

}  // namespace pdl
