#include "parallel/shard/tensor_linear.h"

#include <optional>
#include <utility>

#include "engine/nn/layers/linear.h"
#include "parallel/shard/workspace_parts.h"

namespace pdl {
namespace {

Shape with_last(Shape shape, std::int64_t extent) {
  shape[shape.rank() - 1] = extent;
  return shape;
}

double products(const Shape& rows, const Shape& weight) {
  return 2.0 * static_cast<double>(rows.elements() / rows.back()) * static_cast<double>(weight.elements());
}

}  // namespace

/// With a spread only.
struct ColumnLinear::Scratch {
  Scratch(WorkspaceParts parts, const Shape& whole_x, DType dtype, bool lines_up)
      : x(parts.take(dtype, whole_x)),
        dx(parts.take(dtype, whole_x)),
        room(lines_up ? parts.take(dtype, whole_x) : Tensor()),
        bytes(parts.bytes()) {}
  Tensor x;     // of all ranks
  Tensor dx;    // this rank's addend, likewise
  Tensor room;  // for parts that lie rank by rank
  std::int64_t bytes;
};

ColumnLinear::ColumnLinear(std::string name, std::vector<ParamSpec> specs, Activation activation,
                           const TensorGroup& group, SpreadOver spread)
    : name_(std::move(name)), specs_(std::move(specs)), activation_(activation), group_(group), spread_(spread) {}

Shape ColumnLinear::output_shape(const Shape& x) const {
  PDL_CHECK(x.back() == specs_[0].global_shape[1], name_, " takes ", specs_[0].global_shape[1], " inputs, not ",
            x.to_string());
  return with_last(whole_of(x, spread_, group_), specs_[0].shape()[0]);
}

std::vector<TensorSpec> ColumnLinear::saved_specs(const Shape& x, DType dtype) const {
  if (activation_ != Activation::gelu_tanh) return {};
  return {{dtype, output_shape(x)}};
}

std::int64_t ColumnLinear::workspace_bytes(const Shape& x, DType dtype, Backend&) const {
  if (spread_ == SpreadOver::none) return 0;
  return Scratch({}, whole_of(x, spread_, group_), dtype, needs_room(outer_of(x, spread_))).bytes;
}

ColumnLinear::Scratch ColumnLinear::scratch(const LayerIo& io) const {
  const Shape& x = io.x.shape();
  return {WorkspaceParts(io.workspace), whole_of(x, spread_, group_), io.x.dtype(), needs_room(outer_of(x, spread_))};
}

double ColumnLinear::flops(const Shape& x) const { return products(whole_of(x, spread_, group_), specs_[0].shape()); }

void ColumnLinear::forward(const LayerIo& io) const {
  Tensor x = io.x;
  if (spread_ != SpreadOver::none) {
    const Scratch s = scratch(io);
    Gather(group_, io.backend, s.x, io.x, outer_of(io.x.shape(), spread_), s.room).finish();
    x = s.x;
  }
  const Tensor pre_activation = activation_ == Activation::gelu_tanh ? as_rows(io.saved[0]) : Tensor();
  io.backend.linear_forward(as_rows(io.y), pre_activation, as_rows(x), io.params[0],
                            has_bias() ? io.params[1] : Tensor(), activation_);
}

void ColumnLinear::backward(const LayerIo& io) const {
  PDL_CHECK(io.dx.raw() != io.x.raw(), name_, " needs x for as long as dx is on its way");
  const Tensor dy = as_rows(io.dy);  // [M, O/t]
  Tensor dbias = has_bias() ? io.grads[1] : Tensor();
  if (activation_ != Activation::none) {
    if (!io.dy_is_ahead_of_activation) {
      const Tensor saved = activation_ == Activation::gelu_tanh ? io.saved[0] : io.y;
      io.backend.activation_backward(dy, dbias, dy, as_rows(saved), activation_, has_bias() && io.accumulate[1] != 0);
    }
    dbias = Tensor();  // has its gradient
  }
  const auto weight_gradient = [&](const Tensor& x) {
    io.backend.linear_backward_weight(io.grads[0], dbias, dy, as_rows(x), io.accumulate[0] != 0);
    if (has_bias()) io.grad_ready(1);
    io.grad_ready(0);
  };
  if (spread_ == SpreadOver::none) {
    Work sum;
    if (io.wants_input_grad) {
      io.backend.linear_backward_data(as_rows(io.dx), dy, io.params[0]);
      sum = begin_sum(group_, io.dx);
    }
    weight_gradient(io.x);
    sum.wait(*group_.stream);
    return;
  }
  const Scratch s = scratch(io);
  const std::int64_t outer = outer_of(io.x.shape(), spread_);
  Gather gather(group_, io.backend, s.x, io.x, outer, s.room);
  if (io.wants_input_grad) io.backend.linear_backward_data(as_rows(s.dx), dy, io.params[0]);
  gather.finish();
  std::optional<ReduceScatter> sum;
  if (io.wants_input_grad) sum.emplace(group_, io.backend, io.dx, s.dx, outer, s.room);
  weight_gradient(s.x);
  if (sum) sum->finish();
}

/// With a spread only.
struct RowLinear::Scratch {
  Scratch(WorkspaceParts parts, const Shape& whole_y, DType dtype, bool lines_up)
      : y(parts.take(dtype, whole_y)), room(lines_up ? parts.take(dtype, whole_y) : Tensor()), bytes(parts.bytes()) {}
  Tensor y;     // forward: this rank's addend of everybody's y; backward: dy of all ranks
  Tensor room;  // for parts that lie rank by rank
  std::int64_t bytes;
};

RowLinear::RowLinear(std::string name, std::vector<ParamSpec> specs, Activation activation, const TensorGroup& group,
                     SpreadOver spread)
    : name_(std::move(name)), specs_(std::move(specs)), activation_(activation), group_(group), spread_(spread) {
  PDL_CHECK(activation != Activation::gelu_tanh, name_, " keeps no pre-activation");
}

Shape RowLinear::whole_output(const Shape& x) const { return with_last(x, specs_[0].global_shape[0]); }

Shape RowLinear::output_shape(const Shape& x) const {
  PDL_CHECK(x.back() == specs_[0].shape()[1], name_, " takes ", specs_[0].shape()[1], " inputs, not ", x.to_string());
  return part_of(whole_output(x), spread_, group_);
}

std::int64_t RowLinear::workspace_bytes(const Shape& x, DType dtype, Backend&) const {
  if (spread_ == SpreadOver::none) return 0;
  return Scratch({}, whole_output(x), dtype, needs_room(outer_of(x, spread_))).bytes;
}

RowLinear::Scratch RowLinear::scratch(const LayerIo& io) const {
  const Shape& x = io.x.shape();
  return {WorkspaceParts(io.workspace), whole_output(x), io.x.dtype(), needs_room(outer_of(x, spread_))};
}

double RowLinear::flops(const Shape& x) const { return products(x, specs_[0].shape()); }

void RowLinear::forward(const LayerIo& io) const {
  const Tensor bias = has_bias() && group_.rank == 0 ? io.params[1] : Tensor();
  const auto multiply = [&](const Tensor& y) {
    io.backend.linear_forward(as_rows(y), Tensor(), as_rows(io.x), io.params[0], bias, Activation::none);
  };
  if (spread_ == SpreadOver::none) {
    multiply(io.y);
    begin_sum(group_, io.y).wait(*group_.stream);
  } else {
    const Scratch s = scratch(io);
    multiply(s.y);
    ReduceScatter(group_, io.backend, io.y, s.y, outer_of(io.y.shape(), spread_), s.room).finish();
  }
  if (activation_ != Activation::none) io.backend.activation_forward(io.y, io.y, activation_);
}

void RowLinear::backward(const LayerIo& io) const {
  if (activation_ != Activation::none && !io.dy_is_ahead_of_activation) {
    io.backend.activation_backward(as_rows(io.dy), has_bias() ? io.grads[1] : Tensor(), as_rows(io.dy), as_rows(io.y),
                                   activation_, has_bias() && io.accumulate[1] != 0);
  }
  Tensor dy = io.dy;  // [.., O], of all ranks
  if (spread_ != SpreadOver::none) {
    const Scratch s = scratch(io);
    Gather(group_, io.backend, s.y, io.dy, outer_of(io.dy.shape(), spread_), s.room).finish();
    dy = s.y;
  }
  weight_gradient(io, as_rows(dy), activation_ != Activation::none);
  if (!io.wants_input_grad) return;
  const InputActivation& input = io.input;
  const Tensor pre_activation = input.activation == Activation::none ? Tensor() : as_rows(input.pre_activation);
  io.backend.linear_backward_data(as_rows(io.dx), input.dbias, as_rows(dy), io.params[0], pre_activation,
                                  input.activation, input.accumulate);
}

/// Before the data gradient, as dx may lie over x. The column sums of everybody's dy are the whole gradient of the
/// bias, so with a spread, where gradients of biases are to be added up, they count on one rank.
void RowLinear::weight_gradient(const LayerIo& io, const Tensor& dy, bool bias_is_done) const {
  Tensor dbias = has_bias() && !bias_is_done ? io.grads[1] : Tensor();
  if (dbias.defined() && spread_ != SpreadOver::none && group_.rank != 0) {
    if (io.accumulate[1] == 0) io.backend.fill(dbias, 0.0);
    dbias = Tensor();
  }
  io.backend.linear_backward_weight(io.grads[0], dbias, dy, as_rows(io.x), io.accumulate[0] != 0);
  if (has_bias()) io.grad_ready(1);
  io.grad_ready(0);
}

}  // namespace pdl
