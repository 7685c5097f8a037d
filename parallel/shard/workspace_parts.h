#pragma once
// The parts of a layer's workspace: taken one after another from its start. Without memory it only adds up how much
// they need, so that a layer writes down its parts once.

#include "engine/tensor/tensor.h"

namespace pdl {

class WorkspaceParts {
 public:
  WorkspaceParts() = default;  ///< only counts
  explicit WorkspaceParts(const Tensor& workspace) : memory_(workspace) {}

  Tensor take(DType dtype, const Shape& shape) {
    const Tensor part(memory_.defined() ? static_cast<char*>(memory_.raw()) + bytes_ : nullptr, dtype, shape);
    bytes_ += (part.bytes() + kAlignment - 1) / kAlignment * kAlignment;
    return part;
  }
  std::int64_t bytes() const { return bytes_; }
  /// What no part has taken, uint8.
  Tensor rest() const { return memory_.range(bytes_, memory_.bytes() - bytes_); }

 private:
  static constexpr std::int64_t kAlignment = 64;
  Tensor memory_;
  std::int64_t bytes_ = 0;
};

}  // namespace pdl
