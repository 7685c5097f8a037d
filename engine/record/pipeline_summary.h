#pragma once
// A run's pipeline in a few numbers, for the report.

#include <optional>
#include <vector>

#include "engine/record/records.h"

namespace pdl {

/// Where the ranks of a pipeline spent their time, as parts of it, and what the schedule says about it. Each number is
/// the median over epochs by itself.
struct PipelineSummary {
  double forward = 0.0, backward = 0.0, recompute = 0.0;
  double warm_up = 0.0, steady = 0.0, drain = 0.0;  ///< waiting for neighbours, by part of the schedule
  double comm = 0.0;                                ///< waiting for others
  double update = 0.0;
  double useful = 0.0, idle = 0.0, simulated_idle = 0.0;
  std::optional<double> closed_form_idle;
  double train_s = 0.0, simulated_s = 0.0;  ///< an epoch, the former as mean over ranks
  std::optional<double> planned_s;
};

/// Empty when some epoch has no pipeline.
std::optional<PipelineSummary> summarize_pipeline(const std::vector<EpochRecord>& epochs);

}  // namespace pdl
