#pragma once
// What the pipedream engine and its reference, pipedream-recurrence, are both told.

#include <string>
#include <vector>

#include "parallel/engine.h"
#include "parallel/pipeline/partition.h"

namespace pdl {

struct PipedreamKnobs {
  std::string mode = "stash";  ///< stash, none, published, vertical_sync, 2bw, flush
  std::vector<int> replicas;   ///< ranks of each stage; empty: one each
  Balance balance;             ///< layers of each stage; empty: found
  std::string batch_rule = "match_update";
  std::string lr_staleness = "none";
  int micro_batches = 0;  ///< 2bw, flush: of a mini-batch; 0: as many as stages

  /// Whether a mini-batch goes through in several micro-batches.
  bool has_micro_batches() const { return mode == "2bw" || mode == "flush"; }
  int stages() const { return static_cast<int>(replicas.size()); }
  int ranks() const;
  /// Passes through a stage in which a step's samples go through the pipeline.
  int units_per_step() const {
    if (has_micro_batches()) return micro_batches;
    return batch_rule == "match_injection" ? ranks() : 1;
  }
};

PipedreamKnobs read_pipedream_knobs(const ConfigReader& reader);

/// "[3, 1]"
std::string list_text(const std::vector<int>& numbers);

}  // namespace pdl
