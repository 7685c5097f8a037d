#pragma once
// Sums gradients over ranks bucket by bucket and leaves each rank the sums of its slices.
//
//   gradient_ready(p):  if p's bucket is complete and all later ones are launched: launch it
//   launch(bucket):     collect the oldest bucket in flight when there are as many as there may be
//                       reduce-scatter each of its blocks; or all-reduce it; or reduce each rank's part to that rank
//   collect(bucket):    wait for it, take this rank's part out of its buffer
//
// Where gradients are:
//   whole      in the store's range, where micro-batches add up; buckets are parts of it, reduced in place, or are
//              copied into buffers and back
//   in buckets each backward pass writes them into buffers that are free again once reduced; the sums are added to
//              accumulators of this rank's slices. Nobody ever holds all gradients.
//
// Buckets are launched strictly in one order on every rank, however gradients arrive. Memory is planned beforehand from
// the order of layers: a buffer lives from the first gradient written into it until its bucket is collected.

#include <cstdint>
#include <deque>
#include <vector>

#include "engine/nn/layer.h"
#include "parallel/comm/counting_communicator.h"
#include "parallel/sync/shard_map.h"

namespace pdl {

enum class ShardReduction { reduce_scatter, all_reduce, reduce };

struct GradientShardOptions {
  ShardReduction reduction = ShardReduction::reduce_scatter;
  bool whole = true;             ///< gradients are whole in the store; else in buckets
  bool copies = false;           ///< whole: reduced in buffers instead of in place
  bool overlap = true;           ///< reduced under the backward pass; else after it, or at once when in buckets
  int in_flight = 2;             ///< buckets that are reduced while another one fills
  std::int64_t bucket_elements;  ///< a bucket never exceeds it, unless by being a single parameter or block
  std::int64_t least_buffer_elements = 0;  ///< the buffers take at least so much memory
};

/// A run of parameters in the store that is reduced as a whole.
struct GradientBucket {
  std::vector<int> params, blocks;        ///< blocks: that lie in it, for reduce_scatter
  std::int64_t offset = 0, elements = 0;  ///< in the store
  int first_layer = 0, last_layer = 0;    ///< whose backward pass writes into it first, and after which it is launched
  std::int64_t buffer_offset = 0;         ///< elements
};

class GradientShards final : public GradientListener {
 public:
  /// Plans only. `users[i]` are the layers that use parameter i, in order. On one rank there is nothing to do.
  GradientShards(const ParamStore& store, const ShardMap& map, const std::vector<std::vector<int>>& users, int layers,
                 Communicator& group, const GradientShardOptions& options, DType dtype);

  void prepare(Device& device, Backend& backend);
  /// Bytes that `prepare` takes.
  MemoryByKind predicted_memory() const;

  /// Before each pass whose gradients are to be reduced. `first` of a step: the sums overwrite the accumulators.
  void begin(bool first);
  /// Where the gradient of a parameter is written.
  Tensor gradient(int index);
  void gradient_ready(int index) override;
  /// After the backward pass: launches what is left; gradients that never became ready count as they stand.
  void end_pass();
  /// Before the sums are read: collects what is still in flight.
  void collect_all();

  /// The sums of this rank's slice of block `b` are elements [begin(b), begin(b) + slice) of this range.
  Tensor shard() const;
  std::int64_t shard_begin(const ShardBlock& block) const;
  /// Memory of wide type that is free between steps: an element for each rank at least.
  Tensor spare() const { return whole_ ? store_.grads() : buffer(); }

  /// What one pass sends.
  CommCounts predicted_comm() const;

  /// In the order of launches.
  const std::vector<GradientBucket>& buckets() const { return buckets_; }
  std::int64_t buffer_elements() const { return buffer_elements_; }

 private:
  /// A part of a bucket that belongs to one rank.
  struct Part {
    int rank = 0;
    std::int64_t begin = 0, count = 0;  ///< in the store
    std::int64_t shard_offset = 0;      ///< in that rank's shard
  };
  struct Flight {
    std::size_t bucket = 0;
    std::vector<Work> works;
    bool adds = false, in_place = false;  ///< in_place: the sums are already where they belong
  };
  void plan_buckets(const std::vector<std::vector<int>>& users);
  void plan_buffers(int layers);
  std::vector<Part> cut(const GradientBucket& bucket) const;
  bool buffered() const { return group_.size() > 1 && (!whole_ || options_.copies); }
  Tensor buffer() const;
  Tensor memory_of(const GradientBucket& bucket) const;
  Tensor destination(const Part& part) const;
  void launch_complete();
  void launch(std::size_t index);
  void start(Flight& flight);
  void collect_oldest();

  const ParamStore& store_;
  const ShardMap& map_;
  Communicator& group_;
  GradientShardOptions options_;
  DType wide_;
  bool whole_;
  Device* device_ = nullptr;
  Backend* backend_ = nullptr;
  std::vector<GradientBucket> buckets_;
  std::vector<std::vector<Part>> parts_;  ///< of each bucket, for every rank
  std::vector<int> bucket_of_;            ///< of each parameter
  std::int64_t buffer_elements_ = 0;
  Buffer buffers_, accumulators_;
  std::vector<int> missing_;             ///< gradients that each bucket still waits for
  std::vector<char> ready_, opened_;     ///< of each parameter; of each bucket: written into in this pass
  std::size_t next_ = 0;                 ///< first bucket not launched
  bool first_ = true, writing_ = false;  ///< writing_: this pass has begun to write gradients
  std::deque<Flight> flights_;
};

}  // namespace pdl
