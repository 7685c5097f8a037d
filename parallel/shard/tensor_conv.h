#pragma once
// Convolutions that are divided over a tensor-parallel group by output channels (column) or by input channels (row), as
// linear layers are (tensor_linear.h): x and y of the pair are whole on every rank, the map between them [N, H, W, K/t]
// is this rank's channels, on which pooling works as it is.
//
//   column   y_r = activation(conv(x, W_r) + b_r)                    W_r [K/t, R, S, C]
//            dx = sum over ranks, while dW_r is computed
//   row      y = activation(sum over ranks of conv(x_r, W_r) + b)    W_r [K, R, S, C/t]

#include <string>

#include "engine/nn/layers/conv2d.h"
#include "parallel/shard/tensor_group.h"

namespace pdl {

class TensorConv2d final : public Layer {
 public:
  /// `options.split` is column or row; `group` outlives the layer.
  TensorConv2d(std::string name, const ConvOptions& options, const TensorGroup& group);

  std::string name() const override { return part_.name(); }
  std::vector<ParamSpec> param_specs() const override;
  Shape output_shape(const Shape& x) const override { return part_.output_shape(x); }
  std::vector<TensorSpec> saved_specs(const Shape&, DType) const override { return {}; }
  std::int64_t workspace_bytes(const Shape& x, DType dtype, Backend& backend) const override {
    return part_.workspace_bytes(x, dtype, backend);
  }
  double flops(const Shape& x) const override { return part_.flops(x); }
  bool repeatable() const override { return false; }
  OutputActivation output_activation() const override { return {options_.activation, 1}; }
  void forward(const LayerIo& io) const override;
  void backward(const LayerIo& io) const override;

 private:
  bool is_column() const { return options_.split == Split::column; }

  ConvOptions options_;
  Conv2d part_;  ///< the convolution on this rank's channels, as if that were all
  const TensorGroup& group_;
};

}  // namespace pdl
