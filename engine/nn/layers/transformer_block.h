#pragma once
// The pre-norm GPT-2 block, built from children that a factory makes:
//
//   r = x + dropout(c_proj(attention(c_attn(ln_1(x)))))
//   y = r + dropout(mlp.c_proj(gelu(mlp.c_fc(ln_2(r)))))
//
// A tensor-parallel block is this block with other children. The block fuses what lies between them: residual sums with
// dropout or, where nothing is dropped, into the linear layer in front; and the residual's gradient into the norm's.

#include <array>
#include <memory>

#include "engine/nn/layer_factory.h"

namespace pdl {

/// What the backward pass computes again instead of finding it saved.
enum class Recompute { nothing, gelu, gelu_and_norms };

struct TransformerBlockOptions {
  std::int64_t width = 0, heads = 0,
               layers = 1;  ///< layers of the whole model: scales the init of residual projections
  double dropout = 0.0;
  Recompute recompute = Recompute::nothing;
};

class TransformerBlock final : public Layer {
 public:
  TransformerBlock(std::string name, const TransformerBlockOptions& options, const LayerFactory& factory);

  std::string name() const override { return name_; }
  std::vector<ParamSpec> param_specs() const override;
  Shape output_shape(const Shape& x) const override { return x; }
  std::vector<TensorSpec> saved_specs(const Shape& x, DType dtype) const override;
  std::int64_t workspace_bytes(const Shape& x, DType dtype, Backend& backend) const override;
  double flops(const Shape& x) const override;
  bool is_block() const override { return true; }
  bool repeatable() const override;  ///< when all its children are
  void forward(const LayerIo& io) const override;
  void backward(const LayerIo& io) const override;

 private:
  enum Child { kQkv, kAttention, kProjection, kFc1, kFc2, kChildren };
  /// Shapes of every tensor inside the block for one input shape.
  struct Shapes {
    Shape rows, x, qkv, heads, hidden;
  };
  struct Saved;  ///< names for io.saved

  Shapes shapes(const Shape& x) const;
  struct Scratch;  ///< names for this block's part of io.workspace

  Saved name_saved(const LayerIo& io) const;
  Scratch name_scratch(const LayerIo& io) const;
  bool recomputes_gelu() const { return options_.recompute != Recompute::nothing; }
  bool recomputes_norms() const { return options_.recompute == Recompute::gelu_and_norms; }
  /// The child's view of a call: its own parameters, gradients and saved tensors.
  LayerIo child_io(const LayerIo& io, Child child, const Tensor& x, const Tensor& y,
                   std::span<const Tensor> saved) const;
  /// y = residual + dropout(child(x)); `place` is the dropout's.
  void add_branch(const LayerIo& io, Child child, const Tensor& x, const Tensor& residual, const Tensor& y,
                  int place) const;
  /// The residual's dropout number `place`: its masks are those of whole sequences.
  DropoutKey residual_key(const LayerIo& io, int place) const;
  void run_backward(const LayerIo& io, LayerIo child, Child which, const Tensor& dx, const Tensor& dy) const;
  std::int64_t scratch_bytes(const Shapes& s, DType dtype) const;

  std::string name_;
  TransformerBlockOptions options_;
  SequencePart sequence_;
  std::array<std::unique_ptr<Layer>, kChildren> children_;
  std::array<int, kChildren> first_param_{};  ///< of each child, in this block's list
  std::array<int, kChildren> param_count_{};  ///< likewise
  int ln2_ = 0;                               ///< first parameter of the second norm (the first norm's is 0)
};

std::unique_ptr<Layer> make_transformer_block(std::string name, const TransformerBlockOptions& options,
                                              const LayerFactory& factory);

}  // namespace pdl
