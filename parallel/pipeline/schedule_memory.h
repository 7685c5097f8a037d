#pragma once
// How much a rank must be able to hold at a time to run its list: slots, inputs, micro-batches.

#include <vector>

#include "parallel/pipeline/schedule.h"

namespace pdl {

/// Of one virtual stage.
struct ChunkNeeds {
  int slots = 0;  ///< micro-batches whose saved activations are held; the one that a forward without `keep` uses counts
  int inputs = 0;  ///< received activations, the one on its way included; they stay for backward. 0 on the first stage
  bool sends = false;  ///< its output goes to another stage
};

struct RankNeeds {
  std::vector<ChunkNeeds> chunks;
  int micro_batches = 0;  ///< between the first pass and the last one
  bool gathers_loss = false;
};

RankNeeds needs_of(const Schedule& schedule, int rank);

/// Calls and passes of a rank's list, for predictions: how often it does each thing.
int count_of(const Schedule& schedule, int rank, Act act);

}  // namespace pdl
