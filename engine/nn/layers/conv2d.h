#pragma once
// y = activation(conv(x, W) + b) on images [N, H, W, C].

#include "engine/nn/layer_factory.h"

namespace pdl {

class Conv2d final : public Layer {
 public:
  Conv2d(std::string name, const ConvOptions& options) : name_(std::move(name)), options_(options) {}

  std::string name() const override { return name_; }
  std::vector<ParamSpec> param_specs() const override;
  Shape output_shape(const Shape& x) const override;
  std::vector<TensorSpec> saved_specs(const Shape&, DType) const override { return {}; }
  std::int64_t workspace_bytes(const Shape& x, DType dtype, Backend& backend) const override;
  double flops(const Shape& x) const override;
  OutputActivation output_activation() const override { return {options_.activation, 1}; }
  void forward(const LayerIo& io) const override;
  void backward(const LayerIo& io) const override;

 private:
  Shape weight_shape() const { return {options_.out, options_.geometry.kernel, options_.geometry.kernel, options_.in}; }
  std::string name_;
  ConvOptions options_;
};

}  // namespace pdl
