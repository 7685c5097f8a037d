#pragma once
// A rank's slices of the weights: what its optimizer updates and what it sends when a block is gathered.
//
//                    values that layers read                 slices that the optimizer updates
//   whole values     the store's range, on every rank        inside it; beside values of a half type: master slices
//   sharded values   slices, and the first block whole       inside the first block, else the slices; likewise
//                    when it is resident

#include "parallel/sync/shard_map.h"

namespace pdl {

class ShardedWeights {
 public:
  enum class Values {
    whole,          ///< every rank holds all values, in the store
    sharded,        ///< a rank holds its slices
    first_resident  ///< likewise, but the first block whole
  };

  /// Plans only. Store and map outlive this.
  ShardedWeights(const ParamStore& store, const ShardMap& map, int rank, DType dtype, Values values);

  /// What the store has to hold itself.
  StoreParts store_parts() const { return {.values = values_ == Values::whole, .gradients = true, .master = false}; }
  /// Takes memory; the store has its own by then.
  void prepare(Device& device);
  /// Bytes that `prepare` takes.
  MemoryByKind predicted_memory() const;

  /// This rank's slice of a block, [slice], of wide type: what is updated.
  Tensor weights(int block) const;
  /// The slice as layers read it, made from `weights`; undefined when these are read themselves.
  Tensor rounded(int block) const;
  /// What a gathering of the block sends.
  Tensor sent(int block) const { return is_half(dtype_) ? rounded(block) : weights(block); }
  bool is_whole(int block) const {
    return values_ == Values::whole || (values_ == Values::first_resident && block == 0);
  }
  /// All of a block that is whole here, [elements]; `sent` lies in it.
  Tensor whole(int block) const;

  /// Sets the slices by the init rules and rounds them.
  void initialise(Device& device, Backend& backend, std::uint64_t seed);
  /// Makes the rounded slices from the weights, after these were set.
  void round(Backend& backend);

 private:
  const ShardBlock& block(int index) const { return map_.blocks()[static_cast<std::size_t>(index)]; }
  /// Elements of the shard that lie in a block that is whole here, ahead of those that do not.
  std::int64_t resident_slice() const { return values_ == Values::first_resident ? block(0).slice : 0; }
  Tensor values(int block) const;

  const ParamStore& store_;
  const ShardMap& map_;
  int rank_;
  DType dtype_;
  Values values_;
  Buffer master_, slices_, resident_;
};

}  // namespace pdl
