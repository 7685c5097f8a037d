#include "engine/nn/layers/linear.h"

namespace pdl {

Tensor as_rows(const Tensor& x) { return x.view(Shape{x.elements() / x.shape().back(), x.shape().back()}); }

std::vector<ParamSpec> Linear::param_specs() const {
  std::vector<ParamSpec> specs = {
      {.name = name_ + ".weight", .global_shape = {options_.out, options_.in}, .init = options_.weight_init}};
  if (options_.bias) {
    specs.push_back(
        {.name = name_ + ".bias", .global_shape = {options_.out}, .init = options_.bias_init, .decay = false});
  }
  return specs;
}

Shape Linear::output_shape(const Shape& x) const {
  PDL_CHECK(x.back() == options_.in, name_, " takes ", options_.in, " inputs, not ", x.to_string());
  Shape y = x;
  y[y.rank() - 1] = options_.out;
  return y;
}

std::vector<TensorSpec> Linear::saved_specs(const Shape& x, DType dtype) const {
  if (options_.activation != Activation::gelu_tanh) return {};
  return {{dtype, output_shape(x)}};
}

double Linear::flops(const Shape& x) const {
  return 2.0 * static_cast<double>(x.elements()) * static_cast<double>(options_.out);
}

void Linear::forward(const LayerIo& io) const {
  const Tensor pre_activation = options_.activation == Activation::gelu_tanh ? as_rows(io.saved[0]) : Tensor();
  io.backend.linear_forward(as_rows(io.y), pre_activation, as_rows(io.x), io.params[0],
                            options_.bias ? io.params[1] : Tensor(), options_.activation,
                            io.residual.defined() ? as_rows(io.residual) : Tensor());
}

void Linear::backward(const LayerIo& io) const {
  const Tensor dy = as_rows(io.dy);  // [M, O]
  Tensor dbias = options_.bias ? io.grads[1] : Tensor();
  const bool adds_bias = options_.bias && io.accumulate[1] != 0;
  if (options_.activation != Activation::none) {
    if (!io.dy_is_ahead_of_activation) {
      const Tensor saved = options_.activation == Activation::gelu_tanh ? io.saved[0] : io.y;
      io.backend.activation_backward(dy, dbias, dy, as_rows(saved), options_.activation, adds_bias);
    }
    dbias = Tensor();  // has its gradient
  }
  // The weight gradient comes first, so that its reduction can hide behind the data gradient, and because dx may lie
  // over x.
  io.backend.linear_backward_weight(io.grads[0], dbias, dy, as_rows(io.x), io.accumulate[0] != 0);
  if (options_.bias) io.grad_ready(1);
  io.grad_ready(0);
  if (!io.wants_input_grad) return;
  const InputActivation& input = io.input;
  const Tensor pre_activation = input.activation == Activation::none ? Tensor() : as_rows(input.pre_activation);
  io.backend.linear_backward_data(as_rows(io.dx), input.dbias, dy, io.params[0], pre_activation, input.activation,
                                  input.accumulate);
}

}  // namespace pdl
