#include "parallel/pipeline/weight_ring.h"

#include <algorithm>

namespace pdl {

WeightRing::WeightRing(const StagePart& part, int versions, DType dtype)
    : part_(part), slots_(versions), dtype_(dtype) {
  PDL_CHECK(versions > 0, "a ring of ", versions, " versions");
}

std::int64_t WeightRing::predicted_bytes() const { return (slots_ - 1) * part_.store.elements() * size_of(dtype_); }

void WeightRing::allocate(Device& device) {
  for (int slot = 1; slot < slots_; ++slot) {
    others_.push_back(device.allocate(part_.store.elements() * size_of(dtype_), MemoryKind::weight_versions));
  }
}

void WeightRing::restart() {
  first_slot_ = slot_of(newest_);
  newest_ = 0;
}

Tensor WeightRing::values(int version) const {
  PDL_CHECK(version <= newest_ && version > newest_ - slots_, "weights of version ", version,
            " are not there: ", slots_, " versions up to ", newest_, " are");
  return slot(slot_of(version));
}

Tensor WeightRing::slot(int index) const {
  if (index == 0) return part_.store.values();
  return others_[static_cast<std::size_t>(index - 1)].tensor(dtype_, Shape{part_.store.elements()});
}

OptimizerStep WeightRing::step_from(int version) const {
  const Tensor next = slot(slot_of(version + 1));
  OptimizerStep step{.values = next, .grads = part_.store.grads()};
  if (is_half(dtype_)) {
    step.values = part_.store.weights();
    step.rounded = next;
  } else if (slots_ > 1) {
    step.from = slot(slot_of(version));
  }
  return step;
}

void WeightRing::advance() {
  ++newest_;
  ++made_;
}

Tensor WeightRing::weights() const { return is_half(dtype_) ? part_.store.weights() : values(newest_); }

void WeightRing::restored(Backend& backend, int older) {
  made_ = older;
  if (is_half(dtype_)) backend.copy(values(newest_), part_.store.weights());
}

}  // namespace pdl
