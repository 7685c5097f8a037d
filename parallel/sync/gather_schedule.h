#pragma once
// When sharded parameters are gathered and let go over one pass: the rules of ZeRO stage 3 as a pure function, so that
// plans print it, memory is known beforehand and tests hold it against numbers.
//
//   for each use, in the order in which layers run:
//     gather what this use needs and nobody has gathered
//     gather ahead: blocks of the next uses, up to prefetch_elements and within max_live_elements
//     run the layer
//     let go of this use's blocks, except those that a gathering ahead has counted on, and those that are used again
//     within the next max_reuse_elements elements of parameters
//
// Source of the rules: deepspeed/runtime/zero/partitioned_parameter_coordinator.py (fetch_sub_module,
// release_sub_module,
// __params_to_release), which records the order of uses in the first step. Here it is known from the start.

#include <cstdint>
#include <vector>

namespace pdl {

struct GatherOptions {
  std::int64_t prefetch_elements = 1;   ///< 0: nothing is gathered ahead; 1: always the next block
  std::int64_t max_live_elements = 0;   ///< bounds what is gathered ahead, never what a use needs
  std::int64_t max_reuse_elements = 0;  ///< 0: let go after every use
  /// Whether blocks of the next uses that are there already use up prefetch_elements. With them, looking ahead goes so
  /// far and no further; upstream's skips them, so that it runs on through all that is held, and keeps it.
  bool held_blocks_count = true;
};

/// A layer that runs once, forward or backward.
struct LayerUse {
  int layer = 0;
  std::vector<int> blocks;    ///< that it needs and that are not always there
  std::int64_t elements = 0;  ///< of all its parameters, resident ones included: the measure of distance
};

/// One gathering of a block.
struct Gather {
  int block = 0;
  std::size_t first_use = 0, last_use = 0;  ///< begun before the one, let go after the other
  std::int64_t offset = 0;                  ///< elements, into the memory for gathered blocks
};

struct GatherSchedule {
  struct Use {
    std::vector<int> gathered, ahead, released;  ///< indices into `gathers`
    std::vector<int> needed;                     ///< likewise: what the layer reads
    std::int64_t live_elements = 0;              ///< gathered or on their way while the layer runs
  };
  std::vector<Use> uses;
  std::vector<Gather> gathers;
  std::int64_t memory_elements = 0;  ///< for all gathers, at their offsets
  std::int64_t most_live_elements() const;
};

/// `block_elements[b]` includes padding.
GatherSchedule plan_gathers(const std::vector<LayerUse>& uses, const std::vector<std::int64_t>& block_elements,
                            const GatherOptions& options);

}  // namespace pdl
