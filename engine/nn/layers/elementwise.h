#pragma once
// Dropout and layer norm as layers of their own.

#include "engine/nn/layer_factory.h"

namespace pdl {

class Dropout final : public Layer {
 public:
  Dropout(std::string name, double rate) : name_(std::move(name)), rate_(rate) {}
  std::string name() const override { return name_; }
  Shape output_shape(const Shape& x) const override { return x; }
  std::vector<TensorSpec> saved_specs(const Shape&, DType) const override { return {}; }
  double flops(const Shape&) const override { return 0.0; }
  void forward(const LayerIo& io) const override { io.backend.dropout(io.y, io.x, io.dropout_key(rate_, 0)); }
  void backward(const LayerIo& io) const override {
    if (io.wants_input_grad) io.backend.dropout(io.dx, io.dy, io.dropout_key(rate_, 0));
  }

 private:
  std::string name_;
  double rate_;
};

/// The two parameters of a layer norm called `name`.
std::vector<ParamSpec> layernorm_param_specs(const std::string& name, std::int64_t width);

/// Over the last axis.
class LayerNorm final : public Layer {
 public:
  LayerNorm(std::string name, std::int64_t width) : name_(std::move(name)), width_(width) {}
  std::string name() const override { return name_; }
  std::vector<ParamSpec> param_specs() const override { return layernorm_param_specs(name_, width_); }
  Shape output_shape(const Shape& x) const override { return x; }
  /// Mean and reciprocal standard deviation of each row.
  std::vector<TensorSpec> saved_specs(const Shape& x, DType dtype) const override;
  double flops(const Shape& x) const override { return 8.0 * static_cast<double>(x.elements()); }
  void forward(const LayerIo& io) const override;
  void backward(const LayerIo& io) const override;

 private:
  std::string name_;
  std::int64_t width_;
};

}  // namespace pdl
