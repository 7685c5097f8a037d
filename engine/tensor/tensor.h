#pragma once
// A typed, shaped, contiguous view of memory that somebody else owns. No operators, no gradient, no device logic:
// operations live in `engine/backend`, memory in `engine/device`.

#include "engine/tensor/dtype.h"
#include "engine/tensor/shape.h"

namespace pdl {

/// Copying a Tensor copies the view, never the elements. The view is valid as long as the Buffer it points into.
class Tensor {
 public:
  Tensor() = default;
  Tensor(void* data, DType dtype, Shape shape) : data_(data), shape_(shape), dtype_(dtype) {}

  bool defined() const { return data_ != nullptr; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::int64_t elements() const { return shape_.elements(); }
  std::int64_t bytes() const { return elements() * size_of(dtype_); }
  void* raw() const { return data_; }

  /// Typed pointer; throws when T is not the element type.
  template <typename T>
  T* data() const {
    PDL_CHECK(DTypeOf<T>::value == dtype_, "tensor holds ", name_of(dtype_));
    return static_cast<T*>(data_);
  }

  /// Same memory, another shape with as many elements.
  Tensor view(Shape shape) const {
    PDL_CHECK(shape.elements() == elements(), shape_.to_string(), " viewed as ", shape.to_string());
    return Tensor(data_, dtype_, shape);
  }
  /// Elements [offset, offset + count) of the flattened tensor, as a vector.
  Tensor range(std::int64_t offset, std::int64_t count) const {
    PDL_CHECK(offset >= 0 && count >= 0 && offset + count <= elements(), "range ", offset, "+", count, " of ",
              elements());
    return Tensor(static_cast<char*>(data_) + offset * size_of(dtype_), dtype_, Shape{count});
  }
  /// Entries [first, first + count) along the first axis.
  Tensor rows(std::int64_t first, std::int64_t count) const {
    PDL_CHECK(first >= 0 && count >= 0 && first + count <= shape_[0], "rows ", first, "+", count, " of ", shape_[0]);
    return Tensor(static_cast<char*>(data_) + first * shape_.elements_per_sample() * size_of(dtype_), dtype_,
                  shape_.with_first(count));
  }

 private:
  void* data_ = nullptr;
  Shape shape_;
  DType dtype_ = DType::fp32;
};

/// Shape and element type of a tensor that does not exist yet: what layers answer when asked what they will need.
struct TensorSpec {
  DType dtype = DType::fp32;
  Shape shape;
  std::int64_t bytes() const { return shape.elements() * size_of(dtype); }
};

}  // namespace pdl
