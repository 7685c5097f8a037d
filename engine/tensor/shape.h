#pragma once
// Extents of a tensor, and the alphabet in which every shape in this project is written:
//
//   images      N batch, C channels, H height, W width, K output channels, R S kernel height and width
//   text        B batch (sequences), T tokens of a sequence, C model width, A heads, D = C / A, V vocabulary
//   both        M rows of a matrix product (N, or B T), so a linear layer maps [M, I] to [M, O]
//
// Image tensors lie in memory as [N, H, W, C] and convolution weights as [K, R, S, C], on every backend.

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "engine/base/error.h"

namespace pdl {

/// Up to five extents, row-major, the last one fastest. The empty shape has one element's worth of nothing: 0 elements.
class Shape {
 public:
  static constexpr int kMaxRank = 5;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> extents) {
    PDL_CHECK(extents.size() <= kMaxRank, "at most ", kMaxRank, " extents, got ", extents.size());
    for (std::int64_t extent : extents) extents_[rank_++] = extent;
  }

  int rank() const { return rank_; }
  bool empty() const { return rank_ == 0; }
  std::int64_t operator[](int axis) const { return extents_[axis]; }
  std::int64_t& operator[](int axis) { return extents_[axis]; }
  std::int64_t back() const { return extents_[rank_ - 1]; }

  /// Product of the extents; 0 for the empty shape.
  std::int64_t elements() const {
    if (rank_ == 0) return 0;
    std::int64_t count = 1;
    for (int axis = 0; axis < rank_; ++axis) count *= extents_[axis];
    return count;
  }
  /// Elements divided by the first extent: what one sample (or one row) holds.
  std::int64_t elements_per_sample() const { return rank_ == 0 || extents_[0] == 0 ? 0 : elements() / extents_[0]; }
  /// The same shape with another first extent.
  Shape with_first(std::int64_t extent) const {
    Shape copy = *this;
    copy.extents_[0] = extent;
    return copy;
  }

  bool operator==(const Shape& other) const = default;
  /// "[4, 128, 64]".
  std::string to_string() const;

 private:
  std::array<std::int64_t, kMaxRank> extents_{};
  int rank_ = 0;
};

}  // namespace pdl
