#pragma once
// What the schedules of an epoch say about the time that its pipeline took: how much of it must be idle in theory, and
// how long the same lists take when each pass takes what it took on average. The first is what the schedule costs, the
// second adds what stages of unequal cost do, and what was measured beyond that is communication and all the rest. Pure
// functions.

#include <optional>
#include <vector>

#include "engine/record/records.h"
#include "parallel/pipeline/pipeline_plan.h"

namespace pdl {

/// A schedule as an epoch ran it.
struct ScheduleRun {
  Schedule schedule;
  std::int64_t times = 1;
  int fills = 1;  ///< how often the pipeline fills and drains within it
};

/// Part of the ranks' time in which they wait when all virtual stages take the same time, recomputation and everything
/// else none: p - 1 of v m + p - 1 for m micro-batches on p stages in v chunks (Narayanan et al., SC 2021, section 2.2)
/// each time that the pipeline fills and drains. Empty for stages of several ranks, and for chunks with micro-batches
/// that make no whole groups of p.
std::optional<double> closed_form_idle_fraction(const std::vector<ScheduleRun>& runs);

/// What each virtual stage cost a micro-batch on average over its ranks, in seconds, with what its passes waited for
/// other than neighbours; and its ranks' updates. `ranks` know their stages.
std::vector<StageCost> mean_stage_costs(const std::vector<ScheduleRun>& runs,
                                        const std::vector<PipelineRankRecord>& ranks);

/// Completes the record of an epoch of these runs. `layer_seconds` as in PipelineOptions.
void forecast_epoch(const PipelinePlan& plan, const std::vector<ScheduleRun>& runs,
                    const std::vector<LayerCost>& layer_seconds, PipelineRecord& record);

}  // namespace pdl
