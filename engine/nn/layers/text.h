#pragma once
// The ends of a language model, and its attention: token embedding, output head, causal self-attention.

#include "engine/nn/layer_factory.h"

namespace pdl {

/// Token plus position: tokens int32 [B, T] to [B, T, C].
class Embedding final : public Layer {
 public:
  Embedding(std::string name, const EmbeddingOptions& options) : name_(std::move(name)), options_(options) {}
  std::string name() const override { return name_; }
  std::vector<ParamSpec> param_specs() const override;
  Shape output_shape(const Shape& x) const override { return {x[0], x[1], options_.width}; }
  std::vector<TensorSpec> saved_specs(const Shape&, DType) const override { return {}; }
  double flops(const Shape& x) const override { return static_cast<double>(x.elements() * options_.width); }
  void forward(const LayerIo& io) const override;
  void backward(const LayerIo& io) const override;

 private:
  std::string name_;
  EmbeddingOptions options_;
};

/// Causal self-attention of whole heads: qkv [B, T, A 3 D] to [B, T, A D]. How many heads there are follows from x, so
/// the same layer serves a part of them.
class Attention final : public Layer {
 public:
  Attention(std::string name, std::int64_t head_width, double dropout, std::int64_t first_head = 0)
      : name_(std::move(name)), head_width_(head_width), dropout_(dropout), first_head_(first_head) {}
  std::string name() const override { return name_; }
  Shape output_shape(const Shape& x) const override { return {x[0], x[1], x[2] / 3}; }
  /// Log-sum-exp of each row of scores.
  std::vector<TensorSpec> saved_specs(const Shape& x, DType dtype) const override;
  std::int64_t workspace_bytes(const Shape& x, DType dtype, Backend& backend) const override;
  /// Causal: half of the T x T products.
  double flops(const Shape& x) const override;
  void forward(const LayerIo& io) const override;
  void backward(const LayerIo& io) const override;

 private:
  Shape packed(const Shape& x) const { return {x[0], x[1], x[2] / (3 * head_width_), 3, head_width_}; }
  std::string name_;
  std::int64_t head_width_;
  double dropout_;
  std::int64_t first_head_;
};

/// Logits x W^T over a weight tied to the embedding.
class LmHead final : public Layer {
 public:
  LmHead(std::string name, std::int64_t width, std::int64_t vocabulary, std::string tied_to)
      : name_(std::move(name)), width_(width), vocabulary_(vocabulary), tied_to_(std::move(tied_to)) {}
  std::string name() const override { return name_; }
  std::vector<ParamSpec> param_specs() const override;
  Shape output_shape(const Shape& x) const override { return {x[0], x[1], vocabulary_}; }
  std::vector<TensorSpec> saved_specs(const Shape&, DType) const override { return {}; }
  double flops(const Shape& x) const override { return 2.0 * static_cast<double>(x.elements() * vocabulary_); }
  void forward(const LayerIo& io) const override;
  void backward(const LayerIo& io) const override;

 private:
  std::string name_;
  std::int64_t width_, vocabulary_;
  std::string tied_to_;
};

/// Softmax cross-entropy against the micro-batch's targets. In training, forward leaves the gradient in place of the
/// logits.
class SoftmaxCrossEntropy final : public Layer {
 public:
  /// The last axis of the logits is at least `classes`; what is behind them is padding.
  SoftmaxCrossEntropy(std::string name, std::int64_t classes) : name_(std::move(name)), classes_(classes) {}
  std::string name() const override { return name_; }
  Shape output_shape(const Shape&) const override { return {}; }
  /// Loss and correctness of each prediction.
  std::vector<TensorSpec> saved_specs(const Shape& x, DType dtype) const override;
  double flops(const Shape& x) const override { return 5.0 * static_cast<double>(x.elements()); }
  bool input_grad_in_place() const override { return true; }
  void forward(const LayerIo& io) const override;
  void backward(const LayerIo&) const override {}

 private:
  std::string name_;
  std::int64_t classes_;
};

}  // namespace pdl
