#include "engine/nn/layers/conv2d.h"

namespace pdl {

std::vector<ParamSpec> Conv2d::param_specs() const {
  return {{.name = name_ + ".weight", .global_shape = weight_shape(), .init = options_.weight_init},
          {.name = name_ + ".bias", .global_shape = {options_.out}, .init = options_.bias_init, .decay = false}};
}

Shape Conv2d::output_shape(const Shape& x) const {
  PDL_CHECK(x.rank() == 4 && x[3] == options_.in, name_, " takes [N, H, W, ", options_.in, "], not ", x.to_string());
  const auto extent = [this](std::int64_t in) {
    return (in + 2 * options_.geometry.padding - options_.geometry.kernel) / options_.geometry.stride + 1;
  };
  return {x[0], extent(x[1]), extent(x[2]), options_.out};
}

std::int64_t Conv2d::workspace_bytes(const Shape& x, DType dtype, Backend& backend) const {
  return backend.conv2d_workspace_bytes(x, weight_shape(), options_.geometry, dtype);
}

double Conv2d::flops(const Shape& x) const {
  const auto taps = static_cast<double>(options_.geometry.kernel * options_.geometry.kernel * options_.in);
  return 2.0 * static_cast<double>(output_shape(x).elements()) * taps;
}

void Conv2d::forward(const LayerIo& io) const {
  io.backend.conv2d_forward(io.y, io.x, io.params[0], io.params[1], options_.geometry, options_.activation,
                            io.workspace);
}

void Conv2d::backward(const LayerIo& io) const {
  Tensor dbias = io.grads[1];
  if (options_.activation != Activation::none) {
    if (!io.dy_is_ahead_of_activation) {
      io.backend.activation_backward(io.dy, dbias, io.dy, io.y, options_.activation, io.accumulate[1] != 0);
    }
    dbias = Tensor();  // has its gradient
  }
  io.backend.conv2d_backward_weight(io.grads[0], dbias, io.dy, io.x, options_.geometry, io.accumulate[0] != 0,
                                    io.workspace);
  io.grad_ready(1);
  io.grad_ready(0);
  if (io.wants_input_grad) io.backend.conv2d_backward_data(io.dx, io.dy, io.params[0], options_.geometry, io.workspace);
}

}  // namespace pdl
