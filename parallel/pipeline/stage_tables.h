#pragma once
// Pipelines as tables: what `plan` prints of the memory of stages and of a schedule in time.

#include "parallel/pipeline/pipeline_plan.h"

namespace pdl {

/// "27.3 %".
std::string percent(double fraction);

/// Every stage's memory, by the formulas that a rank's own prediction uses. The optimizer is divided over
/// `optimizer_parts` ranks.
PlanTable stage_memory_table(const EngineContext& context, const PipelinePlan& plan, int optimizer_parts = 1);

/// A line for each stage, or replica of one ("0.1"): what it does when.
PlanTable schedule_picture(const std::string& title, const Schedule& schedule, const Timeline& timeline);

/// What this rank sends in a step, a line for each axis and operation.
PlanTable traffic_table(const CommCounts& counts);

}  // namespace pdl
