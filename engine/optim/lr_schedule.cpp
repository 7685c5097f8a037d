#include "engine/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace pdl {

LrScheduleOptions read_lr_schedule_options(const ConfigReader& reader) {
  LrScheduleOptions options;
  options.name = reader.choice("name", "constant", {"constant", "step", "cosine", "linear"}, "learning rate over time");
  options.warmup_steps =
      reader.get<std::int64_t>("warmup_steps", 0, "updates of linear warm-up, from lr / warmup_steps to lr", {0, 1e12});
  if (options.name == "step") {
    options.step_epochs = reader.get<std::int64_t>("step_epochs", 30, "epochs between two falls", {1, 1e9});
    options.gamma = reader.get("gamma", 0.1, "factor of each fall", {0, 1});
  } else if (options.name == "cosine" || options.name == "linear") {
    options.min_lr = reader.get("min_lr", 0.0, "learning rate of the last update", {0, 1e6});
  }
  return options;
}

double LrSchedule::at(std::int64_t update) const {
  const auto warmup = static_cast<double>(options_.warmup_steps);
  if (update < options_.warmup_steps) return base_lr_ * (static_cast<double>(update) + 1.0) / warmup;
  if (options_.name == "constant") return base_lr_;
  if (options_.name == "step") {
    const std::int64_t epoch = update / std::max<std::int64_t>(1, steps_per_epoch_);
    return base_lr_ * std::pow(options_.gamma, static_cast<double>(epoch / options_.step_epochs));
  }
  // The fall begins at the last update with the full rate: the end of the warm-up, or update 0.
  const std::int64_t full = std::max<std::int64_t>(1, options_.warmup_steps) - 1;
  const std::int64_t last = total_steps_ - 1;
  if (last <= full) return base_lr_;
  const double progress = std::min(1.0, static_cast<double>(update - full) / static_cast<double>(last - full));
  const double left = options_.name == "cosine" ? 0.5 * (1.0 + std::cos(std::numbers::pi * progress)) : 1.0 - progress;
  return options_.min_lr + (base_lr_ - options_.min_lr) * left;
}

}  // namespace pdl
