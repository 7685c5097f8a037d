#pragma once
// Linear layers that are divided over a tensor-parallel group: by outputs (column) or by inputs (row). A column layer
// and a row layer behind it compute a whole result with one sum.
//
//   column   y_r = activation(x W_r^T + b_r)            W_r [O/t, I], b_r [O/t]: rows of W, entries of b
//            dx = sum over ranks of dy_r W_r            starts before dW_r = dy_r^T x is computed
//   row      y = activation(sum over ranks of x_r W_r^T + b)     W_r [O, I/t]: columns of W; b whole on every rank
//            dx_r = dy W_r, dW_r = dy^T x_r             no communication
//
// With a spread (tensor_group.h) x of the column layer and y of the row layer are this rank's part of them. Gathers and
// reduce-scatters stand in place of the sums: forward a column layer gathers x, and backward once more for dW, while
// dx is computed; so only parts are kept in between. A row layer gathers dy.
//
// The bias of a row layer enters the sum once, on rank 0. Backward all ranks find its gradient, or with a spread parts
// of it: see TensorParallelFactory::is_partial.

#include <string>
#include <vector>

#include "engine/nn/layer_factory.h"
#include "parallel/shard/tensor_group.h"

namespace pdl {

class ColumnLinear final : public Layer {
 public:
  /// `specs`: weight [O, I] and bias [O], if there is one, with the slices that are held here. `group` outlives the
  /// layer.
  ColumnLinear(std::string name, std::vector<ParamSpec> specs, Activation activation, const TensorGroup& group,
               SpreadOver spread);

  std::string name() const override { return name_; }
  std::vector<ParamSpec> param_specs() const override { return specs_; }
  Shape output_shape(const Shape& x) const override;
  /// gelu_tanh keeps its pre-activation.
  std::vector<TensorSpec> saved_specs(const Shape& x, DType dtype) const override;
  std::int64_t workspace_bytes(const Shape& x, DType dtype, Backend& backend) const override;
  double flops(const Shape& x) const override;
  bool repeatable() const override { return false; }
  OutputActivation output_activation() const override { return {activation_, has_bias() ? 1 : -1}; }
  void forward(const LayerIo& io) const override;
  /// dx does not lie over x.
  void backward(const LayerIo& io) const override;

 private:
  struct Scratch;
  Scratch scratch(const LayerIo& io) const;
  bool has_bias() const { return specs_.size() > 1; }

  std::string name_;
  std::vector<ParamSpec> specs_;
  Activation activation_;
  const TensorGroup& group_;
  SpreadOver spread_;
};

class RowLinear final : public Layer {
 public:
  /// `specs`: weight [O, I] with the slice that is held here, and bias [O], if there is one, whole. `group` outlives
  /// the layer. The activation is none or relu.
  RowLinear(std::string name, std::vector<ParamSpec> specs, Activation activation, const TensorGroup& group,
            SpreadOver spread);

  std::string name() const override { return name_; }
  std::vector<ParamSpec> param_specs() const override { return specs_; }
  Shape output_shape(const Shape& x) const override;
  std::vector<TensorSpec> saved_specs(const Shape&, DType) const override { return {}; }
  std::int64_t workspace_bytes(const Shape& x, DType dtype, Backend& backend) const override;
  double flops(const Shape& x) const override;
  bool repeatable() const override { return false; }
  OutputActivation output_activation() const override { return {activation_, has_bias() ? 1 : -1}; }
  bool passes_activation(Activation activation) const override { return activation == Activation::gelu_tanh; }
  void forward(const LayerIo& io) const override;
  /// Leaves dy as it was when there is no activation.
  void backward(const LayerIo& io) const override;

 private:
  struct Scratch;
  Scratch scratch(const LayerIo& io) const;
  bool has_bias() const { return specs_.size() > 1; }
  Shape whole_output(const Shape& x) const;
  void weight_gradient(const LayerIo& io, const Tensor& dy, bool bias_is_done) const;

  std::string name_;
  std::vector<ParamSpec> specs_;
  Activation activation_;
  const TensorGroup& group_;
  SpreadOver spread_;
};

}  // namespace pdl
