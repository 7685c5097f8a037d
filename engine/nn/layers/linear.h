#pragma once
// y = activation(x W^T + b), on the last axis of x.

#include "engine/nn/layer_factory.h"

namespace pdl {

/// x as the matrix [M, I] that linear operations work on.
Tensor as_rows(const Tensor& x);

class Linear final : public Layer {
 public:
  Linear(std::string name, const LinearOptions& options) : name_(std::move(name)), options_(options) {}

  std::string name() const override { return name_; }
  std::vector<ParamSpec> param_specs() const override;
  Shape output_shape(const Shape& x) const override;
  /// gelu_tanh keeps its pre-activation; relu and none keep nothing.
  std::vector<TensorSpec> saved_specs(const Shape& x, DType dtype) const override;
  double flops(const Shape& x) const override;
  bool adds_residual() const override { return options_.activation == Activation::none; }
  /// The pre-activation of gelu_tanh is saved[0].
  OutputActivation output_activation() const override { return {options_.activation, options_.bias ? 1 : -1}; }
  bool passes_activation(Activation activation) const override { return activation == Activation::gelu_tanh; }
  void forward(const LayerIo& io) const override;
  /// Leaves dy as it was when there is no activation.
  void backward(const LayerIo& io) const override;

 private:
  std::string name_;
  LinearOptions options_;
};

}  // namespace pdl
