#pragma once
// PipeDream's planner (Narayanan et al. 2019, section 3.1): from what each layer costs to stages, and how many ranks
// each of them gets, so that the slowest stage is as fast as can be. Exact, by dynamic programming over prefixes of the
// layers; pure functions.
//
// A stage of q ranks takes turns with mini-batches: each rank computes every q-th one and sums gradients with the
// others once a round of q. In seconds a mini-batch, for layers that take C, with parameters of w bytes, x bytes handed
// over at an end of the stage, links of B bytes per second:
//   compute C / q     all-reduce 2 (q - 1) / q w / B / q     transfer 2 max(x in, x out) / B / q
// The first two are added (sum) or overlap (max); transfers overlap with both. The plan's time is its slowest stage's.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parallel/engine.h"
#include "parallel/pipeline/partition.h"

namespace pdl {

/// How long a stage is taken to last. upstream: what msr-fiddle/pipedream's optimizer_graph_hierarchical.py computes:
/// all-reduces twice as long as a ring's and added to compute, transfers only with a compression ratio, memory without
/// the version in use; ranks of a node are planned first, and nodes then stand in place of ranks.
enum class PlanCost { sum, max, upstream };

struct PlannerOptions {
  int ranks = 1;
  int ranks_per_node = 0;  ///< neighbours in number; 0: all ranks on one node. upstream: divides the ranks
  double node_bandwidth = 1e9, network_bandwidth = 1e9;  ///< bytes per second of a rank, within and between nodes
  PlanCost cost = PlanCost::sum;
  bool straight = false;           ///< no replicas: as many stages as ranks
  bool fewer_ranks = false;        ///< may leave ranks out at the end, where that is faster (upstream: whole nodes)
  std::int64_t memory_limit = 0;   ///< bytes of a rank; 0: any
  std::int64_t version_bytes = 4;  ///< of a parameter in one version of the weights, and in messages
  std::int64_t state_bytes = 8;    ///< of a parameter's gradient and optimizer state
  double compression_ratio = 0.0;  ///< upstream: transfers are divided by it; 0: they cost nothing
};

/// Seconds of a mini-batch, and bytes of one of the stage's ranks at its peak.
struct PlannedStage {
  int layers = 0, replicas = 1;
  double compute = 0.0, all_reduce = 0.0, transfer = 0.0;
  std::int64_t memory = 0;

  double seconds(PlanCost cost) const;        ///< upstream's is taken as sum
  std::string bound_by(PlanCost cost) const;  ///< "compute", "all-reduce" or "transfer"
};

struct StagePlan {
  std::vector<PlannedStage> stages;  ///< terms by this header's formulas, with any cost
  double seconds = 0.0;              ///< a mini-batch, as the chosen cost has it

  Balance balance() const;
  std::vector<int> replicas() const;
};

/// The fastest plan; of equals the one that keeps its ranks less and more evenly busy, then one with few stages. Times
/// of layers in seconds. Nothing when memory, or fewer layers than stages, allow none.
std::optional<StagePlan> plan_stages(const std::vector<LayerCost>& costs, const PlannerOptions& options);

/// A given plan; upstream's cost is taken as sum. The replicas may be fewer than the ranks; memory is not limited.
StagePlan evaluate_plan(const std::vector<LayerCost>& costs, const PlannerOptions& options, const Balance& balance,
                        const std::vector<int>& replicas);

/// The fastest plan other than this one: it lacks at least one of its stages. upstream's cost is taken as sum.
std::optional<StagePlan> runner_up_plan(const std::vector<LayerCost>& costs, const PlannerOptions& options,
                                        const StagePlan& plan);

/// Two tables: the plan beside the runner-up, one replicated stage and the best straight pipeline; and its stages,
/// where a star is at the term that each is bound by.
std::vector<PlanTable> explain_plan(const std::vector<LayerCost>& costs, const PlannerOptions& options,
                                    const StagePlan& plan);

}  // namespace pdl
