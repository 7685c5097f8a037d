#include "parallel/sync/sharded_weights.h"

#include <algorithm>

namespace pdl {

ShardedWeights::ShardedWeights(const ParamStore& store, const ShardMap& map, int rank, DType dtype, Values values)
    : store_(store), map_(map), rank_(rank), dtype_(dtype), values_(values) {}

MemoryByKind ShardedWeights::predicted_memory() const {
  MemoryByKind memory;
  if (values_ != Values::whole) {
    const std::int64_t resident = values_ == Values::first_resident ? block(0).elements : 0;
    memory[MemoryKind::parameters] = (map_.shard_elements() - resident_slice() + resident) * size_of(dtype_);
  }
  if (is_half(dtype_)) memory[MemoryKind::optimizer] = map_.shard_elements() * size_of(wide_dtype(dtype_));
  return memory;
}

void ShardedWeights::prepare(Device& device) {
  if (values_ != Values::whole) {
    slices_ = device.allocate((map_.shard_elements() - resident_slice()) * size_of(dtype_), MemoryKind::parameters);
  }
  if (values_ == Values::first_resident) {
    resident_ = device.allocate(block(0).elements * size_of(dtype_), MemoryKind::parameters);
  }
  if (is_half(dtype_)) {
    master_ = device.allocate(map_.shard_elements() * size_of(wide_dtype(dtype_)), MemoryKind::optimizer);
  }
}

Tensor ShardedWeights::whole(int index) const {
  PDL_CHECK(is_whole(index), "block ", index, " is not whole on a rank");
  if (values_ == Values::whole) return store_.values().range(block(index).offset, block(index).elements);
  return resident_.tensor(dtype_, Shape{block(index).elements});
}

Tensor ShardedWeights::values(int index) const {
  const ShardBlock& of = block(index);
  if (is_whole(index)) return whole(index).range(rank_ * of.slice, of.slice);
  const std::int64_t elements = map_.shard_elements() - resident_slice();
  return slices_.tensor(dtype_, Shape{elements}).range(of.shard_offset - resident_slice(), of.slice);
}

Tensor ShardedWeights::weights(int index) const {
  if (!is_half(dtype_)) return values(index);
  return master_.tensor(wide_dtype(dtype_), Shape{map_.shard_elements()})
      .range(block(index).shard_offset, block(index).slice);
}

Tensor ShardedWeights::rounded(int index) const { return is_half(dtype_) ? values(index) : Tensor(); }

void ShardedWeights::initialise(Device& device, Backend& backend, std::uint64_t seed) {
  Stream& stream = device.compute_stream();
  store_.visit_initial_values(dtype_, seed, [&](int index, const Tensor& initial) {
    const int home = map_.block_of(index);
    const Param& param = store_.params()[static_cast<std::size_t>(index)];
    const std::int64_t begin = map_.slice_begin(block(home), rank_);
    const std::int64_t first = std::max(param.offset, begin);
    const std::int64_t count = std::min(param.offset + param.count, begin + block(home).slice) - first;
    if (count <= 0) return;
    const Tensor from = initial.range(first - param.offset, count);
    device.copy(weights(home).range(first - begin, count).raw(), from.raw(), from.bytes(), stream);
    stream.synchronize();  // the host memory is used again
  });
  round(backend);
}

void ShardedWeights::round(Backend& backend) {
  if (!is_half(dtype_)) return;
  for (int index = 0; index < static_cast<int>(map_.blocks().size()); ++index) {
    backend.copy(rounded(index), weights(index));
  }
}

}  // namespace pdl
