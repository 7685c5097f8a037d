#pragma once
// A data set of images of which a rank keeps some rows.

#include <algorithm>
#include <memory>

#include "engine/data/dataset.h"

namespace pdl {

/// Rows [first, first + rows) of each image of another set, with its targets.
class ImageRows final : public Dataset {
 public:
  /// `images` outlives this set.
  ImageRows(const Dataset& images, std::int64_t first, std::int64_t rows)
      : images_(images), first_(first), rows_(rows) {}

  DatasetInfo info() const override { return images_.info(); }
  std::int64_t size() const override { return images_.size(); }
  TensorSpec input_spec() const override {
    const TensorSpec whole = images_.input_spec();
    return {whole.dtype, Shape{rows_, whole.shape[1], whole.shape[2]}};
  }
  TensorSpec target_spec() const override { return images_.target_spec(); }
  SampleStaging* staging() const override { return images_.staging(); }
  void read(std::int64_t id, Tensor input, Tensor target) const override {
    const TensorSpec whole = images_.input_spec();
    const auto pixels = std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(whole.shape.elements()));
    images_.read(id, Tensor(pixels.get(), DType::fp32, whole.shape), target);
    const std::int64_t row = whole.shape[1] * whole.shape[2];
    std::copy_n(pixels.get() + first_ * row, rows_ * row, input.data<float>());
  }

 private:
  const Dataset& images_;
  std::int64_t first_, rows_;
};

}  // namespace pdl
