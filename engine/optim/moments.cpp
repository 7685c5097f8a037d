#include "engine/optim/moments.h"

namespace pdl {

void Moments::allocate(Device& device, std::int64_t elements, DType dtype, std::vector<UpdateSegment> segments) {
  PDL_CHECK(buffers_.empty() && elements_ < 0, "the optimizer has its memory already");
  for (const UpdateSegment& segment : segments) {
    PDL_CHECK(segment.offset >= 0 && segment.count >= 0 && segment.offset + segment.count <= elements, "segment ",
              segment.offset, "+", segment.count, " of ", elements);
  }
  elements_ = elements;
  dtype_ = dtype;
  segments_ = std::move(segments);
  for (int i = 0; i < count_; ++i) {
    buffers_.push_back(device.allocate(elements * size_of(wide_dtype(dtype)), MemoryKind::optimizer));
  }
}

Tensor Moments::operator[](int i) const {
  return buffers_[static_cast<std::size_t>(i)].tensor(wide_dtype(dtype_), Shape{elements_});
}

std::vector<Tensor> Moments::all() const {
  std::vector<Tensor> tensors;
  for (int i = 0; i < count_; ++i) tensors.push_back((*this)[i]);
  return tensors;
}

std::span<const UpdateSegment> Moments::updated_by(const OptimizerStep& step) const {
  PDL_CHECK(step.values.elements() == elements_ && step.grads.elements() == elements_, "an optimizer of ", elements_,
            " elements was given ", step.values.elements(), " values and ", step.grads.elements(), " gradients");
  PDL_CHECK(step.update >= 1, "updates count from 1, got ", step.update);
  const std::int64_t count = step.segment_count < 0 ? segment_count() - step.first_segment : step.segment_count;
  PDL_CHECK(step.first_segment >= 0 && count >= 0 && step.first_segment + count <= segment_count(), "segments ",
            step.first_segment, "+", count, " of ", segment_count());
  return std::span(segments_).subspan(static_cast<std::size_t>(step.first_segment), static_cast<std::size_t>(count));
}

}  // namespace pdl
