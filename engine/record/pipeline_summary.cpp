#include "engine/record/pipeline_summary.h"

#include <algorithm>

namespace pdl {
namespace {

template <typename Value>
double median_of(const std::vector<EpochRecord>& epochs, Value value) {
  std::vector<double> values;
  for (const EpochRecord& epoch : epochs) values.push_back(value(*epoch.pipeline));
  return percentiles(values).median;
}

/// A part of all ranks' time together.
template <typename Seconds>
double median_share(const std::vector<EpochRecord>& epochs, Seconds seconds) {
  return median_of(epochs, [seconds](const PipelineRecord& pipeline) {
    double sum = 0.0, train_s = 0.0;
    for (const PipelineRankRecord& rank : pipeline.ranks) {
      sum += seconds(rank);
      train_s += rank.train_s;
    }
    return train_s > 0.0 ? sum / train_s : 0.0;
  });
}

/// Empty when some epoch lacks the number.
std::optional<double> optional_median(const std::vector<EpochRecord>& epochs,
                                      std::optional<double> PipelineRecord::*number) {
  const bool all = std::all_of(epochs.begin(), epochs.end(),
                               [number](const EpochRecord& epoch) { return ((*epoch.pipeline).*number).has_value(); });
  if (!all) return std::nullopt;
  return median_of(epochs, [number](const PipelineRecord& pipeline) { return *(pipeline.*number); });
}

}  // namespace

std::optional<PipelineSummary> summarize_pipeline(const std::vector<EpochRecord>& epochs) {
  const bool all =
      std::all_of(epochs.begin(), epochs.end(), [](const EpochRecord& epoch) { return epoch.pipeline.has_value(); });
  if (epochs.empty() || !all) return std::nullopt;
  using Rank = const PipelineRankRecord&;
  using Pipeline = const PipelineRecord&;
  PipelineSummary sum;
  sum.forward = median_share(epochs, [](Rank rank) { return rank.forward_s; });
  sum.backward = median_share(epochs, [](Rank rank) { return rank.backward_s; });
  sum.recompute = median_share(epochs, [](Rank rank) { return rank.recompute_s; });
  sum.warm_up = median_share(epochs, [](Rank rank) { return rank.wait_s[0]; });
  sum.steady = median_share(epochs, [](Rank rank) { return rank.wait_s[1]; });
  sum.drain = median_share(epochs, [](Rank rank) { return rank.wait_s[2]; });
  sum.comm = median_share(epochs, [](Rank rank) { return rank.comm_passes_s + rank.comm_s; });
  sum.update = median_share(epochs, [](Rank rank) { return rank.optimizer_s; });
  sum.useful = median_of(epochs, [](Pipeline pipeline) { return pipeline.useful_fraction; });
  sum.idle = median_of(epochs, [](Pipeline pipeline) { return pipeline.idle_fraction; });
  sum.simulated_idle = median_of(epochs, [](Pipeline pipeline) { return pipeline.simulated_idle_fraction; });
  sum.closed_form_idle = optional_median(epochs, &PipelineRecord::closed_form_idle_fraction);
  sum.simulated_s = median_of(epochs, [](Pipeline pipeline) { return pipeline.simulated_s; });
  sum.planned_s = optional_median(epochs, &PipelineRecord::planned_s);
  std::vector<double> train_s;
  for (const EpochRecord& epoch : epochs) train_s.push_back(epoch.train_s.mean);
  sum.train_s = percentiles(train_s).median;
  return sum;
}

}  // namespace pdl
