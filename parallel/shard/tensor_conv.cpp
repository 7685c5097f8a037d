#include "parallel/shard/tensor_conv.h"

#include <utility>

namespace pdl {
namespace {

ConvOptions part_of_channels(const ConvOptions& whole, int parts) {
  ConvOptions part = whole;
  (whole.split == Split::column ? part.out : part.in) /= parts;
  return part;
}

}  // namespace

TensorConv2d::TensorConv2d(std::string name, const ConvOptions& options, const TensorGroup& group)
    : options_(options), part_(std::move(name), part_of_channels(options, group.size)), group_(group) {
  PDL_CHECK((is_column() ? options.out : options.in) % group.size == 0 && options.split != Split::none, part_.name(),
            " on ", group.size, " ranks");
  PDL_CHECK(options.activation != Activation::gelu_tanh, part_.name(), " keeps no pre-activation");
}

std::vector<ParamSpec> TensorConv2d::param_specs() const {
  std::vector<ParamSpec> specs = Conv2d(part_.name(), options_).param_specs();
  const std::int64_t channels = (is_column() ? options_.out : options_.in) / group_.size;
  const ParamSlice slice = {.axis = is_column() ? 0 : 3, .begin = group_.rank * channels, .count = channels};
  specs[0].slice = slice;
  if (is_column()) specs[1].slice = slice;
  return specs;
}

void TensorConv2d::forward(const LayerIo& io) const {
  if (is_column()) return part_.forward(io);
  const Tensor bias = group_.rank == 0 ? io.params[1] : Tensor();  // it enters the sum once
  io.backend.conv2d_forward(io.y, io.x, io.params[0], bias, options_.geometry, Activation::none, io.workspace);
  begin_sum(group_, io.y).wait(*group_.stream);
  if (options_.activation != Activation::none) io.backend.activation_forward(io.y, io.y, options_.activation);
}

void TensorConv2d::backward(const LayerIo& io) const {
  if (!is_column()) return part_.backward(io);  // dy is whole on every rank, dx this rank's channels
  PDL_CHECK(io.dx.raw() != io.x.raw(), part_.name(), " needs x for as long as dx is on its way");
  Tensor dbias = io.grads[1];
  if (options_.activation != Activation::none) {
    if (!io.dy_is_ahead_of_activation) {
      io.backend.activation_backward(io.dy, dbias, io.dy, io.y, options_.activation, io.accumulate[1] != 0);
    }
    dbias = Tensor();  // has its gradient
  }
  Work sum;
  if (io.wants_input_grad) {
    io.backend.conv2d_backward_data(io.dx, io.dy, io.params[0], options_.geometry, io.workspace);
    sum = begin_sum(group_, io.dx);
  }
  io.backend.conv2d_backward_weight(io.grads[0], dbias, io.dy, io.x, options_.geometry, io.accumulate[0] != 0,
                                    io.workspace);
  io.grad_ready(1);
  io.grad_ready(0);
  sum.wait(*group_.stream);
}

}  // namespace pdl
