#pragma once
// Who holds which elements when parameters, gradients or moments are divided over data-parallel ranks.
//
//   store    | block 0                         | block 1                 | ...       parameters end to end, then
//   padding
//            | rank 0 | rank 1 | .. | rank N-1 | rank 0 | .. | rank N-1  |           N equal slices of each block
//   shard r  | slice r of block 0 | slice r of block 1 | ...                         what rank r holds
//
// A block is what one collective works on: a reduce-scatter of its gradients leaves each rank its slice of the sums, an
// all-gather of the slices makes it whole again. One block of everything is the layout of ZeRO's stages 1 and 2
// (Rajbhandari et al. 2020, section 5); a block for each bucket lets reduce-scatters run under the backward pass; a
// block for each layer lets layers come and go (stage 3). A slice knows no parameters: it may begin and end inside one.

#include <cstdint>
#include <string>
#include <vector>

#include "engine/nn/model.h"

namespace pdl {

struct ShardBlock {
  std::vector<int> params;        ///< indices into ParamStore::params(), in the order in which they lie
  std::int64_t offset = 0;        ///< elements, into the store's ranges
  std::int64_t elements = 0;      ///< with padding
  std::int64_t used = 0;          ///< without
  std::int64_t slice = 0;         ///< elements / ranks
  std::int64_t shard_offset = 0;  ///< of the slice in a rank's shard
};

class ShardMap {
 public:
  /// `blocks` hold every parameter once, in the order in which they are to lie. Slices are multiples of `alignment`
  /// elements.
  ShardMap(const ParamStore& store, std::vector<std::vector<int>> blocks, int ranks, std::int64_t alignment);

  /// Makes the store's ranges those of this map.
  void place(ParamStore& store) const { store.place(offsets_, elements_); }

  int ranks() const { return ranks_; }
  const std::vector<ShardBlock>& blocks() const { return blocks_; }
  int block_of(int param) const { return block_of_[static_cast<std::size_t>(param)]; }
  std::int64_t elements() const { return elements_; }  ///< of all blocks, padding included
  std::int64_t shard_elements() const { return elements_ / ranks_; }
  /// Where a rank's slice of a block begins in the store.
  std::int64_t slice_begin(const ShardBlock& block, int rank) const { return block.offset + rank * block.slice; }

  /// What lies in `rank`'s slice of a block, a segment for each of its parameters in order, offsets from the start of
  /// the slice. Of a parameter that lies elsewhere the count is 0.
  std::vector<UpdateSegment> segments(const ParamStore& store, const ShardBlock& block, int rank, bool all_decay) const;

  /// "4 ranks, 3 blocks, 1026 elements, layout 8f2c0b7e": equal exactly when two maps are.
  std::string describe() const;

 private:
  int ranks_;
  std::vector<ShardBlock> blocks_;
  std::vector<int> block_of_;          ///< of each parameter
  std::vector<std::int64_t> offsets_;  ///< of each parameter
  std::int64_t elements_ = 0;
};

/// For each parameter of a whole model's store the layers that use it, in order: several where it is tied.
std::vector<std::vector<int>> parameter_users(const LayerList& layers, const ParamStore& store);

/// All parameters of a store as one block.
std::vector<std::vector<int>> one_block(const ParamStore& store);

/// A block for each parameter.
std::vector<std::vector<int>> tensor_blocks(const ParamStore& store);

/// Blocks of up to `capacity` elements, filled in the order in which a backward pass finishes gradients: from the last
/// parameter on.
std::vector<std::vector<int>> bucket_blocks(const ParamStore& store, std::int64_t capacity);

/// A block for all parameters of up to `resident_elements` elements (none: no such block), then a block for each set of
/// parameters that the same layers use. `users[i]` are the layers that use parameter i.
std::vector<std::vector<int>> layer_blocks(const ParamStore& store, const std::vector<std::vector<int>>& users,
                                           std::int64_t resident_elements);

}  // namespace pdl
