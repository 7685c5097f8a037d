#pragma once
// Layers over horizontal slices of images: the convolution that takes rows from its neighbours, and the step from
// slices of samples to whole samples.

#include <memory>
#include <string>
#include <vector>

#include "engine/nn/layers/conv2d.h"
#include "parallel/comm/communicator.h"

namespace pdl {

/// The ranks that share samples, slice by slice from the top. Layers refer to it; `ranks` is there from `prepare` on.
struct SpatialGroup {
  int rank = 0, size = 1;
  Communicator* ranks = nullptr;
  Stream* stream = nullptr;  ///< on which layers compute
  bool overlap = true;       ///< compute while rows are on their way
};

/// A convolution on the rows of a slice: x [N, H/p, W, C], y [N, H/p, W, K], kernel k odd, stride 1, padding
/// h = (k-1)/2.
///
///   forward     send the first and the last h rows of x, receive the rows above and below (zero outside the image);
///               meanwhile convolve the slice as if it ended in zeros; then the h rows at either end again, over the
///               strip of h received and 2h own rows
///   backward    send and receive rows of dy alike; meanwhile dW and db over own dy and x, the kept rows of the
///               neighbours included, and dX as if dy ended in zeros; then the h rows at either end of dX again
///
/// dW and db are this slice's part of a sum over samples and rows. Computing 2h rows twice costs 2h / (H/p) of the
/// work, and spares a copy of every row that a separate interior would need. Slices of less than 8h rows, where that
/// share is large, wait for the rows of their neighbours and are then convolved in one piece.
class SpatialConv2d final : public Layer {
 public:
  /// `group` outlives the layer.
  SpatialConv2d(std::string name, const ConvOptions& options, const SpatialGroup& group);

  std::string name() const override { return slice_.name(); }
  std::vector<ParamSpec> param_specs() const override { return slice_.param_specs(); }
  Shape output_shape(const Shape& x) const override { return slice_.output_shape(x); }
  /// The neighbours' rows of x: above, below, [N, h, W, C] each.
  std::vector<TensorSpec> saved_specs(const Shape& x, DType dtype) const override;
  std::int64_t workspace_bytes(const Shape& x, DType dtype, Backend& backend) const override;
  double flops(const Shape& x) const override { return slice_.flops(x); }
  bool repeatable() const override { return false; }
  OutputActivation output_activation() const override { return slice_.output_activation(); }
  void forward(const LayerIo& io) const override;
  void backward(const LayerIo& io) const override;

 private:
  struct Room;
  Room room(const Shape& x, const Tensor& workspace, DType dtype) const;
  bool overlaps(const Shape& x) const { return group_.overlap && x[1] >= 8 * halo_; }
  Conv2dGeometry with_row_padding(std::int64_t rows) const;
  Shape with_rows(const Shape& x, std::int64_t rows, std::int64_t channels) const;
  void weight_gradient(const LayerIo& io, const Tensor& dbias, const Room& room) const;

  Conv2d slice_;  ///< the same convolution, of a slice that ends in zeros
  ConvOptions options_;
  std::int64_t halo_;
  const SpatialGroup& group_;
};

/// A layer behind which samples are whole: the ranks exchange their slices, so that rank i has all rows of the samples
/// split_evenly(N, p, i) of the N, and `whole` and all that follows work on those. Backward returns the slices.
class WholeSamples final : public Layer {
 public:
  /// `group` outlives the layer.
  WholeSamples(std::unique_ptr<Layer> whole, const SpatialGroup& group) : whole_(std::move(whole)), group_(group) {}

  std::string name() const override { return whole_->name(); }
  std::vector<ParamSpec> param_specs() const override { return whole_->param_specs(); }
  Shape output_shape(const Shape& x) const override { return whole_->output_shape(whole_input(x)); }
  /// The whole samples, then what the layer keeps.
  std::vector<TensorSpec> saved_specs(const Shape& x, DType dtype) const override;
  std::int64_t workspace_bytes(const Shape& x, DType dtype, Backend& backend) const override;
  double flops(const Shape& x) const override { return whole_->flops(whole_input(x)); }
  bool repeatable() const override { return false; }
  MicroBatch output_batch(const MicroBatch& batch) const override;
  void forward(const LayerIo& io) const override;
  void backward(const LayerIo& io) const override;

 private:
  /// Elements by rank, and the parts of the workspace.
  struct Exchange {
    std::vector<std::int64_t> slices;  ///< this rank's slice of each rank's samples
    std::vector<std::int64_t> own;     ///< each rank's slice of this rank's samples
    Tensor gradient;                   ///< of the whole samples
    Tensor travelling;                 ///< slices of the whole samples, by rank
    Tensor rest;                       ///< uint8: of the layer
  };
  Shape whole_input(const Shape& x) const;
  Exchange exchange(const LayerIo& io) const;
  Tensor slice(const Exchange& exchange, int rank) const;
  LayerIo whole_io(const LayerIo& io, const MicroBatch& batch, const Exchange& exchange) const;

  std::unique_ptr<Layer> whole_;
  const SpatialGroup& group_;
};

}  // namespace pdl
