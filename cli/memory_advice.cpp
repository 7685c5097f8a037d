#include "cli/memory_advice.h"

#include <algorithm>
#include <optional>

namespace pdl {
namespace {

using Change = std::vector<std::string>;  // overrides

/// What a rank of the changed run would need; none when the change does not apply to this model or engine.
std::optional<std::int64_t> bytes_with(const Change& change, const std::string& config,
                                       const std::vector<std::string>& overrides, int ranks) {
  std::vector<std::string> all = overrides;
  all.insert(all.end(), change.begin(), change.end());
  try {
    return make_planned_experiment(ranks, config, all)->engine->predict().memory.total();
  } catch (const Error&) {
    return std::nullopt;
  }
}

/// Smaller micro-batches that divide a rank's part of the batch, largest first: gradients add up to the same.
std::vector<Change> smaller_micro_batches(const Experiment& experiment) {
  const TrainingOptions& training = experiment.config.training;
  const std::int64_t local = training.global_batch / std::max(1, experiment.engine->describe().dp);
  const std::int64_t now = training.micro_batch > 0 ? std::min(training.micro_batch, local) : local;
  std::vector<Change> changes;
  for (std::int64_t size = now - 1; size > 0; --size) {
    if (local % size == 0) changes.push_back({str("training.micro_batch_size=", size)});
  }
  return changes;
}

std::string describe(const Change& change, std::int64_t bytes) {
  std::string text;
  for (const std::string& override_text : change) text += override_text + " ";
  return text + "(" + format_bytes(bytes) + ")";
}

}  // namespace

std::vector<std::string> changes_that_fit(const Experiment& experiment, const std::string& config,
                                          const std::vector<std::string>& overrides, int ranks,
                                          std::int64_t available) {
  std::vector<std::string> found;
  const auto fits = [&](const Change& change) {
    const std::optional<std::int64_t> bytes = bytes_with(change, config, overrides, ranks);
    const bool helps = bytes && *bytes <= available;
    if (helps) found.push_back(describe(change, *bytes));
    return helps;
  };
  const std::vector<Change> micro_batches = smaller_micro_batches(experiment);
  const std::vector<Change> switches = {{"workload.recompute=gelu"},
                                        {"workload.recompute=gelu_and_norms"},
                                        {"engine.gradient_as_bucket_view=true"},
                                        {"engine.stage=2"},
                                        {"engine.stage=3"},
                                        {"engine.reduce_bucket_size=6553600"}};
  for (const Change& change : switches) fits(change);
  for (const Change& change : micro_batches) {
    if (fits(change)) break;  // a smaller one only costs more
  }
  if (!found.empty()) return found;
  for (const Change& change : switches) {
    for (const Change& micro_batch : micro_batches) {
      if (fits({micro_batch.front(), change.front()})) break;
    }
  }
  if (!found.empty()) return found;
  fits({"training.optimizer={\"name\": \"sgd\"}"});  // no moments: another recipe, so it comes last
  return found;
}

}  // namespace pdl
