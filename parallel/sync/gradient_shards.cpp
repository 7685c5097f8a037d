#include "parallel/sync/gradient_shards.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "parallel/sync/bucket_plan.h"
#include "parallel/sync/lifetime_plan.h"

namespace pdl {

GradientShards::GradientShards(const ParamStore& store, const ShardMap& map, const std::vector<std::vector<int>>& users,
                               int layers, Communicator& group, const GradientShardOptions& options, DType dtype)
    : store_(store),
      map_(map),
      group_(group),
      options_(options),
      wide_(wide_dtype(dtype)),
      whole_(options.whole || group.size() == 1) {
  plan_buckets(users);
  for (const GradientBucket& bucket : buckets_) parts_.push_back(cut(bucket));
  if (buffered()) plan_buffers(layers);
}

/// From the end of the store to its start, since backward passes finish gradients in that order.
void GradientShards::plan_buckets(const std::vector<std::vector<int>>& users) {
  const bool by_block = options_.reduction == ShardReduction::reduce_scatter;
  std::vector<std::int64_t> sizes;
  std::vector<int> order;
  for (std::size_t b = map_.blocks().size(); b-- > 0;) {
    const std::vector<int>& params = map_.blocks()[b].params;
    if (by_block) order.push_back(static_cast<int>(b));
    if (!by_block) order.insert(order.end(), params.rbegin(), params.rend());
  }
  for (const ShardBlock& block : map_.blocks()) {
    if (by_block) sizes.push_back(block.used);
  }
  for (const Param& param : store_.params()) {
    if (!by_block) sizes.push_back(param.count);
  }
  bucket_of_.assign(store_.params().size(), 0);
  int last_layer = std::numeric_limits<int>::max();
  for (const Bucket& planned : fill_buckets(order, sizes, options_.bucket_elements)) {
    GradientBucket bucket;
    std::int64_t begin = map_.elements(), end = 0;
    for (int item : planned.params) {
      const ShardBlock& block = map_.blocks()[static_cast<std::size_t>(by_block ? item : map_.block_of(item))];
      const std::vector<int> params = by_block ? block.params : std::vector<int>{item};
      if (by_block) bucket.blocks.push_back(item);
      for (int index : params) {
        const Param& param = store_.params()[static_cast<std::size_t>(index)];
        begin = std::min(begin, param.offset);
        end = std::max(end, by_block ? block.offset + block.elements : param.offset + param.count);
        // The layer above may form the gradient of a bias.
        bucket.first_layer = std::max(bucket.first_layer, users[static_cast<std::size_t>(index)].back() + 1);
        last_layer = std::min(last_layer, users[static_cast<std::size_t>(index)].front());
        bucket_of_[static_cast<std::size_t>(index)] = static_cast<int>(buckets_.size());
        bucket.params.push_back(index);
      }
    }
    bucket.offset = begin;
    bucket.elements = end - begin;
    bucket.last_layer = last_layer;  // not before the buckets ahead of it
    buckets_.push_back(std::move(bucket));
  }
}

/// Time runs with the backward pass: the last layer is time 0.
void GradientShards::plan_buffers(int layers) {
  const auto time_of = [&](int layer) { return static_cast<std::int64_t>(layers - 1 - layer); };  // -1: ahead of it
  std::vector<Lifetime> lifetimes;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const GradientBucket& bucket = buckets_[b];
    Lifetime lifetime = {.first = time_of(whole_ ? bucket.last_layer : bucket.first_layer),
                         .last = time_of(bucket.last_layer),
                         .size = bucket.elements};
    if (options_.overlap) {  // it is collected when a later one is launched, at the latest after the pass
      const std::size_t later = b + static_cast<std::size_t>(options_.in_flight);
      lifetime.last = later < buckets_.size() ? time_of(buckets_[later].last_layer) : layers;
    } else if (whole_) {  // one after another, after the pass
      lifetime.first = lifetime.last = layers + static_cast<std::int64_t>(b);
    }
    lifetimes.push_back(lifetime);
  }
  buffer_elements_ =
      std::max({place_lifetimes(lifetimes), options_.least_buffer_elements, static_cast<std::int64_t>(group_.size())});
  for (std::size_t b = 0; b < buckets_.size(); ++b) buckets_[b].buffer_offset = lifetimes[b].offset;
}

MemoryByKind GradientShards::predicted_memory() const {
  MemoryByKind memory;
  memory[MemoryKind::gradients] = whole_ ? 0 : map_.shard_elements() * size_of(wide_);
  memory[MemoryKind::communication] = buffer_elements_ * size_of(wide_);
  return memory;
}

CommCounts GradientShards::predicted_comm() const {
  CommCounts counts;
  if (group_.size() == 1) return counts;
  const auto add = [&](const char* operation, std::int64_t elements) {
    CommCount& count = counts[group_.axis() + "." + operation];
    count.calls += 1;
    count.bytes += ring_bytes(operation, group_.size(), elements * size_of(wide_));
  };
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const GradientBucket& bucket = buckets_[b];
    switch (options_.reduction) {
      case ShardReduction::reduce_scatter:
        for (int block : bucket.blocks) {
          add("reduce_scatter", map_.blocks()[static_cast<std::size_t>(block)].elements);
        }
        break;
      case ShardReduction::all_reduce:
        add("all_reduce", bucket.elements);
        break;
      case ShardReduction::reduce:
        for (const Part& part : parts_[b]) add("reduce", part.count);
        break;
    }
  }
  return counts;
}

void GradientShards::prepare(Device& device, Backend& backend) {
  device_ = &device;
  backend_ = &backend;
  const MemoryByKind bytes = predicted_memory();
  if (!whole_) accumulators_ = device.allocate(bytes[MemoryKind::gradients], MemoryKind::gradients);
  if (buffered()) buffers_ = device.allocate(bytes[MemoryKind::communication], MemoryKind::communication);
}

Tensor GradientShards::buffer() const { return buffers_.tensor(wide_, Shape{buffer_elements_}); }

Tensor GradientShards::memory_of(const GradientBucket& bucket) const {
  if (!buffered()) return store_.grads().range(bucket.offset, bucket.elements);
  return buffer().range(bucket.buffer_offset, bucket.elements);
}

Tensor GradientShards::shard() const {
  return whole_ ? store_.grads() : accumulators_.tensor(wide_, Shape{map_.shard_elements()});
}

std::int64_t GradientShards::shard_begin(const ShardBlock& block) const {
  return whole_ ? map_.slice_begin(block, group_.rank()) : block.shard_offset;
}

Tensor GradientShards::destination(const Part& part) const {
  return shard().range(whole_ ? part.begin : part.shard_offset, part.count);
}

std::vector<GradientShards::Part> GradientShards::cut(const GradientBucket& bucket) const {
  std::vector<Part> parts;
  const std::int64_t bucket_end = bucket.offset + bucket.elements;
  for (const ShardBlock& block : map_.blocks()) {
    for (int rank = 0; rank < group_.size(); ++rank) {
      const std::int64_t slice = map_.slice_begin(block, rank);
      const std::int64_t begin = std::max(slice, bucket.offset), end = std::min(slice + block.slice, bucket_end);
      if (begin < end) parts.push_back({rank, begin, end - begin, block.shard_offset + begin - slice});
    }
  }
  return parts;
}

void GradientShards::begin(bool first) {
  first_ = first;
  writing_ = false;
  missing_.clear();
  for (const GradientBucket& bucket : buckets_) missing_.push_back(static_cast<int>(bucket.params.size()));
  ready_.assign(bucket_of_.size(), 0);
  opened_.assign(buckets_.size(), 0);
  next_ = 0;
}

Tensor GradientShards::gradient(int index) {
  if (whole_) return store_.view(store_.grads(), index);
  if (!writing_) collect_all();  // of the pass before
  writing_ = true;
  const Param& param = store_.params()[static_cast<std::size_t>(index)];
  const auto b = static_cast<std::size_t>(bucket_of_[static_cast<std::size_t>(index)]);
  const GradientBucket& bucket = buckets_[b];
  const Tensor memory = memory_of(bucket);
  if (!opened_[b]) {  // what the last user of this memory left in the padding must not be summed
    for (int i : bucket.blocks) {
      const ShardBlock& block = map_.blocks()[static_cast<std::size_t>(i)];
      const std::int64_t padding = block.elements - block.used;
      if (padding > 0) backend_->fill(memory.range(block.offset + block.used - bucket.offset, padding), 0.0);
    }
    opened_[b] = 1;
  }
  return memory.range(param.offset - bucket.offset, param.count).view(param.spec.shape());
}

void GradientShards::gradient_ready(int index) {
  const auto param = static_cast<std::size_t>(index);
  if (group_.size() == 1 || ready_[param]) return;
  ready_[param] = 1;
  --missing_[static_cast<std::size_t>(bucket_of_[param])];
  if (options_.overlap || !whole_) launch_complete();
  group_.progress();
}

void GradientShards::launch_complete() {
  while (next_ < buckets_.size() && missing_[next_] == 0) {
    launch(next_++);
    if (!options_.overlap && buffered()) collect_oldest();
  }
}

void GradientShards::launch(std::size_t index) {
  const GradientBucket& bucket = buckets_[index];
  const auto most = static_cast<std::size_t>(options_.in_flight);
  while (buffered() && flights_.size() >= most) collect_oldest();
  if (whole_ && options_.copies) {
    backend_->copy(memory_of(bucket), store_.grads().range(bucket.offset, bucket.elements));
  }
  Flight flight = {.bucket = index, .works = {}, .adds = !whole_ && !first_, .in_place = !buffered()};
  start(flight);
  flights_.push_back(std::move(flight));
}

void GradientShards::start(Flight& flight) {
  Stream& stream = device_->compute_stream();
  const GradientBucket& bucket = buckets_[flight.bucket];
  const Tensor memory = memory_of(bucket);
  switch (options_.reduction) {
    case ShardReduction::reduce_scatter:
      if (!flight.adds) flight.in_place = true;  // straight to where the sums belong
      for (int index : bucket.blocks) {
        const ShardBlock& block = map_.blocks()[static_cast<std::size_t>(index)];
        const Tensor all = memory.range(block.offset - bucket.offset, block.elements);
        const Tensor own = flight.adds ? all.range(group_.rank() * block.slice, block.slice)
                                       : shard().range(shard_begin(block), block.slice);
        flight.works.push_back(group_.reduce_scatter(own, all, ReduceOp::sum, stream));
      }
      break;
    case ShardReduction::all_reduce:
      flight.works.push_back(group_.all_reduce(memory, ReduceOp::sum, stream));
      break;
    case ShardReduction::reduce:
      for (const Part& part : parts_[flight.bucket]) {
        const Tensor piece = memory.range(part.begin - bucket.offset, part.count);
        flight.works.push_back(group_.reduce(piece, piece, ReduceOp::sum, part.rank, stream));
      }
      break;
  }
}

void GradientShards::collect_oldest() {
  Flight& flight = flights_.front();
  for (Work& work : flight.works) work.wait(device_->compute_stream());
  const GradientBucket& bucket = buckets_[flight.bucket];
  const Tensor memory = memory_of(bucket);
  for (const Part& part : parts_[flight.bucket]) {
    if (flight.in_place || part.rank != group_.rank()) continue;
    const Tensor sums = memory.range(part.begin - bucket.offset, part.count);
    if (flight.adds) {
      backend_->add(destination(part), sums, 1.0);
    } else {
      backend_->copy(destination(part), sums);
    }
  }
  flights_.pop_front();
}

void GradientShards::end_pass() {
  if (group_.size() == 1) return;
  std::fill(missing_.begin(), missing_.end(), 0);
  launch_complete();
}

void GradientShards::collect_all() {
  while (!flights_.empty()) collect_oldest();
}

}  // namespace pdl
