#pragma once
// Sums gradients over replicas bucket by bucket while the backward pass still runs: the reducer of PyTorch DDP.
//
//   gradient_ready(p):  copy p's gradient into its slot                       (not with gradient_as_bucket_view)
//                       if that was the bucket's last and all earlier buckets are launched: launch its all-reduce
//   finish():           launch what is left, wait for the buckets in order, copy the sums back
//
// Buckets are launched strictly in index order on every rank, however the gradients arrive, so collectives always
// match.

#include <cstdint>
#include <vector>

#include "engine/nn/layer.h"
#include "parallel/comm/communicator.h"
#include "parallel/sync/bucket_plan.h"

namespace pdl {

struct BucketOptions {
  std::int64_t first_limit_bytes = 1 << 20;
  std::int64_t limit_bytes = 25 << 20;
  bool small_bucket_first =
      true;               ///< which bucket has the first limit after the rebuild: the first or the last to reduce
  bool in_place = false;  ///< reduce inside the gradient range; else through buckets of their own
  bool single_bucket_at_first = true;  ///< one bucket until the arrival order is known
  bool rebuild = true;                 ///< once, in the arrival order of the first reduced backward pass
  bool wait_for_end_at_first = false;  ///< launch nothing before the end of the first backward pass
};

class BucketedAllReduce final : public GradientListener {
 public:
  /// Plans only.
  BucketedAllReduce(const ParamStore& store, Communicator& group, const BucketOptions& options,
                    std::int64_t element_bytes);

  void prepare(Device& device, Backend& backend);
  /// Bytes that `prepare` takes.
  std::int64_t predicted_bytes() const;

  /// Before each backward pass whose gradients are to be reduced. Rebuilds the buckets once the arrival order is known.
  void begin();
  void gradient_ready(int index) override;
  /// After the backward pass; gradients that never became ready are reduced as they stand.
  void finish();

  /// Buckets in force from the second step on (the planned arrival order is reverse registration until one was
  /// observed).
  const std::vector<Bucket>& steady_buckets() const { return steady_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }

 private:
  /// A contiguous piece of the flat gradient range.
  struct Piece {
    std::int64_t offset = 0, count = 0;
  };
  void use(std::vector<Bucket> buckets);
  void launch(std::size_t bucket);
  void launch_complete_buckets();
  std::vector<Bucket> steady_plan(const std::vector<int>& arrival) const;
  void agree_on_arrival();
  std::vector<Piece> pieces_of(const Bucket& bucket) const;
  Tensor slot(int param) const;

  const ParamStore& store_;
  Communicator& group_;
  BucketOptions options_;
  std::int64_t element_bytes_;
  Device* device_ = nullptr;
  Backend* backend_ = nullptr;
  Buffer bucket_memory_, arrival_memory_;
  std::vector<std::int64_t> elements_;  ///< of each parameter
  std::vector<int> reverse_registration_;
  std::vector<Bucket> buckets_, steady_;
  std::vector<int> bucket_of_;             ///< of each parameter
  std::vector<std::int64_t> slot_offset_;  ///< elements, of each parameter's slot in bucket_memory_
  std::vector<int> missing_;               ///< gradients that each bucket still waits for
  std::vector<char> ready_;                ///< of each parameter
  std::size_t next_ = 0;                   ///< first bucket not launched
  std::vector<std::vector<Work>> in_flight_;
  std::vector<int> arrival_;
  bool first_pass_ = true, rebuilt_ = false;
};

}  // namespace pdl
