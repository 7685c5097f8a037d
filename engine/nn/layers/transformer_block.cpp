#include "engine/nn/layers/transformer_block.h"

#include <algorithm>
#include <cmath>

#include "engine/nn/layers/elementwise.h"
#include "engine/nn/layers/linear.h"

namespace pdl {
namespace {

constexpr std::int64_t kAlignment = 64;
std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// What the layer of `io` hands on.
InputActivation made_by(const LayerIo& io, const OutputActivation& output, const Tensor& pre_activation) {
  InputActivation input;
  input.activation = output.activation;
  input.pre_activation = pre_activation;
  if (output.bias >= 0) {
    const auto bias = static_cast<std::size_t>(output.bias);
    input.dbias = io.grads[bias];
    input.accumulate = io.accumulate[bias] != 0;
  }
  return input;
}

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

/// io.saved in words, and what is computed again instead, which lies in the workspace. Sizes in elements per row of x:
/// C = width.
struct TransformerBlock::Saved {
  Tensor mean1, rstd1, mean2, rstd2;  // [M]
  Tensor qkv;                         // [B, T, 3C]
  Tensor attended;                    // [B, T, C]
  Tensor residual;                    // [B, T, C]
  Tensor ln1, ln2;                    // [M, C], saved or recomputed
  Tensor hidden;                      // [B, T, 4C], saved or recomputed
  std::span<const Tensor> of_attention, of_fc1;
};

/// Gradients of the backward pass, and what is recomputed. That is inputs of linear layers. A norm lies where a
/// gradient is used up, away from the input gradient of its column layer; the hidden state where the input gradient of
/// its row layer comes to lie, which is written when the layer is done with its input.
struct TransformerBlock::Scratch {
  Tensor d_branch;    // [B, T, C], behind a dropout; then a recomputed norm
  Tensor d_norm;      // [B, T, C], before a norm
  Tensor d_hidden;    // [B, T, 4C]
  Tensor d_attended;  // [B, T, C], over d_hidden once that is used up
  Tensor d_qkv;       // [B, T, 3C], likewise
};

TransformerBlock::TransformerBlock(std::string name, const TransformerBlockOptions& options,
                                   const LayerFactory& factory)
    : name_(std::move(name)), options_(options), sequence_(factory.sequence_part()) {
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
  const TensorSpec rows = {wide_dtype(dtype), s.rows};
  std::vector<TensorSpec> specs = {rows, rows, rows, rows, {dtype, s.qkv}, {dtype, s.heads}, {dtype, x}};
  if (!recomputes_norms()) specs.insert(specs.end(), {{dtype, x}, {dtype, x}});
  if (!recomputes_gelu()) specs.push_back({dtype, s.hidden});
  for (const TensorSpec& spec : children_[kAttention]->saved_specs(s.qkv, dtype)) specs.push_back(spec);
  for (const TensorSpec& spec : children_[kFc1]->saved_specs(x, dtype)) specs.push_back(spec);
  return specs;
}

TransformerBlock::Saved TransformerBlock::name_saved(const LayerIo& io) const {
  const auto& s = io.saved;
  const Scratch scratch = name_scratch(io);
  const std::size_t attention = children_[kAttention]->saved_specs(s[4].shape(), s[4].dtype()).size();
  std::size_t next = 7;
  const Tensor ln1 = recomputes_norms() ? scratch.d_branch : s[next++];
  const Tensor ln2 = recomputes_norms() ? scratch.d_branch : s[next++];
  const Tensor hidden = recomputes_gelu() ? scratch.d_hidden : s[next++];
  return {.mean1 = s[0],
          .rstd1 = s[1],
          .mean2 = s[2],
          .rstd2 = s[3],
          .qkv = s[4],
          .attended = s[5],
          .residual = s[6],
          .ln1 = ln1,
          .ln2 = ln2,
          .hidden = hidden,
          .of_attention = s.subspan(next, attention),
          .of_fc1 = s.subspan(next + attention)};
}

TransformerBlock::Scratch TransformerBlock::name_scratch(const LayerIo& io) const {
  const Shapes shape = shapes(io.x.shape());
  const DType dtype = io.x.dtype();
  char* const base = static_cast<char*>(io.workspace.raw());
  const std::int64_t narrow_bytes = aligned(shape.x.elements() * size_of(dtype));
  char* const wide = base + 2 * narrow_bytes;
  const Tensor d_attended(wide, dtype, shape.heads);
  return {.d_branch = Tensor(base, dtype, shape.x),
          .d_norm = Tensor(base + narrow_bytes, dtype, shape.x),
          .d_hidden = Tensor(wide, dtype, shape.hidden),
          .d_attended = d_attended,
          .d_qkv = Tensor(wide + aligned(d_attended.bytes()), dtype, shape.qkv)};
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

bool TransformerBlock::repeatable() const {
  return std::all_of(children_.begin(), children_.end(), [](const auto& child) { return child->repeatable(); });
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

DropoutKey TransformerBlock::residual_key(const LayerIo& io, int place) const {
  DropoutKey key = io.dropout_key(options_.dropout, place);
  if (sequence_.parts == 1) return key;
  key.local_width = io.x.shape().elements_per_sample();
  key.full_width = sequence_.parts * key.local_width;
  key.first_column = sequence_.index * key.local_width;
  return key;
}

void TransformerBlock::add_branch(const LayerIo& io, Child child, const Tensor& x, const Tensor& residual,
                                  const Tensor& y, int place) const {
  const DropoutKey key = residual_key(io, place);
  LayerIo branch = child_io(io, child, x, y, {});
  const bool at_once = key.rate == 0.0 && children_[child]->adds_residual();
  if (at_once) branch.residual = residual;
  children_[child]->forward(branch);
  if (!at_once) io.backend.residual_add(y, residual, y, key);
}

void TransformerBlock::forward(const LayerIo& io) const {
  const Saved s = name_saved(io);
  Backend& backend = io.backend;
  backend.layernorm_forward(as_rows(s.ln1), s.mean1, s.rstd1, as_rows(io.x), io.params[0], io.params[1]);
  children_[kQkv]->forward(child_io(io, kQkv, s.ln1, s.qkv, {}));
  children_[kAttention]->forward(child_io(io, kAttention, s.qkv, s.attended, s.of_attention));
  add_branch(io, kProjection, s.attended, io.x, s.residual, 1);

  const auto ln2 = static_cast<std::size_t>(ln2_);
  backend.layernorm_forward(as_rows(s.ln2), s.mean2, s.rstd2, as_rows(s.residual), io.params[ln2], io.params[ln2 + 1]);
  children_[kFc1]->forward(child_io(io, kFc1, s.ln2, s.hidden, s.of_fc1));
  add_branch(io, kFc2, s.hidden, s.residual, io.y, 2);
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
  const auto [d_branch, d_norm, d_hidden, d_attended, d_qkv] = name_scratch(io);
  Backend& backend = io.backend;
  // Without dropout the branch's gradient is dy itself: a linear layer without activation leaves it intact.
  const auto through_dropout = [&, branch = d_branch](const Tensor& dy, int place) {
    const DropoutKey key = residual_key(io, place);
    if (key.rate == 0.0) return dy;
    backend.dropout(branch, dy, key);
    return branch;
  };

  const auto ln2 = static_cast<std::size_t>(ln2_);
  if (recomputes_gelu()) backend.activation_forward(s.hidden, s.of_fc1[0], Activation::gelu_tanh);
  // FC2's data gradient goes through FC1's activation, and finds the gradient of its bias, in one operation.
  LayerIo fc2 = child_io(io, kFc2, s.hidden, io.y, {}), fc1 = child_io(io, kFc1, s.ln2, s.hidden, s.of_fc1);
  const OutputActivation hidden = children_[kFc1]->output_activation();
  if (children_[kFc2]->passes_activation(hidden.activation)) {
    fc2.input = made_by(fc1, hidden, s.of_fc1[0]);
    fc1.dy_is_ahead_of_activation = true;
  }
  run_backward(io, fc2, kFc2, d_hidden, through_dropout(io.dy, 2));
  if (recomputes_norms()) {
    backend.layernorm_forward(as_rows(s.ln2), s.mean2, s.rstd2, as_rows(s.residual), io.params[ln2],
                              io.params[ln2 + 1]);
  }
  run_backward(io, fc1, kFc1, d_norm, d_hidden);
  backend.layernorm_backward(as_rows(io.dy), io.grads[ln2], io.grads[ln2 + 1], as_rows(d_norm), as_rows(io.dy),
                             as_rows(s.residual), io.params[ln2], s.mean2, s.rstd2, io.accumulate[ln2] != 0);
  io.grad_ready(ln2_ + 1);
  io.grad_ready(ln2_);

  run_backward(io, child_io(io, kProjection, s.attended, s.residual, {}), kProjection, d_attended,
               through_dropout(io.dy, 1));
  run_backward(io, child_io(io, kAttention, s.qkv, s.attended, s.of_attention), kAttention, d_qkv, d_attended);
  if (recomputes_norms()) {
    backend.layernorm_forward(as_rows(s.ln1), s.mean1, s.rstd1, as_rows(io.x), io.params[0], io.params[1]);
  }
  run_backward(io, child_io(io, kQkv, s.ln1, s.qkv, {}), kQkv, d_norm, d_qkv);
  PDL_CHECK(io.wants_input_grad, name_, " is never the first layer");
  backend.layernorm_backward(as_rows(io.dx), io.grads[0], io.grads[1], as_rows(d_norm), as_rows(io.dy), as_rows(io.x),
                             io.params[0], s.mean1, s.rstd1, io.accumulate[0] != 0);
  io.grad_ready(1);
  io.grad_ready(0);
}

std::unique_ptr<Layer> make_transformer_block(std::string name, const TransformerBlockOptions& options,
                                              const LayerFactory& factory) {
  return std::make_unique<TransformerBlock>(std::move(name), options, factory);
}

}  // namespace pdl
