#pragma once
// The three operations of a convolution as cuDNN graphs. Images lie as [N, H, W, C], weights as [K, R, S, C].

#include "engine/backend/cuda/cudnn_graph.h"

namespace pdl::cuda {

/// Extents of x [N, H, W, C], w [K, R, R, C] and y [N, P, Q, K].
struct ConvSizes {
  ConvSizes(const Shape& x, const Shape& weights, Conv2dGeometry conv_geometry);

  Shape output_shape() const { return {n, p, q, k}; }
  std::int64_t taps() const { return geometry.kernel * geometry.kernel; }
  std::int64_t input_pixels() const { return n * h * w; }
  std::int64_t output_pixels() const { return n * p * q; }
  /// The same convolution between other numbers of channels.
  ConvSizes with_channels(std::int64_t in, std::int64_t out) const;

  std::int64_t n, h, w, c, k, p, q;
  Conv2dGeometry geometry;
};

/// Tensors of these graphs. A gradient goes under the number of what it belongs to.
inline constexpr TensorId kConvX = 1, kConvW = 2, kConvBias = 3, kConvY = 4;

/// y = relu(x * w + bias), each of the two last steps when asked for.
CudnnGraph conv_forward_graph(const ConvSizes& sizes, DType dtype, bool bias, bool relu);
CudnnGraph conv_backward_data_graph(const ConvSizes& sizes, DType dtype);
/// dw in the type of x.
CudnnGraph conv_backward_weight_graph(const ConvSizes& sizes, DType dtype);

}  // namespace pdl::cuda
