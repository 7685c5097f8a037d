#pragma once
// What the update rules share: flat ranges of state beside the weights, and the makers of the rules.

#include <memory>
#include <span>
#include <vector>

#include "engine/optim/optimizer.h"

namespace pdl {

/// `count` zeroed ranges, one element for each weight, and the segments that an update runs over.
class Moments {
 public:
  explicit Moments(int count) : count_(count) {}

  void allocate(Device& device, std::int64_t elements, DType dtype, std::vector<UpdateSegment> segments);
  int count() const { return count_; }
  Tensor operator[](int i) const;
  std::vector<Tensor> all() const;
  std::int64_t segment_count() const { return static_cast<std::int64_t>(segments_.size()); }
  /// The segments that a step updates. Throws when its ranges are not those of `allocate`.
  std::span<const UpdateSegment> updated_by(const OptimizerStep& step) const;

 private:
  int count_;
  std::int64_t elements_ = -1;
  DType dtype_ = DType::fp32;
  std::vector<UpdateSegment> segments_;
  std::vector<Buffer> buffers_;
};

/// The weights that a step starts from.
inline const Tensor& weights_before(const OptimizerStep& step) { return step.from.defined() ? step.from : step.values; }

std::unique_ptr<Optimizer> make_sgd(const OptimizerOptions& options);
/// adam, or adamw when the options say so.
std::unique_ptr<Optimizer> make_adam(const OptimizerOptions& options);
std::unique_ptr<Optimizer> make_lamb(const OptimizerOptions& options);

}  // namespace pdl
