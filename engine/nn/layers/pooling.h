#pragma once
// Pooling over images [N, H, W, C], and the step from images to vectors.

#include "engine/nn/layer_factory.h"

namespace pdl {

/// Kernel = stride = k.
class MaxPool final : public Layer {
 public:
  MaxPool(std::string name, std::int64_t kernel) : name_(std::move(name)), kernel_(kernel) {}
  std::string name() const override { return name_; }
  Shape output_shape(const Shape& x) const override { return {x[0], x[1] / kernel_, x[2] / kernel_, x[3]}; }
  /// Where each maximum stood in its window.
  std::vector<TensorSpec> saved_specs(const Shape& x, DType) const override {
    return {{DType::uint8, output_shape(x)}};
  }
  double flops(const Shape& x) const override { return static_cast<double>(x.elements()); }
  /// A maximum tells whether relu let it through: on the way back relu and its bias cost hardly more than the pool.
  bool passes_activation(Activation activation) const override { return activation == Activation::relu; }
  void forward(const LayerIo& io) const override { io.backend.max_pool_forward(io.y, io.saved[0], io.x, kernel_); }
  void backward(const LayerIo& io) const override {
    if (!io.wants_input_grad) return;
    const Tensor y = io.input.activation == Activation::relu ? io.y : Tensor();
    io.backend.max_pool_backward(io.dx, io.input.dbias, io.dy, io.saved[0], y, kernel_, io.input.accumulate);
  }

 private:
  std::string name_;
  std::int64_t kernel_;
};

/// Average pooling to a fixed map.
class AdaptiveAvgPool final : public Layer {
 public:
  AdaptiveAvgPool(std::string name, std::int64_t height, std::int64_t width)
      : name_(std::move(name)), height_(height), width_(width) {}
  std::string name() const override { return name_; }
  Shape output_shape(const Shape& x) const override { return {x[0], height_, width_, x[3]}; }
  std::vector<TensorSpec> saved_specs(const Shape&, DType) const override { return {}; }
  double flops(const Shape& x) const override { return static_cast<double>(x.elements()); }
  void forward(const LayerIo& io) const override { io.backend.adaptive_avg_pool_forward(io.y, io.x); }
  void backward(const LayerIo& io) const override {
    if (io.wants_input_grad) io.backend.adaptive_avg_pool_backward(io.dx, io.dy);
  }

 private:
  std::string name_;
  std::int64_t height_, width_;
};

/// [N, H, W, C] to [N, H W C], a copy: the map is small where images end.
class Flatten final : public Layer {
 public:
  explicit Flatten(std::string name) : name_(std::move(name)) {}
  std::string name() const override { return name_; }
  Shape output_shape(const Shape& x) const override { return {x[0], x.with_first(1).elements()}; }
  std::vector<TensorSpec> saved_specs(const Shape&, DType) const override { return {}; }
  double flops(const Shape&) const override { return 0.0; }
  void forward(const LayerIo& io) const override { io.backend.copy(io.y, io.x.view(io.y.shape())); }
  void backward(const LayerIo& io) const override {
    if (io.wants_input_grad) io.backend.copy(io.dx.view(io.dy.shape()), io.dy);
  }

 private:
  std::string name_;
};

}  // namespace pdl
