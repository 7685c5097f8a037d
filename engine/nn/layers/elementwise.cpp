#include "engine/nn/layers/elementwise.h"

#include "engine/nn/layers/linear.h"

namespace pdl {

std::vector<ParamSpec> layernorm_param_specs(const std::string& name, std::int64_t width) {
  return {{.name = name + ".weight", .global_shape = {width}, .init = {InitRule::Kind::ones}, .decay = false},
          {.name = name + ".bias", .global_shape = {width}, .init = {InitRule::Kind::zeros}, .decay = false}};
}

std::vector<TensorSpec> LayerNorm::saved_specs(const Shape& x, DType dtype) const {
  const TensorSpec rows = {wide_dtype(dtype), {x.elements() / width_}};
  return {rows, rows};
}

void LayerNorm::forward(const LayerIo& io) const {
  io.backend.layernorm_forward(as_rows(io.y), io.saved[0], io.saved[1], as_rows(io.x), io.params[0], io.params[1]);
}

void LayerNorm::backward(const LayerIo& io) const {
  PDL_CHECK(io.wants_input_grad, name_, " is never the first layer");
  io.backend.layernorm_backward(as_rows(io.dx), io.grads[0], io.grads[1], as_rows(io.dy), Tensor(), as_rows(io.x),
                                io.params[0], io.saved[0], io.saved[1], io.accumulate[0] != 0);
  io.grad_ready(1);
  io.grad_ready(0);
}

}  // namespace pdl
