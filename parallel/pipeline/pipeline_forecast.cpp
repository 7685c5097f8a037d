#include "parallel/pipeline/pipeline_forecast.h"

#include <algorithm>

namespace pdl {
namespace {

/// All runs one after the other.
struct Forecast {
  double seconds = 0.0, computing = 0.0, useful = 0.0;  ///< the latter two as mean over ranks
};

Forecast simulate(const std::vector<ScheduleRun>& runs, const std::vector<StageCost>& costs) {
  Forecast sum;
  for (const ScheduleRun& run : runs) {
    const Timeline timeline = simulate(run.schedule, costs);
    const auto times = static_cast<double>(run.times);
    sum.seconds += times * timeline.makespan;
    sum.computing += times * timeline.computing;
    sum.useful += times * timeline.useful;
  }
  return sum;
}

std::int64_t updates_of(const std::vector<ScheduleRun>& runs, int stage) {
  std::int64_t updates = 0;
  for (const ScheduleRun& run : runs) {
    const auto& ranks = run.schedule.ranks;
    const auto rank =
        std::find_if(ranks.begin(), ranks.end(), [stage](const RankSchedule& one) { return one.stage == stage; });
    updates += run.times * std::count_if(rank->actions.begin(), rank->actions.end(),
                                         [](const Action& action) { return action.act == Act::update; });
  }
  return updates;
}

void add(PassTotal& sum, const PassTotal& more) {
  sum.count += more.count;
  sum.s += more.s;
}

}  // namespace

std::optional<double> closed_form_idle_fraction(const std::vector<ScheduleRun>& runs) {
  double idle = 0.0, all = 0.0;
  for (const ScheduleRun& run : runs) {
    const Schedule& schedule = run.schedule;
    const bool is_straight = schedule.ranks.size() == static_cast<std::size_t>(schedule.stages);
    if (!is_straight || (schedule.chunks > 1 && schedule.micro_batches % schedule.stages != 0)) return std::nullopt;
    const auto times = static_cast<double>(run.times);
    const double waits = static_cast<double>(run.fills) * (schedule.stages - 1);
    idle += times * waits;
    all += times * (static_cast<double>(schedule.chunks) * schedule.micro_batches + waits);
  }
  if (!(all > 0.0)) return std::nullopt;
  return idle / all;
}

std::vector<StageCost> mean_stage_costs(const std::vector<ScheduleRun>& runs,
                                        const std::vector<PipelineRankRecord>& ranks) {
  const Schedule& schedule = runs.front().schedule;
  std::vector<StageCost> costs;
  for (int virtual_stage = 0; virtual_stage < schedule.virtual_stages(); ++virtual_stage) {
    const int stage = virtual_stage % schedule.stages;
    const auto chunk = static_cast<std::size_t>(virtual_stage / schedule.stages);
    StagePasses passes;
    double update_s = 0.0, members = 0.0;
    for (const PipelineRankRecord& rank : ranks) {
      if (rank.stage != stage) continue;
      update_s += rank.optimizer_s;
      members += 1.0;
      if (chunk >= rank.passes.size()) continue;
      const StagePasses& mine = rank.passes[chunk];
      add(passes.forward, mine.forward);
      add(passes.recompute, mine.recompute);
      add(passes.backward, mine.backward);
      add(passes.loss, mine.loss);
    }
    const double updates = members * static_cast<double>(updates_of(runs, stage));
    costs.push_back({.forward = passes.forward.mean_s(),
                     .backward = passes.backward.mean_s(),
                     .recompute = passes.recompute.mean_s(),
                     .loss = passes.loss.mean_s(),
                     .update = chunk == 0 && updates > 0.0 ? update_s / updates : 0.0});
  }
  return costs;
}

void forecast_epoch(const PipelinePlan& plan, const std::vector<ScheduleRun>& runs,
                    const std::vector<LayerCost>& layer_seconds, PipelineRecord& record) {
  for (PipelineRankRecord& rank : record.ranks) {
    const GridCoordinate place = plan.grid().coordinate(rank.rank);
    rank.stage = plan.stage_of(place.pp);
    rank.replica = place.dp + place.pp - plan.first_rank_of(rank.stage);
  }
  if (runs.empty()) return;
  record.closed_form_idle_fraction = closed_form_idle_fraction(runs);
  const Forecast forecast = simulate(runs, mean_stage_costs(runs, record.ranks));
  record.simulated_s = forecast.seconds;
  if (forecast.seconds > 0.0) {
    record.simulated_idle_fraction = 1.0 - forecast.computing / forecast.seconds;
    record.simulated_useful_fraction = forecast.useful / forecast.seconds;
  }
  if (!layer_seconds.empty()) record.planned_s = simulate(runs, plan.stage_costs(layer_seconds)).seconds;
}

}  // namespace pdl
