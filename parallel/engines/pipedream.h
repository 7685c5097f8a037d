#pragma once
// What the pipedream engine and its reference, pipedream-recurrence, are both told.

#include <string>
#include <vector>

#include "parallel/engine.h"
#include "parallel/pipeline/partition.h"
#include "parallel/pipeline/pipedream_planner.h"

namespace pdl {

struct PipedreamKnobs {
  std::string mode = "stash";  ///< stash, none, published, vertical_sync, 2bw, flush
  std::vector<int> replicas;   ///< ranks of each stage; empty: one each
  Balance balance;             ///< layers of each stage; empty: found
  std::string batch_rule = "match_update";
  std::string lr_staleness = "none";
  std::string drain = "epoch";    ///< when weights stop being late: epoch, never
  int micro_batches = 0;          ///< 2bw, flush: of a mini-batch; 0: as many as stages
  std::string plan = "straight";  ///< who decides replicas and balance: straight, replicated, upstream
  std::string profile;            ///< file of measured layer times; "": operations
  double bandwidth = 1.0, network_bandwidth = 1.0, memory_gib = 0.0;  ///< for the planner; GB/s of a rank
  int ranks_per_node = 0;

  bool keeps_lags() const { return drain == "never"; }
  bool is_planned() const { return plan != "straight"; }

  /// Whether a mini-batch goes through in several micro-batches.
  bool has_micro_batches() const { return mode == "2bw" || mode == "flush"; }
  int stages() const { return static_cast<int>(replicas.size()); }
  int ranks() const;
  bool replicated() const;
  /// Passes through a stage in which a step's samples go through the pipeline.
  int units_per_step() const {
    if (has_micro_batches()) return micro_batches;
    return batch_rule == "match_injection" ? ranks() : 1;
  }
};

PipedreamKnobs read_pipedream_knobs(const ConfigReader& reader);

/// What the planner decides by: layers' seconds for a mini-batch, and the machine.
struct PlannerInput {
  std::vector<LayerCost> costs;
  PlannerOptions options;
};
/// Costs in operations where there is no profile.
PlannerInput planner_input(const EngineContext& context, const PipedreamKnobs& knobs);

/// Finds what the knobs leave open: replicas and balance by the planner where it is asked, micro-batches. Problems of
/// the layout and of the recipe are noted in the reader, each under its key; false when there are any.
bool complete_knobs(const EngineContext& context, const ConfigReader& reader, PipedreamKnobs& knobs);

/// "[3, 1]"
std::string list_text(const std::vector<int>& numbers);

}  // namespace pdl
