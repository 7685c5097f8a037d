#pragma once
// The ends of a language model whose vocabulary is divided over a tensor-parallel group: rank r has rows
// split_evenly(V, t, r) of the token embedding, of which there may be one more here than there. The head between them
// is a ColumnLinear over the same rows.
//
//   embedding   y = dropout(sum over ranks of (row of wte where this rank has the token, else 0) + wpe)
//               backward rows of dwte from this rank's tokens, dwpe on every rank
//   loss        each rank makes four numbers of each row of its logits (backend.h, cross_entropy_shard), gathers those
//               of all ranks and knows loss, correctness and its part of the gradient: backward sends nothing
//
// Padding behind the classes counts as minus infinity, so the loss depends neither on t nor on how V was padded. Every
// rank has the whole loss in its metrics.
//
// Source: Megatron-LM's vocabulary parallelism, which sends three numbers of each row in three all-reduces instead of
// four in one gather, and knows no correctness.

#include <string>

#include "engine/nn/layer_factory.h"
#include "parallel/shard/tensor_group.h"

namespace pdl {

class VocabularyEmbedding final : public Layer {
 public:
  /// `group` outlives the layer. SpreadOver::none or sequence.
  VocabularyEmbedding(std::string name, const EmbeddingOptions& options, const TensorGroup& group, SpreadOver spread);

  std::string name() const override { return name_; }
  std::vector<ParamSpec> param_specs() const override;
  Shape output_shape(const Shape& x) const override { return part_of(whole_output(x), spread_, group_); }
  std::vector<TensorSpec> saved_specs(const Shape&, DType) const override { return {}; }
  std::int64_t workspace_bytes(const Shape& x, DType dtype, Backend& backend) const override;
  double flops(const Shape& x) const override { return static_cast<double>(x.elements() * options_.width); }
  bool repeatable() const override { return false; }
  void forward(const LayerIo& io) const override;
  void backward(const LayerIo& io) const override;

 private:
  struct Scratch;
  Shape whole_output(const Shape& x) const { return {x[0], x[1], options_.width}; }
  Scratch scratch(const LayerIo& io, DType dtype) const;
  DropoutKey dropout_key(const LayerIo& io, const Shape& y) const;

  std::string name_;
  EmbeddingOptions options_;
  const TensorGroup& group_;
  SpreadOver spread_;
};

/// Softmax cross-entropy of logits [B, T, V_r]. In training, forward leaves the gradient in their place.
class VocabularyLoss final : public Layer {
 public:
  /// `group` outlives the layer.
  VocabularyLoss(std::string name, std::int64_t vocabulary, std::int64_t classes, const TensorGroup& group);

  std::string name() const override { return name_; }
  Shape output_shape(const Shape&) const override { return {}; }
  /// Loss and correctness of each prediction.
  std::vector<TensorSpec> saved_specs(const Shape& x, DType dtype) const override;
  std::int64_t workspace_bytes(const Shape& x, DType dtype, Backend& backend) const override;
  double flops(const Shape& x) const override { return 5.0 * static_cast<double>(x.elements()); }
  bool repeatable() const override { return false; }
  bool input_grad_in_place() const override { return true; }
  void forward(const LayerIo& io) const override;
  void backward(const LayerIo&) const override {}

 private:
  std::string name_;
  std::int64_t first_class_ = 0, classes_ = 0;  ///< here
  const TensorGroup& group_;
};

/// The rows of a vocabulary that a rank has.
ParamSlice vocabulary_slice(std::int64_t vocabulary, const TensorGroup& group);

}  // namespace pdl
