#include "engine/tensor/shape.h"

namespace pdl {

std::string Shape::to_string() const {
  std::string text = "[";
  for (int axis = 0; axis < rank_; ++axis) text += str(axis == 0 ? "" : ", ", extents_[axis]);
  return text + "]";
}

}  // namespace pdl
