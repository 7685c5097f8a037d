#include "engine/nn/layers/text.h"

#include "engine/nn/layers/linear.h"

namespace pdl {

std::vector<ParamSpec> Embedding::param_specs() const {
  const InitRule init = {InitRule::Kind::normal, options_.init_stddev};
  return {{.name = "wte.weight", .global_shape = {options_.vocabulary, options_.width}, .init = init},
          {.name = "wpe.weight", .global_shape = {options_.positions, options_.width}, .init = init}};
}

void Embedding::forward(const LayerIo& io) const {
  io.backend.embedding_forward(io.y, io.x, io.params[0], io.params[1], 0, io.dropout_key(options_.dropout, 0));
}

void Embedding::backward(const LayerIo& io) const {
  const DropoutKey key = io.dropout_key(options_.dropout, 0);
  if (key.rate > 0.0) io.backend.dropout(io.dy, io.dy, key);
  io.backend.embedding_backward(io.grads[0], io.grads[1], io.dy, io.x, 0, io.accumulate[0] != 0, io.accumulate[1] != 0);
  io.grad_ready(1);
  io.grad_ready(0);
}

std::vector<TensorSpec> Attention::saved_specs(const Shape& x, DType dtype) const {
  const Shape qkv = packed(x);
  return {{wide_dtype(dtype), {qkv[0], qkv[2], qkv[1]}}};
}

std::int64_t Attention::workspace_bytes(const Shape& x, DType dtype, Backend& backend) const {
  return backend.attention_workspace_bytes(packed(x), dtype);
}

double Attention::flops(const Shape& x) const {
  const auto rows = static_cast<double>(x[0] * x[1]);
  return 2.0 * rows * static_cast<double>(x[1]) * static_cast<double>(x[2] / 3);
}

void Attention::forward(const LayerIo& io) const {
  const Shape qkv = packed(io.x.shape());  // [B, T, A, 3, D]
  io.backend.attention_forward(io.y.view({qkv[0], qkv[1], qkv[2], qkv[4]}), io.saved[0], io.x.view(qkv),
                               io.dropout_key(dropout_, 0), first_head_, io.workspace);
}

void Attention::backward(const LayerIo& io) const {
  const Shape qkv = packed(io.x.shape());
  const Shape y = {qkv[0], qkv[1], qkv[2], qkv[4]};
  io.backend.attention_backward(io.dx.view(qkv), io.dy.view(y), io.y.view(y), io.saved[0], io.x.view(qkv),
                                io.dropout_key(dropout_, 0), first_head_, io.workspace);
}

std::vector<ParamSpec> LmHead::param_specs() const {
  return {{.name = name_ + ".weight",
           .global_shape = {vocabulary_, width_},
           .init = {InitRule::Kind::normal, 0.02},
           .tied_to = tied_to_}};
}

void LmHead::forward(const LayerIo& io) const {
  io.backend.linear_forward(as_rows(io.y), Tensor(), as_rows(io.x), io.params[0], Tensor(), Activation::none);
}

void LmHead::backward(const LayerIo& io) const {
  const Tensor dy = as_rows(io.dy);  // [M, V]
  io.backend.linear_backward_weight(io.grads[0], Tensor(), dy, as_rows(io.x), io.accumulate[0] != 0);
  io.grad_ready(0);
  if (io.wants_input_grad) io.backend.linear_backward_data(as_rows(io.dx), dy, io.params[0]);
}

std::vector<TensorSpec> SoftmaxCrossEntropy::saved_specs(const Shape& x, DType dtype) const {
  const TensorSpec rows = {wide_dtype(dtype), {x.elements() / x.back()}};
  return {rows, rows};
}

void SoftmaxCrossEntropy::forward(const LayerIo& io) const {
  const Tensor logits = as_rows(io.x);  // [M, V]
  io.backend.cross_entropy(io.training ? logits : Tensor(), io.saved[0], io.saved[1], logits,
                           io.batch.target.view({io.batch.target.elements()}), classes_, io.batch.gradient_scale);
  io.backend.accumulate_sum(io.batch.metrics.range(0, 1), io.saved[0]);
  io.backend.accumulate_sum(io.batch.metrics.range(1, 1), io.saved[1]);
}

}  // namespace pdl
