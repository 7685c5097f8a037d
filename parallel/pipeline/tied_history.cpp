#include "parallel/pipeline/tied_history.h"

#include "engine/base/error.h"

namespace pdl {

void TiedHistory::allocate(Device& device, const TensorSpec& copy) {
  copy_ = copy;
  for (int i = 0; i < length_; ++i) places_.push_back(device.allocate(copy.bytes(), MemoryKind::weight_versions));
}

Tensor TiedHistory::values(std::int64_t version) const {
  PDL_CHECK(version >= 0 && !places_.empty(), "version ", version, " of a tied copy, of which ", places_.size(),
            " are kept");
  return places_[static_cast<std::size_t>(version % length_)].tensor(copy_.dtype, copy_.shape);
}

}  // namespace pdl
