#include "parallel/pipeline/unit_plan.h"

#include "parallel/pipeline/stage_feeder.h"

namespace pdl {

UnitPlan::UnitPlan(const EpochPlan& plan, int units_per_step, int multiple) {
  for (std::int64_t step = 0; step < plan.steps(); ++step) {
    const std::span<const std::int64_t> ids = plan.step_ids(step);
    for (const Part part : cut_step(static_cast<std::int64_t>(ids.size()), units_per_step)) {
      ids_.push_back(ids.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.count)));
      steps_.push_back(step);
    }
  }
  ids_.resize(ids_.size() / static_cast<std::size_t>(multiple) * static_cast<std::size_t>(multiple));
  steps_.resize(ids_.size());
  for (std::size_t unit = 0; unit < ids_.size(); ++unit) {
    if (unit + 1 == ids_.size() || steps_[unit] != steps_[unit + 1]) ends_.push_back(static_cast<int>(unit) + 1);
  }
}

std::int64_t UnitPlan::samples(int first, int last) const {
  std::int64_t sum = 0;
  for (int unit = first; unit < last; ++unit) sum += samples(unit);
  return sum;
}

}  // namespace pdl
