#include "parallel/pipeline/pipedream_planner.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <limits>
#include <numeric>

namespace pdl {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

/// Layers [begin, end) on `ranks` ranks from `first_rank` on.
struct Place {
  int begin = 0, end = 0, first_rank = 0, ranks = 1;
  bool operator==(const Place&) const = default;
};

/// Of equally fast plans the one with less work, more evenly spread. Sums of the same numbers count as equal however
/// they were rounded.
struct Quality {
  double seconds = kNever, squares = 0.0;  ///< of the slowest stage; over all ranks

  bool operator<(const Quality& other) const {
    constexpr double kRounding = 1e-12;
    if (seconds < other.seconds * (1.0 - kRounding)) return true;
    return seconds <= other.seconds * (1.0 + kRounding) && squares < other.squares * (1.0 - kRounding);
  }
};

/// Seconds of a mini-batch; kNever where a stage cannot be.
using StageTime = std::function<double(const Place&)>;

/// The fastest division of layers [first, end) over the first n ranks, for every end and n.
class PrefixCuts {
 public:
  PrefixCuts(int first, int layers, int ranks, bool straight, const StageTime& time)
      : first_(first),
        ranks_(ranks),
        best_(static_cast<std::size_t>(layers - first + 1) * static_cast<std::size_t>(ranks + 1)) {
    for (int end = first + 1; end <= layers; ++end) {
      for (int used = 1; used <= ranks; ++used) solve(end, used, straight, time);
    }
  }

  double seconds(int end, int used) const { return best_[index(end, used)].quality.seconds; }

  /// Empty when there is none.
  std::vector<Place> stages(int end, int used) const {
    std::vector<Place> places;
    if (seconds(end, used) == kNever) return places;
    while (used > 0) {
      places.push_back(best_[index(end, used)].last);
      end = places.back().begin;
      used = places.back().first_rank;
    }
    return {places.rbegin(), places.rend()};
  }

 private:
  struct Cell {
    Quality quality;
    Place last;
  };

  static Quality joined(const Quality& before, const Place& last, double seconds) {
    return {std::max(before.seconds, seconds), before.squares + last.ranks * seconds * seconds};
  }

  std::size_t index(int end, int used) const {
    return static_cast<std::size_t>(end - first_) * static_cast<std::size_t>(ranks_ + 1) +
           static_cast<std::size_t>(used);
  }

  void solve(int end, int used, bool straight, const StageTime& time) {
    Cell best;
    if (used == 1 || !straight) {
      best.last = {first_, end, 0, used};
      best.quality = joined({0.0, 0.0}, best.last, time(best.last));
    }
    for (int begin = first_ + 1; begin < end; ++begin) {
      for (int last_ranks = 1; last_ranks <= (straight ? std::min(1, used - 1) : used - 1); ++last_ranks) {
        const Quality& before = best_[index(begin, used - last_ranks)].quality;
        if (before.seconds == kNever || !(before < best.quality)) continue;
        const Place last{begin, end, used - last_ranks, last_ranks};
        const Quality quality = joined(before, last, time(last));
        if (quality < best.quality) best = {quality, last};
      }
    }
    best_[index(end, used)] = best;
  }

  int first_, ranks_;
  std::vector<Cell> best_;
};

/// Sums over any run of layers.
class Sums {
 public:
  explicit Sums(const std::vector<LayerCost>& costs) : costs_(costs) {
    for (const LayerCost& cost : costs) {
      seconds_.push_back(seconds_.back() + cost.time());
      parameters_.push_back(parameters_.back() + static_cast<double>(cost.parameters));
      saved_.push_back(saved_.back() + static_cast<double>(cost.saved_bytes));
    }
  }

  int layers() const { return static_cast<int>(costs_.size()); }
  double seconds(int begin, int end) const { return over(seconds_, begin, end); }
  double parameters(int begin, int end) const { return over(parameters_, begin, end); }
  double saved(int begin, int end) const { return over(saved_, begin, end); }
  /// Bytes handed over at a cut before a layer; none at either end of the model.
  double cut(int layer) const {
    return layer == 0 || layer == layers()
               ? 0.0
               : static_cast<double>(costs_[static_cast<std::size_t>(layer) - 1].output_bytes);
  }

 private:
  static double over(const std::vector<double>& prefix, int begin, int end) {
    return prefix[static_cast<std::size_t>(end)] - prefix[static_cast<std::size_t>(begin)];
  }

  const std::vector<LayerCost>& costs_;
  std::vector<double> seconds_ = {0.0}, parameters_ = {0.0}, saved_ = {0.0};
};

/// This project's costs, of a plan for all of options.ranks.
class StageModel {
 public:
  StageModel(const Sums& sums, const PlannerOptions& options) : sums_(sums), options_(options) {}

  PlannedStage terms(const Place& place) const {
    const double ranks = place.ranks;
    const double weights = sums_.parameters(place.begin, place.end) * static_cast<double>(options_.version_bytes);
    const int behind = place.first_rank + place.ranks;
    PlannedStage stage{.layers = place.end - place.begin, .replicas = place.ranks};
    stage.compute = sums_.seconds(place.begin, place.end) / ranks;
    stage.all_reduce = 2.0 * (ranks - 1.0) / ranks * weights / bandwidth(place.first_rank, behind) / ranks;
    stage.transfer =
        2.0 *
        std::max(sums_.cut(place.begin) / bandwidth(std::max(place.first_rank - 1, 0), behind),
                 sums_.cut(place.end) / bandwidth(place.first_rank, std::min(behind + 1, options_.ranks))) /
        ranks;
    stage.memory = memory(place, weights);
    return stage;
  }

  double seconds(const Place& place) const {
    const PlannedStage stage = terms(place);
    return options_.memory_limit > 0 && stage.memory > options_.memory_limit ? kNever : stage.seconds(options_.cost);
  }

 private:
  /// Of the slowest link between neighbours among ranks [first, end).
  double bandwidth(int first, int end) const {
    const bool within =
        options_.ranks_per_node == 0 || first / options_.ranks_per_node == (end - 1) / options_.ranks_per_node;
    return within ? options_.node_bandwidth : options_.network_bandwidth;
  }

  /// Weights and activations of every mini-batch between its forward and its backward; two messages each way.
  std::int64_t memory(const Place& place, double weights) const {
    const int in_flight = (options_.ranks - 1 - place.first_rank) / place.ranks + 1;
    return static_cast<std::int64_t>(in_flight * (weights + sums_.saved(place.begin, place.end)) +
                                     sums_.parameters(place.begin, place.end) *
                                         static_cast<double>(options_.state_bytes) +
                                     2.0 * (sums_.cut(place.begin) + sums_.cut(place.end)));
  }

  const Sums& sums_;
  const PlannerOptions& options_;
};

/// Upstream's costs at one level of the network, where a unit is a rank or a node of `inner` ranks.
struct UpstreamLevel {
  const Sums& sums;
  const PlannerOptions& options;
  int units = 1, inner = 1;
  double bandwidth = 1e9;
  std::function<double(int begin, int end)> unit_seconds;  ///< of a run of layers on one unit

  double operator()(const Place& place) const {
    const double ranks = place.ranks;
    const double weights = sums.parameters(place.begin, place.end) * static_cast<double>(options.version_bytes);
    const int after = units - place.first_rank - place.ranks;
    const double stashed = (after + place.ranks - 1) / place.ranks * (sums.saved(place.begin, place.end) + weights);
    if (options.memory_limit > 0 && stashed > static_cast<double>(options.memory_limit)) return kNever;
    double all_reduce = 4.0 * (ranks - 1.0) * weights / (bandwidth * ranks);
    if (place.first_rank == 0) all_reduce /= inner;
    double seconds = (unit_seconds(place.begin, place.end) + all_reduce) / ranks;
    if (options.compression_ratio > 0.0 && place.first_rank > 0) {
      const double largest = std::max(sums.cut(place.begin), sums.cut(place.end));
      seconds = std::max(seconds, 2.0 * largest / (bandwidth * ranks) / options.compression_ratio);
    }
    return seconds;
  }
};

/// A plan as the planners find it.
struct Found {
  double seconds = kNever;
  std::vector<Place> stages;
};

/// Ranks of a node first: the best plan of any run of layers on one node is a unit of the plan over nodes.
Found upstream_plan(const Sums& sums, const PlannerOptions& options) {
  const bool one_node = options.ranks_per_node == 0 || options.ranks_per_node >= options.ranks;
  const int inner = one_node ? options.ranks : options.ranks_per_node, layers = sums.layers();
  PDL_CHECK(options.ranks % inner == 0, options.ranks, " ranks on nodes of ", inner);
  const auto layer_seconds = [&](int begin, int end) { return sums.seconds(begin, end); };
  const UpstreamLevel node{sums, options, inner, 1, options.node_bandwidth, layer_seconds};
  std::vector<PrefixCuts> on_node;  // by first layer
  for (int first = 0; first < (one_node ? 1 : layers); ++first) {
    on_node.emplace_back(first, layers, inner, options.straight, node);
  }
  if (one_node) return {on_node[0].seconds(layers, inner), on_node[0].stages(layers, inner)};
  const auto node_seconds = [&](int begin, int end) {
    return on_node[static_cast<std::size_t>(begin)].seconds(end, inner);
  };
  const int nodes = options.ranks / inner;
  const UpstreamLevel network{sums, options, nodes, inner, options.network_bandwidth, node_seconds};
  const PrefixCuts over_nodes(0, layers, nodes, options.straight, network);
  Found found{over_nodes.seconds(layers, nodes), {}};
  for (const Place& outer : over_nodes.stages(layers, nodes)) {
    // Each of its nodes has the same stages; those of all nodes are one stage with more replicas.
    for (const Place& stage : on_node[static_cast<std::size_t>(outer.begin)].stages(outer.end, inner)) {
      const int first_rank = found.stages.empty() ? 0 : found.stages.back().first_rank + found.stages.back().ranks;
      found.stages.push_back({stage.begin, stage.end, first_rank, stage.ranks * outer.ranks});
    }
  }
  return found;
}

Found own_plan(const Sums& sums, const PlannerOptions& options, const std::optional<Place>& forbidden) {
  const StageModel model(sums, options);
  const auto time = [&](const Place& place) { return forbidden == place ? kNever : model.seconds(place); };
  const PrefixCuts cuts(0, sums.layers(), options.ranks, options.straight, time);
  return {cuts.seconds(sums.layers(), options.ranks), cuts.stages(sums.layers(), options.ranks)};
}

/// For all ranks or, with fewer_ranks, for each number of them: what is in flight depends on it.
std::optional<StagePlan> best_plan(const Sums& sums, PlannerOptions options,
                                   const std::optional<Place>& forbidden = std::nullopt) {
  const bool is_upstream = options.cost == PlanCost::upstream;
  const int most = options.ranks;
  const int unit = is_upstream && options.ranks_per_node > 0 ? std::min(options.ranks_per_node, most) : 1;
  std::optional<StagePlan> best;
  for (options.ranks = options.fewer_ranks ? unit : most; options.ranks <= most; options.ranks += unit) {
    const Found found = is_upstream ? upstream_plan(sums, options) : own_plan(sums, options, forbidden);
    if (found.stages.empty() || (best && found.seconds >= best->seconds)) continue;
    best = StagePlan{.stages = {}, .seconds = found.seconds};
    const StageModel model(sums, options);
    for (const Place& place : found.stages) best->stages.push_back(model.terms(place));
  }
  return best;
}

/// The options under which a plan has the terms of this project's costs.
PlannerOptions with_own_cost(PlannerOptions options) {
  if (options.cost == PlanCost::upstream) options.cost = PlanCost::sum;
  return options;
}

std::vector<Place> places_of(const StagePlan& plan) {
  std::vector<Place> places;
  Place place{0, 0, 0, 0};
  for (const PlannedStage& stage : plan.stages) {
    place = {place.end, place.end + stage.layers, place.first_rank + place.ranks, stage.replicas};
    places.push_back(place);
  }
  return places;
}

}  // namespace

double PlannedStage::seconds(PlanCost cost) const {
  const double busy = cost == PlanCost::max ? std::max(compute, all_reduce) : compute + all_reduce;
  return std::max(busy, transfer);
}

std::string PlannedStage::bound_by(PlanCost cost) const {
  if (transfer >= seconds(cost) && transfer > 0.0) return "transfer";
  return all_reduce > compute ? "all-reduce" : "compute";
}

Balance StagePlan::balance() const {
  Balance balance;
  for (const PlannedStage& stage : stages) balance.push_back(stage.layers);
  return balance;
}

std::vector<int> StagePlan::replicas() const {
  std::vector<int> replicas;
  for (const PlannedStage& stage : stages) replicas.push_back(stage.replicas);
  return replicas;
}

std::optional<StagePlan> plan_stages(const std::vector<LayerCost>& costs, const PlannerOptions& options) {
  PDL_CHECK(!costs.empty() && options.ranks > 0, costs.size(), " layers on ", options.ranks, " ranks");
  return best_plan(Sums(costs), options);
}

StagePlan evaluate_plan(const std::vector<LayerCost>& costs, const PlannerOptions& options, const Balance& balance,
                        const std::vector<int>& replicas) {
  PDL_CHECK(balance.size() == replicas.size(), balance.size(), " and ", replicas.size(), " stages");
  PDL_CHECK(stage_begins(balance).back() == static_cast<int>(costs.size()), "a plan for another number of layers");
  StagePlan plan;
  for (std::size_t stage = 0; stage < balance.size(); ++stage) {
    plan.stages.push_back({.layers = balance[stage], .replicas = replicas[stage]});
  }
  PlannerOptions own = with_own_cost(options);
  own.ranks = std::accumulate(replicas.begin(), replicas.end(), 0);
  const Sums sums(costs);
  const StageModel model(sums, own);
  const std::vector<Place> places = places_of(plan);
  for (std::size_t stage = 0; stage < places.size(); ++stage) {
    plan.stages[stage] = model.terms(places[stage]);
    plan.seconds = std::max(plan.seconds, plan.stages[stage].seconds(own.cost));
  }
  return plan;
}

std::optional<StagePlan> runner_up_plan(const std::vector<LayerCost>& costs, const PlannerOptions& options,
                                        const StagePlan& plan) {
  std::optional<StagePlan> best;
  const Sums sums(costs);
  for (const Place& place : places_of(plan)) {
    std::optional<StagePlan> other = best_plan(sums, with_own_cost(options), place);
    if (other && (!best || other->seconds < best->seconds)) best = std::move(other);
  }
  return best;
}

namespace {

std::string number(double value, const char* format = "%.4g") {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string milliseconds(double seconds) { return number(1e3 * seconds); }
std::string mebibytes(std::int64_t bytes) { return number(static_cast<double>(bytes) / (1024.0 * 1024.0), "%.1f"); }

/// "[3, 1]"; long lists of equal numbers as "[1 x 64]".
std::string listed(const std::vector<int>& numbers) {
  std::string text;
  for (auto at = numbers.begin(); at != numbers.end();) {
    const auto end = std::find_if(at, numbers.end(), [&](int other) { return other != *at; });
    const auto count = end - at;
    text += str(text.empty() ? "" : ", ", *at);
    if (count > 3) {
      text += str(" x ", count);
      at = end;
    } else {
      ++at;
    }
  }
  return "[" + text + "]";
}

std::string plan_name(const StagePlan& plan) {
  if (plan.stages.size() == 1) return "one replicated stage";
  const std::vector<int> replicas = plan.replicas();
  return std::all_of(replicas.begin(), replicas.end(), [](int count) { return count == 1; }) ? "straight"
                                                                                             : "replicated";
}

PlanTable plan_table(const std::vector<LayerCost>& costs, const PlannerOptions& options, const StagePlan& plan) {
  const PlannerOptions own = with_own_cost(options);
  const StagePlan chosen = evaluate_plan(costs, own, plan.balance(), plan.replicas());
  PlanTable table{.title = str("planner, cost ", own.cost == PlanCost::max ? "max" : "sum", ": ", plan_name(plan)),
                  .columns = {"plan", "replicas", "balance", "ms a mini-batch", "against chosen", "bound by"},
                  .rows = {}};
  if (options.cost == PlanCost::upstream) {
    table.title += str("; chosen by upstream's cost, which foresees ", milliseconds(plan.seconds), " ms");
  }
  const auto add = [&](const std::string& name, const std::optional<StagePlan>& other) {
    if (!other) return table.rows.push_back({name, "none", "", "", "", ""});
    const auto slowest = std::max_element(
        other->stages.begin(), other->stages.end(),
        [&](const PlannedStage& a, const PlannedStage& b) { return a.seconds(own.cost) < b.seconds(own.cost); });
    const double change = chosen.seconds > 0.0 ? 100.0 * (other->seconds / chosen.seconds - 1.0) : 0.0;
    table.rows.push_back({name, listed(other->replicas()), listed(other->balance()), milliseconds(other->seconds),
                          number(change, "%+.1f %%"),
                          str(slowest->bound_by(own.cost), " of stage ", slowest - other->stages.begin())});
  };
  add("chosen", chosen);
  add("runner-up", runner_up_plan(costs, own, plan));
  add("one replicated stage", evaluate_plan(costs, own, {static_cast<int>(costs.size())}, {options.ranks}));
  PlannerOptions straight = own;
  straight.straight = true;
  add("best straight pipeline", plan_stages(costs, straight));
  return table;
}

PlanTable stage_table(const std::vector<LayerCost>& costs, const PlannerOptions& options, const StagePlan& plan) {
  PlanTable table{
      .title = "planned stages, ms a mini-batch; *: what the stage is bound by",
      .columns = {"stage", "ranks", "layers", "first", "last", "ms", "compute", "all-reduce", "transfer", "memory MiB"},
      .rows = {}};
  const std::vector<Place> places = places_of(plan);
  const StagePlan terms = evaluate_plan(costs, options, plan.balance(), plan.replicas());
  for (std::size_t stage = 0; stage < places.size(); ++stage) {
    const PlannedStage& now = terms.stages[stage];
    const auto term = [&](const char* name, double seconds) {
      return milliseconds(seconds) + (now.bound_by(options.cost) == name ? " *" : "");
    };
    std::string memory = mebibytes(now.memory);
    if (options.memory_limit > 0) memory += str(" of ", mebibytes(options.memory_limit));
    table.rows.push_back(
        {str(stage), str(now.replicas), str(now.layers), costs[static_cast<std::size_t>(places[stage].begin)].name,
         costs[static_cast<std::size_t>(places[stage].end) - 1].name, milliseconds(now.seconds(options.cost)),
         term("compute", now.compute), term("all-reduce", now.all_reduce), term("transfer", now.transfer), memory});
  }
  return table;
}

}  // namespace

std::vector<PlanTable> explain_plan(const std::vector<LayerCost>& costs, const PlannerOptions& options,
                                    const StagePlan& plan) {
  return {plan_table(costs, options, plan), stage_table(costs, options, plan)};
}

}  // namespace pdl
