#pragma once
// The samples of an epoch as one row of units: what goes through a pipeline that never stops, one after the other. A
// unit is a mini-batch, or a micro-batch where several of them make an update. A pure function of the epoch's plan:
// every rank makes the same one.

#include <cstdint>
#include <span>
#include <vector>

#include "engine/data/batch_plan.h"

namespace pdl {

class UnitPlan {
 public:
  UnitPlan() = default;
  /// Each step's samples in `units_per_step` units whose sizes differ by at most one; a step of fewer samples has one
  /// in each. What does not fill a row of `multiple` units at the end is left out. `plan` outlives this.
  UnitPlan(const EpochPlan& plan, int units_per_step, int multiple);

  int units() const { return static_cast<int>(ids_.size()); }
  /// Steps that have a unit.
  std::int64_t steps() const { return static_cast<std::int64_t>(ends_.size()); }
  std::span<const std::int64_t> ids(int unit) const { return ids_[static_cast<std::size_t>(unit)]; }
  std::int64_t samples(int unit) const { return static_cast<std::int64_t>(ids(unit).size()); }
  /// Of units first, first + 1, ..., last - 1 together.
  std::int64_t samples(int first, int last) const;
  std::int64_t step_of(int unit) const { return steps_[static_cast<std::size_t>(unit)]; }
  int begin_of(std::int64_t step) const { return step == 0 ? 0 : end_of(step - 1); }     ///< its first unit
  int end_of(std::int64_t step) const { return ends_[static_cast<std::size_t>(step)]; }  ///< its last unit + 1

 private:
  std::vector<std::span<const std::int64_t>> ids_;
  std::vector<std::int64_t> steps_;  ///< of each unit
  std::vector<int> ends_;
};

}  // namespace pdl
