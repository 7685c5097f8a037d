#include "engine/record/records.h"

#include <algorithm>
#include <ctime>
#include <numeric>

namespace pdl {

std::string_view name_of(RunStatus status) {
  switch (status) {
    case RunStatus::running:
      return "running";
    case RunStatus::success:
      return "success";
    case RunStatus::failed:
      return "failed";
    case RunStatus::diverged:
      return "diverged";
    case RunStatus::interrupted:
      return "interrupted";
    case RunStatus::benchmark:
      return "benchmark";
  }
  return "";
}

StepPercentiles percentiles(std::vector<double> step_ms) {
  if (step_ms.empty()) return {};
  std::sort(step_ms.begin(), step_ms.end());
  // In whole numbers: 0.95 * 20 may round to just above 19, and its ceiling would then pick the wrong element.
  const auto at = [&step_ms](std::size_t percent) { return step_ms[(percent * step_ms.size() + 99) / 100 - 1]; };
  return {at(50), at(5), at(95), at(99), step_ms.front(), step_ms.back()};
}

Spread spread_of(const std::vector<double>& values) {
  if (values.empty()) return {};
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return {*least, sum / static_cast<double>(values.size()), *most};
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  const std::size_t length = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return std::string(text, length);
}

}  // namespace pdl
