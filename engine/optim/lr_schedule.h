#pragma once
// Learning rate as a pure function of the update number.

#include <cstdint>
#include <string>
#include <utility>

#include "engine/base/config_reader.h"

namespace pdl {

struct LrScheduleOptions {
  std::string name = "constant";  ///< constant, step, cosine, linear
  std::int64_t warmup_steps = 0;  ///< linear from lr / warmup_steps in update 0 up to lr in update warmup_steps - 1
  std::int64_t step_epochs = 30;  ///< step: times `gamma` every so many epochs, warm-up included
  double gamma = 0.1;
  double min_lr = 0.0;  ///< cosine, linear: value at the last update
};

/// Reads the "lr_schedule" block: the keys of the shape that it names.
LrScheduleOptions read_lr_schedule_options(const ConfigReader& reader);

class LrSchedule {
 public:
  LrSchedule(LrScheduleOptions options, double base_lr, std::int64_t steps_per_epoch, std::int64_t total_steps)
      : options_(std::move(options)), base_lr_(base_lr), steps_per_epoch_(steps_per_epoch), total_steps_(total_steps) {}
  /// Rate of update `update`, counted from 0 over the whole run. After the last update the rate stays what it was
  /// there.
  double at(std::int64_t update) const;

 private:
  LrScheduleOptions options_;
  double base_lr_;
  std::int64_t steps_per_epoch_, total_steps_;
};

}  // namespace pdl
