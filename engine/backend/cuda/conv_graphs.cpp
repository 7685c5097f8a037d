#include "engine/backend/cuda/conv_graphs.h"

namespace pdl::cuda {
namespace {

Extents4 image(std::int64_t n, std::int64_t channels, std::int64_t height, std::int64_t width) {
  return {n, channels, height, width};
}

Extents4 x_extents(const ConvSizes& s) { return image(s.n, s.c, s.h, s.w); }
Extents4 w_extents(const ConvSizes& s) { return image(s.k, s.c, s.geometry.kernel, s.geometry.kernel); }
Extents4 y_extents(const ConvSizes& s) { return image(s.n, s.k, s.p, s.q); }

void add_image(CudnnGraph& graph, TensorId id, DType dtype, const Extents4& extents) {
  graph.tensor(id, cudnn_type(dtype), extents, nhwc_strides(extents));
}

}  // namespace

ConvSizes::ConvSizes(const Shape& x, const Shape& weights, Conv2dGeometry conv_geometry)
    : n(x[0]), h(x[1]), w(x[2]), c(x[3]), k(weights[0]), p(0), q(0), geometry(conv_geometry) {
  const std::int64_t kernel = geometry.kernel, stride = geometry.stride, padding = geometry.padding,
                     row_padding = geometry.padded_rows();
  PDL_CHECK(x.rank() == 4 && weights == Shape({k, kernel, kernel, c}), "x ", x.to_string(), ", w ", weights.to_string(),
            ", kernel ", kernel);
  PDL_CHECK(stride >= 1 && padding >= 0 && row_padding >= 0, "stride ", stride, ", padding ", row_padding, " x ",
            padding);
  PDL_CHECK(h + 2 * row_padding >= kernel && w + 2 * padding >= kernel, "kernel ", kernel, " on ", h, " x ", w,
            ", padding ", row_padding, " x ", padding);
  p = (h + 2 * row_padding - kernel) / stride + 1;
  q = (w + 2 * padding - kernel) / stride + 1;
}

ConvSizes ConvSizes::with_channels(std::int64_t in, std::int64_t out) const {
  ConvSizes other = *this;
  other.c = in;
  other.k = out;
  return other;
}

CudnnGraph conv_forward_graph(const ConvSizes& sizes, DType dtype, bool bias, bool relu) {
  const Extents4 y = y_extents(sizes), per_channel = {1, sizes.k, 1, 1};
  CudnnGraph graph;
  add_image(graph, kConvX, dtype, x_extents(sizes));
  add_image(graph, kConvW, dtype, w_extents(sizes));
  add_image(graph, kConvY, dtype, y);
  TensorId last = bias || relu ? graph.between(y, nhwc_strides(y)) : kConvY;
  graph.convolution_forward(last, kConvX, kConvW, sizes.geometry);
  if (bias) {
    add_image(graph, kConvBias, dtype, per_channel);
    const TensorId sum = relu ? graph.between(y, nhwc_strides(y)) : kConvY;
    graph.pointwise(CUDNN_POINTWISE_ADD, sum, last, kConvBias);
    last = sum;
  }
  if (relu) graph.pointwise(CUDNN_POINTWISE_RELU_FWD, kConvY, last);
  return graph;
}

CudnnGraph conv_backward_data_graph(const ConvSizes& sizes, DType dtype) {
  CudnnGraph graph;
  add_image(graph, kConvX, dtype, x_extents(sizes));
  add_image(graph, kConvW, dtype, w_extents(sizes));
  add_image(graph, kConvY, dtype, y_extents(sizes));
  graph.convolution_backward_data(kConvX, kConvY, kConvW, sizes.geometry);
  return graph;
}

CudnnGraph conv_backward_weight_graph(const ConvSizes& sizes, DType dtype) {
  CudnnGraph graph;
  add_image(graph, kConvX, dtype, x_extents(sizes));
  add_image(graph, kConvW, dtype, w_extents(sizes));
  add_image(graph, kConvY, dtype, y_extents(sizes));
  graph.convolution_backward_weight(kConvW, kConvY, kConvX, sizes.geometry);
  return graph;
}

}  // namespace pdl::cuda
