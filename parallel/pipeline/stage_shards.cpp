#include "parallel/pipeline/stage_shards.h"

#include <algorithm>

#include "parallel/comm/counting_communicator.h"
#include "parallel/comm/self_communicator.h"

namespace pdl {
namespace {

/// A block for each list of `alone`, the others in buckets. From the end of the store to its start is the order in
/// which blocks are reduced, so what waits for the whole backward pass comes first.
std::vector<std::vector<int>> blocks_of(const ParamStore& store, const std::vector<std::vector<int>>& alone,
                                        const ReplicaOptions& replica) {
  std::vector<char> is_alone(store.params().size(), 0);
  std::vector<std::vector<int>> blocks;
  for (const std::vector<int>& params : alone) {
    for (int param : params) is_alone[static_cast<std::size_t>(param)] = 1;
    if (!params.empty()) blocks.push_back(params);
  }
  const std::vector<std::vector<int>> buckets =
      replica.size > 1 ? bucket_blocks(store, replica.bucket_elements) : one_block(store);
  for (const std::vector<int>& bucket : buckets) {
    std::vector<int> rest;
    std::copy_if(bucket.begin(), bucket.end(), std::back_inserter(rest),
                 [&](int param) { return !is_alone[static_cast<std::size_t>(param)]; });
    if (!rest.empty()) blocks.push_back(std::move(rest));
  }
  std::stable_sort(blocks.begin(), blocks.end(), [](const auto& a, const auto& b) { return a.front() < b.front(); });
  return blocks;
}

}  // namespace

StageShards::StageShards(StagePart& part, const std::vector<std::vector<int>>& alone, const OptimizerOptions& optimizer,
                         DType dtype, const ReplicaOptions& replica)
    : part_(part),
      options_(optimizer),
      dtype_(dtype),
      replica_(replica),
      // Slices of multiples of 8 elements keep the 16 bytes that NCCL and kernels like.
      map_(part.store, blocks_of(part.store, alone, replica), replica.size, replica.size == 1 ? 1 : 8),
      sliced_(part.store, map_, replica.rank, dtype, ShardedWeights::Values::whole),
      planned_(make_planning_communicator(replica.rank, replica.size, "dp")) {
  map_.place(part_.store);
  gradients_ = make_gradients(*planned_);
  for (int block = 0; block < blocks(); ++block) optimizers_.push_back(make_optimizer(options_));
}

std::unique_ptr<GradientShards> StageShards::make_gradients(Communicator& replicas) const {
  GradientShardOptions options;
  options.reduction = distributed() ? ShardReduction::reduce_scatter : ShardReduction::all_reduce;
  options.overlap = replica_.overlap;
  options.bucket_elements = replica_.bucket_elements;
  std::vector<std::vector<int>> users;
  for (const Param& param : part_.store.params()) users.push_back({param.layer});
  return std::make_unique<GradientShards>(part_.store, map_, users, part_.stage.last(), replicas, options, dtype_);
}

void StageShards::prepare(Device& device, Backend& backend, Communicator* replicas, std::uint64_t seed) {
  device_ = &device;
  backend_ = &backend;
  replicas_ = replicas;
  part_.store.allocate(device, dtype_, store_parts());
  if (sliced_master()) sliced_.prepare(device);
  if (replicas != nullptr) gradients_ = make_gradients(*replicas);
  gradients_->prepare(device, backend);
  for (int block = 0; block < blocks(); ++block)
    optimizer(block).allocate(device, count(block), dtype_, segments(block));
  if (sliced_master()) {
    sliced_.initialise(device, backend, seed);
    gather(false);
  } else {
    part_.store.initialise(device, seed);
    part_.store.round_master(backend);
  }
}

MemoryByKind StageShards::predicted_memory() const {
  MemoryByKind memory = part_.store.predicted_memory(dtype_, store_parts());
  if (sliced_master()) memory[MemoryKind::optimizer] += sliced_.predicted_memory()[MemoryKind::optimizer];
  for (int block = 0; block < blocks(); ++block) {
    memory[MemoryKind::optimizer] +=
        optimizer_bytes(options_, count(block), dtype_, static_cast<std::int64_t>(at(block).params.size()));
  }
  return memory;
}

CommCounts StageShards::predicted_traffic() const {
  CommCounts counts = gradients_->predicted_comm();
  for (int block = 0; distributed() && block < blocks(); ++block) {
    counts["dp.all_gather"].calls += 1;
    counts["dp.all_gather"].bytes += ring_bytes("all_gather", replica_.size, at(block).elements * size_of(dtype_));
  }
  return counts;
}

Tensor StageShards::weights(int block) const {
  return sliced_master() ? sliced_.weights(block) : part_.store.weights().range(begin(block), count(block));
}

Tensor StageShards::rounded(int block) const {
  return is_half(dtype_) ? part_.store.values().range(begin(block), count(block)) : Tensor();
}

std::vector<UpdateSegment> StageShards::segments(int block) const {
  if (distributed()) return map_.segments(part_.store, at(block), replica_.rank, options_.decay_biases_and_norms);
  const std::vector<UpdateSegment> all = part_.store.segments(options_.decay_biases_and_norms);
  std::vector<UpdateSegment> segments;
  for (int param : at(block).params) {
    segments.push_back(all[static_cast<std::size_t>(param)]);
    segments.back().offset -= at(block).offset;
  }
  return segments;
}

void StageShards::gather(bool round) {
  for (int block = 0; round && is_half(dtype_) && block < blocks(); ++block) {
    backend_->copy(rounded(block), weights(block));
  }
  if (!distributed()) return;
  Stream& stream = device_->compute_stream();
  std::vector<Work> works;
  for (int block = 0; block < blocks(); ++block) {
    const Tensor values = part_.store.values();
    works.push_back(replicas_->all_gather(values.range(at(block).offset, at(block).elements),
                                          values.range(begin(block), count(block)), stream));
  }
  for (Work& work : works) work.wait(stream);
}

StageShards::Piece StageShards::known_weights(int index) const {
  const Param& param = part_.store.params()[static_cast<std::size_t>(index)];
  if (!sliced_master()) return {0, part_.store.weights().range(param.offset, param.count)};
  const int home = map_.block_of(index);
  const std::int64_t first = std::clamp(begin(home), param.offset, param.offset + param.count);
  const std::int64_t last = std::clamp(begin(home) + count(home), param.offset, param.offset + param.count);
  return {first - param.offset, last > first ? weights(home).range(first - begin(home), last - first) : Tensor()};
}

}  // namespace pdl
