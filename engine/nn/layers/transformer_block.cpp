#include "engine/nn/layers/transformer_block.h"

#include <algorithm>
#include <cmath>

#include "engine/nn/layers/elementwise.h"
#include "engine/nn/layers/linear.h"

namespace pdl {
namespace {

constexpr std::int64_t kAlignment = 64;
std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// Passes a child's readiness on under the block's numbering.
struct ShiftedReady final : LayerIo::Ready {
  ShiftedReady(LayerIo::Ready* to, int offset) : to_(to), offset_(offset) {}
  void operator()(int i) override {
    if (to_ != nullptr) (*to_)(offset_ + i);
  }
  LayerIo::Ready* to_;
  int offset_;
};

}  // namespace

/// io.saved in words. Sizes in elements per row of x: C = width.
struct TransformerBlock::Saved {
  Tensor ln1, mean1, rstd1;  // [M, C], [M], [M]
  Tensor qkv;                // [B, T, 3C]
  Tensor attended;           // [B, T, C]
  Tensor residual;           // [B, T, C]
  Tensor ln2, mean2, rstd2;  // [M, C], [M], [M]
  Tensor hidden;             // [B, T, 4C]
  std::span<const Tensor> of_attention, of_fc1;
};

TransformerBlock::TransformerBlock(std::string name, const TransformerBlockOptions& options,
                                   const LayerFactory& factory)
    : name_(std::move(name)), options_(options) {
  const std::int64_t width = options.width;
  const InitRule inner = {InitRule::Kind::normal, 0.02};
  // GPT-2 shrinks what is added to the residual stream by the number of additions: two in each layer.
  const InitRule residual = {InitRule::Kind::normal, 0.02 / std::sqrt(2.0 * static_cast<double>(options.layers))};
  const auto linear = [&](const std::string& part, std::int64_t in, std::int64_t out, Split split,
                          Activation activation, const InitRule& init) {
    LinearOptions linear_options;
    linear_options.in = in;
    linear_options.out = out;
    linear_options.split = split;
    linear_options.activation = activation;
    linear_options.weight_init = init;
    return factory.linear(name_ + part, linear_options);
  };
  children_[kQkv] = linear(".attn.c_attn", width, 3 * width, Split::column, Activation::none, inner);
  children_[kAttention] = factory.attention(name_ + ".attn", options.heads, width, options.dropout);
  children_[kProjection] = linear(".attn.c_proj", width, width, Split::row, Activation::none, residual);
  children_[kFc1] = linear(".mlp.c_fc", width, 4 * width, Split::column, Activation::gelu_tanh, inner);
  children_[kFc2] = linear(".mlp.c_proj", 4 * width, width, Split::row, Activation::none, residual);

  int next = 2;  // after ln_1's two
  const auto place = [&](Child child) {
    first_param_[child] = next;
    param_count_[child] = static_cast<int>(children_[child]->param_specs().size());
    next += param_count_[child];
  };
  for (Child child : {kQkv, kAttention, kProjection}) place(child);
  ln2_ = next;
  next += 2;
  for (Child child : {kFc1, kFc2}) place(child);
}

std::vector<ParamSpec> TransformerBlock::param_specs() const {
  std::vector<ParamSpec> specs = layernorm_param_specs(name_ + ".ln_1", options_.width);
  const auto append = [&specs](std::vector<ParamSpec> more) {
    for (ParamSpec& spec : more) specs.push_back(std::move(spec));
  };
  for (Child child : {kQkv, kAttention, kProjection}) append(children_[child]->param_specs());
  append(layernorm_param_specs(name_ + ".ln_2", options_.width));
  for (Child child : {kFc1, kFc2}) append(children_[child]->param_specs());
  return specs;
}

TransformerBlock::Shapes TransformerBlock::shapes(const Shape& x) const {
  Shapes s;
  s.x = x;
  s.rows = {x[0] * x[1]};
  s.qkv = children_[kQkv]->output_shape(x);
  s.heads = children_[kAttention]->output_shape(s.qkv);
  s.hidden = children_[kFc1]->output_shape(x);
  return s;
}

std::vector<TensorSpec> TransformerBlock::saved_specs(const Shape& x, DType dtype) const {
  const Shapes s = shapes(x);
  const TensorSpec rows = {statistics_dtype(dtype), s.rows};
  std::vector<TensorSpec> specs = {{dtype, x}, rows,       rows, {dtype, s.qkv}, {dtype, s.heads},
                                   {dtype, x}, {dtype, x}, rows, rows,           {dtype, s.hidden}};
  for (const TensorSpec& spec : children_[kAttention]->saved_specs(s.qkv, dtype)) specs.push_back(spec);
  for (const TensorSpec& spec : children_[kFc1]->saved_specs(x, dtype)) specs.push_back(spec);
  return specs;
}

TransformerBlock::Saved TransformerBlock::name_saved(const LayerIo& io) const {
  const auto& s = io.saved;
  const std::size_t attention = children_[kAttention]->saved_specs(s[3].shape(), s[3].dtype()).size();
  return {
      s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s.subspan(10, attention), s.subspan(10 + attention)};
}

std::int64_t TransformerBlock::scratch_bytes(const Shapes& s, DType dtype) const {
  // Backward: one gradient of x; then d(hidden), later d(attended) and d(qkv); then one more gradient of x.
  const std::int64_t wide = std::max(s.hidden.elements() * size_of(dtype),
                                     aligned(s.heads.elements() * size_of(dtype)) + s.qkv.elements() * size_of(dtype));
  return 2 * aligned(s.x.elements() * size_of(dtype)) + aligned(wide);
}

std::int64_t TransformerBlock::workspace_bytes(const Shape& x, DType dtype, Backend& backend) const {
  const Shapes s = shapes(x);
  const std::array<Shape, kChildren> inputs = {s.x, s.qkv, s.heads, s.x, s.hidden};
  std::int64_t of_children = 0;
  for (int child = 0; child < kChildren; ++child) {
    const auto i = static_cast<std::size_t>(child);
    of_children = std::max(of_children, children_[i]->workspace_bytes(inputs[i], dtype, backend));
  }
  return scratch_bytes(s, dtype) + of_children;
}

double TransformerBlock::flops(const Shape& x) const {
  const Shapes s = shapes(x);
  return children_[kQkv]->flops(x) + children_[kAttention]->flops(s.qkv) + children_[kProjection]->flops(s.heads) +
         children_[kFc1]->flops(x) + children_[kFc2]->flops(s.hidden);
}

LayerIo TransformerBlock::child_io(const LayerIo& io, Child child, const Tensor& x, const Tensor& y,
                                   std::span<const Tensor> saved) const {
  const auto first = static_cast<std::size_t>(first_param_[child]);
  const auto count = static_cast<std::size_t>(param_count_[child]);
  LayerIo inner = io;
  inner.x = x;
  inner.y = y;
  inner.wants_input_grad = true;
  inner.params = io.params.subspan(first, count);
  if (!io.grads.empty()) {
    inner.grads = io.grads.subspan(first, count);
    inner.accumulate = io.accumulate.subspan(first, count);
  }
  inner.saved = saved;
  const std::int64_t own = scratch_bytes(shapes(io.x.shape()), io.x.dtype());
  inner.workspace = io.workspace.range(own, io.workspace.elements() - own);
  return inner;
}

void TransformerBlock::forward(const LayerIo& io) const {
  const Saved s = name_saved(io);
  Backend& backend = io.backend;
  backend.layernorm_forward(as_rows(s.ln1), s.mean1, s.rstd1, as_rows(io.x), io.params[0], io.params[1]);
  children_[kQkv]->forward(child_io(io, kQkv, s.ln1, s.qkv, {}));
  children_[kAttention]->forward(child_io(io, kAttention, s.qkv, s.attended, s.of_attention));
  children_[kProjection]->forward(child_io(io, kProjection, s.attended, s.residual, {}));
  backend.residual_add(s.residual, io.x, s.residual, io.dropout_key(options_.dropout, 1));

  const auto ln2 = static_cast<std::size_t>(ln2_);
  backend.layernorm_forward(as_rows(s.ln2), s.mean2, s.rstd2, as_rows(s.residual), io.params[ln2], io.params[ln2 + 1]);
  children_[kFc1]->forward(child_io(io, kFc1, s.ln2, s.hidden, s.of_fc1));
  children_[kFc2]->forward(child_io(io, kFc2, s.hidden, io.y, {}));
  backend.residual_add(io.y, s.residual, io.y, io.dropout_key(options_.dropout, 2));
}

void TransformerBlock::run_backward(const LayerIo& io, LayerIo child, Child which, const Tensor& dx,
                                    const Tensor& dy) const {
  ShiftedReady ready(io.ready, first_param_[which]);
  child.ready = &ready;
  child.dx = dx;
  child.dy = dy;
  children_[which]->backward(child);
}

void TransformerBlock::backward(const LayerIo& io) const {
  const Saved s = name_saved(io);
  const Shapes shape = shapes(io.x.shape());
  const DType dtype = io.x.dtype();
  char* const scratch = static_cast<char*>(io.workspace.raw());
  const std::int64_t narrow_bytes = aligned(shape.x.elements() * size_of(dtype));
  const Tensor d_branch(scratch, dtype, shape.x);                           // behind a dropout
  const Tensor d_norm(scratch + narrow_bytes, dtype, shape.x);              // before a norm
  const Tensor d_hidden(scratch + 2 * narrow_bytes, dtype, shape.hidden);   // [B, T, 4C]
  const Tensor d_attended(scratch + 2 * narrow_bytes, dtype, shape.heads);  // [B, T, C], after d_hidden is used up
  const Tensor d_qkv(scratch + 2 * narrow_bytes + aligned(d_attended.bytes()), dtype, shape.qkv);  // [B, T, 3C]
  // Without dropout the branch's gradient is dy itself: a linear layer without activation leaves it intact.
  const auto through_dropout = [&](const Tensor& dy, int place) {
    const DropoutKey key = io.dropout_key(options_.dropout, place);
    if (key.rate == 0.0) return dy;
    io.backend.dropout(d_branch, dy, key);
    return d_branch;
  };

  run_backward(io, child_io(io, kFc2, s.hidden, io.y, {}), kFc2, d_hidden, through_dropout(io.dy, 2));
  run_backward(io, child_io(io, kFc1, s.ln2, s.hidden, s.of_fc1), kFc1, d_norm, d_hidden);
  const auto ln2 = static_cast<std::size_t>(ln2_);
  io.backend.layernorm_backward(as_rows(io.dy), io.grads[ln2], io.grads[ln2 + 1], as_rows(d_norm), as_rows(io.dy),
                                as_rows(s.residual), io.params[ln2], s.mean2, s.rstd2, io.accumulate[ln2] != 0);
  io.grad_ready(ln2_ + 1);
  io.grad_ready(ln2_);

  run_backward(io, child_io(io, kProjection, s.attended, s.residual, {}), kProjection, d_attended,
               through_dropout(io.dy, 1));
  run_backward(io, child_io(io, kAttention, s.qkv, s.attended, s.of_attention), kAttention, d_qkv, d_attended);
  run_backward(io, child_io(io, kQkv, s.ln1, s.qkv, {}), kQkv, d_norm, d_qkv);
  PDL_CHECK(io.wants_input_grad, name_, " is never the first layer");
  io.backend.layernorm_backward(as_rows(io.dx), io.grads[0], io.grads[1], as_rows(d_norm), as_rows(io.dy),
                                as_rows(io.x), io.params[0], s.mean1, s.rstd1, io.accumulate[0] != 0);
  io.grad_ready(1);
  io.grad_ready(0);
}

std::unique_ptr<Layer> make_transformer_block(std::string name, const TransformerBlockOptions& options,
                                              const LayerFactory& factory) {
  return std::make_unique<TransformerBlock>(std::move(name), options, factory);
}

}  // namespace pdl
