#include "parallel/pipeline/partition.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <numeric>

namespace pdl {
namespace {

/// How good a cut of the first layers is: first by its largest stage, then by how even it is.
struct Quality {
  double largest = 0.0, squares = 0.0;
  bool operator<(const Quality& other) const {
    return largest != other.largest ? largest < other.largest : squares < other.squares;
  }
};

double sum_of(const std::vector<double>& values, int begin, int end) {
  return std::accumulate(values.begin() + begin, values.begin() + end, 0.0);
}

double largest_of(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

std::string joined(const Balance& balance) {
  std::string text;
  for (int count : balance) text += str(text.empty() ? "" : ", ", count);
  return "[" + text + "]";
}

std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

std::string percent(double fraction) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %%", 100.0 * fraction);
  return text;
}

/// Scales to 0..1; all zero when all are equal.
std::vector<double> normalised(const std::vector<double>& costs) {
  const auto [least, most] = std::minmax_element(costs.begin(), costs.end());
  std::vector<double> scaled;
  for (double cost : costs) scaled.push_back(*most > *least ? (cost - *least) / (*most - *least) : 0.0);
  return scaled;
}

Balance from_ends(const std::vector<int>& ends) {
  Balance balance;
  int begin = 0;
  for (int end : ends) {
    balance.push_back(end - begin);
    begin = end;
  }
  return balance;
}

}  // namespace

std::vector<LayerCost> layer_costs(const LayerList& layers, const TensorSpec& sample_input, DType dtype,
                                   std::int64_t samples) {
  std::vector<LayerCost> costs;
  bool is_first = true;
  for (const LayerInfo& info : describe_layers(layers, sample_input, dtype)) {
    const double forward = info.forward_flops * static_cast<double>(samples);
    // Backward is two products for each forward one; the first layer needs no gradient of its input.
    LayerCost cost = {.name = info.name,
                      .forward = forward,
                      .backward = is_first ? forward : 2.0 * forward,
                      .output_bytes = info.output.elements() * size_of(dtype) * samples,
                      .saved_bytes = info.saved_bytes * samples,
                      .parameters = info.parameters};
    is_first = false;
    costs.push_back(std::move(cost));
  }
  PDL_CHECK(costs.size() > 1, "a model of ", costs.size(), " layers");
  const LayerCost loss = costs.back();
  costs.pop_back();
  costs.back().forward += loss.forward;  // the loss has no backward pass of its own
  costs.back().saved_bytes += loss.saved_bytes;
  return costs;
}

Balance minimax_balance(const std::vector<double>& costs, int stages, int forbidden) {
  const int layers = static_cast<int>(costs.size());
  PDL_CHECK(stages > 0 && stages <= layers, stages, " stages of ", layers, " layers");
  const Quality hopeless{std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
  const auto width = static_cast<std::size_t>(layers) + 1;
  // best[s][n]: of the first n layers in s + 1 stages; begin[s][n]: where the last of these begins.
  std::vector<std::vector<Quality>> best(static_cast<std::size_t>(stages), std::vector<Quality>(width, hopeless));
  std::vector<std::vector<int>> begin(static_cast<std::size_t>(stages), std::vector<int>(width, 0));
  for (int end = 1; end <= layers; ++end) {
    const double cost = sum_of(costs, 0, end);
    best[0][static_cast<std::size_t>(end)] = {cost, cost * cost};
  }
  for (std::size_t stage = 1; stage < best.size(); ++stage) {
    for (int end = static_cast<int>(stage) + 1; end <= layers; ++end) {
      for (int cut = static_cast<int>(stage); cut < end; ++cut) {
        if (cut == forbidden) continue;
        const Quality& before = best[stage - 1][static_cast<std::size_t>(cut)];
        const double cost = sum_of(costs, cut, end);
        const Quality candidate{std::max(before.largest, cost), before.squares + cost * cost};
        if (candidate < best[stage][static_cast<std::size_t>(end)]) {
          best[stage][static_cast<std::size_t>(end)] = candidate;
          begin[stage][static_cast<std::size_t>(end)] = cut;
        }
      }
    }
  }
  if (best.back().back().largest == hopeless.largest) return {};
  Balance balance(static_cast<std::size_t>(stages));
  int end = layers;
  for (int stage = stages - 1; stage >= 0; --stage) {
    const int first = begin[static_cast<std::size_t>(stage)][static_cast<std::size_t>(end)];
    balance[static_cast<std::size_t>(stage)] = end - first;
    end = first;
  }
  return balance;
}

Balance block_partition(const std::vector<double>& costs, int stages) {
  const int layers = static_cast<int>(costs.size());
  PDL_CHECK(stages > 0 && stages <= layers, stages, " stages of ", layers, " layers");
  const std::vector<double> scaled = normalised(costs);
  std::vector<int> ends;
  for (int stage = 1; stage < stages; ++stage) ends.push_back(layers / stages * stage);
  ends.push_back(layers);
  const auto extremes = [&] {
    const std::vector<double> sums = stage_sums(scaled, from_ends(ends));
    const auto smallest = std::min_element(sums.begin(), sums.end());
    const auto largest = std::max_element(sums.rbegin(), sums.rend());  // of equals the last, as upstream
    return std::tuple(*smallest, static_cast<int>(smallest - sums.begin()), *largest,
                      static_cast<int>(sums.rend() - largest) - 1);
  };
  // One layer at a time moves towards the smallest block from its neighbour on the side of the largest one. That one is
  // looked for anew only when it has lost a layer itself.
  while (true) {
    const int largest_block = std::get<3>(extremes());
    while (true) {
      const auto [smallest, block, largest_now, unused] = extremes();
      const double largest = stage_sums(scaled, from_ends(ends))[static_cast<std::size_t>(largest_block)];
      if (largest <= smallest + 1.0 || largest_now <= smallest + 1.0) return from_ends(ends);
      const int giver = largest_block < block ? block - 1 : block + 1;
      ends[static_cast<std::size_t>(std::min(giver, block))] += giver < block ? -1 : 1;
      if (giver == largest_block) break;
    }
  }
}

std::vector<double> stage_sums(const std::vector<double>& costs, const Balance& balance) {
  std::vector<double> sums;
  const std::vector<int> begins = stage_begins(balance);
  PDL_CHECK(begins.back() == static_cast<int>(costs.size()), joined(balance), " of ", costs.size(), " layers");
  for (std::size_t stage = 0; stage < balance.size(); ++stage) {
    sums.push_back(sum_of(costs, begins[stage], begins[stage + 1]));
  }
  return sums;
}

std::vector<int> stage_begins(const Balance& balance) {
  std::vector<int> begins = {0};
  for (int count : balance) begins.push_back(begins.back() + count);
  return begins;
}

std::string balance_fault(const Balance& balance, int stages, int layers) {
  const int total = std::accumulate(balance.begin(), balance.end(), 0);
  const bool positive = std::all_of(balance.begin(), balance.end(), [](int count) { return count > 0; });
  if (static_cast<int>(balance.size()) == stages && total == layers && positive) return "";
  std::string text = joined(balance);
  if (static_cast<int>(balance.size()) != stages) {
    text += str(" has ", balance.size(), " entries for ", stages, stages == 1 ? " stage" : " stages");
  } else if (!positive) {
    text += " has a stage without layers";
  } else {
    text += str(" adds up to ", total, ", the model has ", layers, " layers (the loss goes with the last one)");
  }
  // Nearest: the same proportions, as far as whole layers allow.
  std::vector<double> wanted(static_cast<std::size_t>(stages), 1.0);
  for (std::size_t stage = 0; stage < std::min(wanted.size(), balance.size()); ++stage) {
    wanted[stage] = std::max(1, balance[stage]);
  }
  const double scale = layers / std::accumulate(wanted.begin(), wanted.end(), 0.0);
  Balance nearest;
  int left = layers;
  for (int stage = 0; stage < stages; ++stage) {
    const int after = stages - stage - 1;
    const int share = after == 0 ? left : static_cast<int>(scale * wanted[static_cast<std::size_t>(stage)] + 0.5);
    nearest.push_back(std::clamp(share, 1, left - after));
    left -= nearest.back();
  }
  return text + "; nearest: " + joined(nearest);
}

namespace {

/// The best cut other than this one: it lacks at least one of its cuts.
Balance runner_up(const PartitionReport& report) {
  Balance best;
  const std::vector<int> begins = stage_begins(report.balance);
  for (std::size_t stage = 1; stage < report.balance.size(); ++stage) {
    const Balance other = minimax_balance(report.criterion, static_cast<int>(report.balance.size()), begins[stage]);
    if (other.empty()) continue;
    if (best.empty() ||
        largest_of(stage_sums(report.criterion, other)) < largest_of(stage_sums(report.criterion, best))) {
      best = other;
    }
  }
  return best;
}

}  // namespace

PlanTable explain_partition(const PartitionReport& report, const std::vector<LayerCost>& costs, DType dtype) {
  const std::vector<double> sums = stage_sums(report.criterion, report.balance);
  const std::vector<int> begins = stage_begins(report.balance);
  const double mean = std::accumulate(sums.begin(), sums.end(), 0.0) / static_cast<double>(sums.size());
  PlanTable table;
  table.title = str("stages, ", report.method, " by ", report.criterion_name, ": largest ",
                    percent(mean > 0.0 ? largest_of(sums) / mean - 1.0 : 0.0), " above the mean");
  if (const Balance next = runner_up(report); !next.empty()) {
    const double change = largest_of(stage_sums(report.criterion, next)) / largest_of(sums) - 1.0;
    table.title += str("; next best ", joined(next), ", largest ", change < 0.0 ? "" : "+", percent(change));
  }
  table.columns = {"stage",      "layers",         "first",           "last",         report.criterion_name, "share",
                   "parameters", "parameters MiB", "activations MiB", "handed on MiB"};
  constexpr double kMebibyte = 1024.0 * 1024.0;
  const double total = std::max(mean * static_cast<double>(sums.size()), 1e-300);
  for (std::size_t stage = 0; stage < sums.size(); ++stage) {
    std::int64_t parameters = 0, saved = 0;
    for (int layer = begins[stage]; layer < begins[stage + 1]; ++layer) {
      parameters += costs[static_cast<std::size_t>(layer)].parameters;
      saved += costs[static_cast<std::size_t>(layer)].saved_bytes;
    }
    const LayerCost& first = costs[static_cast<std::size_t>(begins[stage])];
    const LayerCost& last = costs[static_cast<std::size_t>(begins[stage + 1] - 1)];
    const bool ends_model = stage + 1 == sums.size();
    table.rows.push_back({str(stage), str(report.balance[stage]), first.name, last.name, short_number(sums[stage]),
                          percent(sums[stage] / total), str(parameters),
                          short_number(static_cast<double>(parameters * size_of(dtype)) / kMebibyte),
                          short_number(static_cast<double>(saved) / kMebibyte),
                          ends_model ? "" : short_number(static_cast<double>(last.output_bytes) / kMebibyte)});
  }
  return table;
}

}  // namespace pdl
