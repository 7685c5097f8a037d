#include "parallel/sync/bucketed_all_reduce.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace pdl {

BucketedAllReduce::BucketedAllReduce(const ParamStore& store, Communicator& group, const BucketOptions& options,
                                     std::int64_t element_bytes)
    : store_(store), group_(group), options_(options), element_bytes_(element_bytes) {
  for (const Param& param : store.params()) elements_.push_back(param.count);
  reverse_registration_.resize(elements_.size());
  std::iota(reverse_registration_.rbegin(), reverse_registration_.rend(), 0);
  steady_ = steady_plan(reverse_registration_);
  const std::int64_t no_limit = std::numeric_limits<std::int64_t>::max();
  use(options_.single_bucket_at_first ? assign_buckets(reverse_registration_, elements_, element_bytes_, {no_limit})
                                      : steady_);
}

std::vector<Bucket> BucketedAllReduce::steady_plan(const std::vector<int>& arrival) const {
  const std::vector<std::int64_t> limits = {options_.first_limit_bytes, options_.limit_bytes};
  if (options_.small_bucket_first) return assign_buckets(arrival, elements_, element_bytes_, limits);
  // The small bucket last: assign from the end of the arrival order, then turn everything round.
  std::vector<Bucket> buckets = assign_buckets({arrival.rbegin(), arrival.rend()}, elements_, element_bytes_, limits);
  for (Bucket& bucket : buckets) std::reverse(bucket.params.begin(), bucket.params.end());
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

std::int64_t BucketedAllReduce::predicted_bytes() const {
  const std::int64_t arrival = static_cast<std::int64_t>(elements_.size()) * size_of(DType::int32);
  return arrival + (options_.in_place ? 0 : store_.elements() * element_bytes_);
}

void BucketedAllReduce::prepare(Device& device, Backend& backend) {
  device_ = &device;
  backend_ = &backend;
  if (!options_.in_place)
    bucket_memory_ = device.allocate(store_.elements() * element_bytes_, MemoryKind::communication);
  arrival_memory_ =
      device.allocate(static_cast<std::int64_t>(elements_.size()) * size_of(DType::int32), MemoryKind::communication);
}

void BucketedAllReduce::use(std::vector<Bucket> buckets) {
  buckets_ = std::move(buckets);
  bucket_of_.assign(elements_.size(), 0);
  slot_offset_.assign(elements_.size(), 0);
  std::int64_t offset = 0;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    for (int param : buckets_[b].params) {
      bucket_of_[static_cast<std::size_t>(param)] = static_cast<int>(b);
      slot_offset_[static_cast<std::size_t>(param)] = offset;
      offset += elements_[static_cast<std::size_t>(param)];
    }
  }
}

void BucketedAllReduce::begin() {
  if (options_.rebuild && !rebuilt_ && !first_pass_) {
    agree_on_arrival();
    steady_ = steady_plan(arrival_);
    use(steady_);
    rebuilt_ = true;
  }
  missing_.clear();
  for (const Bucket& bucket : buckets_) missing_.push_back(static_cast<int>(bucket.params.size()));
  ready_.assign(elements_.size(), 0);
  in_flight_.clear();
  in_flight_.resize(buckets_.size());
  next_ = 0;
}

void BucketedAllReduce::agree_on_arrival() {
  Stream& stream = device_->compute_stream();
  // A rank whose part of a ragged first step was empty saw no arrival: what it has not seen follows in reverse
  // registration.
  std::vector<char> seen(elements_.size(), 0);
  for (int param : arrival_) seen[static_cast<std::size_t>(param)] = 1;
  for (int param : reverse_registration_) {
    if (!seen[static_cast<std::size_t>(param)]) arrival_.push_back(param);
  }
  std::vector<std::int32_t> order(arrival_.begin(), arrival_.end());
  const Tensor shared = arrival_memory_.tensor(DType::int32, Shape{static_cast<std::int64_t>(order.size())});
  device_->copy(shared.raw(), order.data(), shared.bytes(), stream);
  group_.broadcast(shared, 0, stream).wait(stream);
  device_->copy(order.data(), shared.raw(), shared.bytes(), stream);
  stream.synchronize();
  arrival_.assign(order.begin(), order.end());
}

Tensor BucketedAllReduce::slot(int param) const {
  const auto i = static_cast<std::size_t>(param);
  return bucket_memory_.tensor(wide_dtype(store_.dtype()), Shape{store_.elements()})
      .range(slot_offset_[i], elements_[i]);
}

void BucketedAllReduce::gradient_ready(int index) {
  const auto param = static_cast<std::size_t>(index);
  if (ready_[param]) return;
  ready_[param] = 1;
  if (first_pass_) arrival_.push_back(index);
  if (!options_.in_place)
    backend_->copy(slot(index), store_.grads().range(store_.params()[param].offset, elements_[param]));
  --missing_[static_cast<std::size_t>(bucket_of_[param])];
  if (!(first_pass_ && options_.wait_for_end_at_first)) launch_complete_buckets();
  group_.progress();
}

void BucketedAllReduce::launch_complete_buckets() {
  while (next_ < buckets_.size() && missing_[next_] == 0) launch(next_++);
}

std::vector<BucketedAllReduce::Piece> BucketedAllReduce::pieces_of(const Bucket& bucket) const {
  if (!options_.in_place) return {{slot_offset_[static_cast<std::size_t>(bucket.params.front())], bucket.elements}};
  std::vector<Piece> pieces;
  for (int param : bucket.params) {
    pieces.push_back(
        {store_.params()[static_cast<std::size_t>(param)].offset, elements_[static_cast<std::size_t>(param)]});
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.offset < b.offset; });
  std::vector<Piece> merged;
  for (const Piece& piece : pieces) {
    if (!merged.empty() && merged.back().offset + merged.back().count == piece.offset) {
      merged.back().count += piece.count;
    } else {
      merged.push_back(piece);
    }
  }
  return merged;
}

void BucketedAllReduce::launch(std::size_t bucket) {
  Stream& stream = device_->compute_stream();
  const Tensor flat =
      options_.in_place ? store_.grads() : bucket_memory_.tensor(wide_dtype(store_.dtype()), Shape{store_.elements()});
  for (const Piece& piece : pieces_of(buckets_[bucket])) {
    in_flight_[bucket].push_back(group_.all_reduce(flat.range(piece.offset, piece.count), ReduceOp::sum, stream));
  }
}

void BucketedAllReduce::finish() {
  for (int param : reverse_registration_) gradient_ready(param);
  launch_complete_buckets();
  Stream& stream = device_->compute_stream();
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    for (Work& work : in_flight_[b]) work.wait(stream);
    if (options_.in_place) continue;
    for (int param : buckets_[b].params) {
      backend_->copy(store_.grads().range(store_.params()[static_cast<std::size_t>(param)].offset,
                                          elements_[static_cast<std::size_t>(param)]),
                     slot(param));
    }
  }
  first_pass_ = false;
}

}  // namespace pdl
