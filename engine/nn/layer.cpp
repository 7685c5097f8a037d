#include "engine/nn/layer.h"

namespace pdl {

DropoutKey LayerIo::dropout_key(double rate, int place) const {
  DropoutKey key;
  key.rate = training ? rate : 0.0;
  key.seed = batch.seed;
  key.update = batch.update.defined() ? batch.update.data<std::int64_t>() : nullptr;
  key.site = static_cast<std::uint32_t>(layer_index * 8 + place);
  key.sample_ids = batch.sample_ids.defined() ? batch.sample_ids.data<std::int64_t>() : nullptr;
  key.samples = batch.size;
  return key;
}

void leave_gradients(const LayerIo& io) {
  for (std::size_t i = io.grads.size(); i-- > 0;) {
    if (io.accumulate[i] == 0) io.backend.fill(io.grads[i], 0.0);
    io.grad_ready(static_cast<int>(i));
  }
}

std::int64_t Layer::workspace_bytes(const Shape&, DType, Backend&) const { return 0; }

}  // namespace pdl
