#pragma once
// Which pixels a convolution ties together. Tap (r, s) of the kernel ties output pixel (p, q) to input pixel
// (p stride + r - row_padding, q stride + s - padding), when that lies in the image. The three operations of a
// convolution run over the same pairs of pixels:
//
//   forward            y[output]     += x[input]     w[:, tap, :]^T
//   backward data      dx[input]     += dy[output]   w[:, tap, :]
//   backward weights   dw[:, tap, :] += dy[output]^T x[input]
//
// A pixel is the number of a row of channels: output (n P + p) Q + q, input (n H + h) W + w. A line is n P + p, or n H
// + h.

#include <algorithm>
#include <cstdint>

#include "engine/backend/backend.h"
#include "engine/backend/cpu/gemm.h"

namespace pdl {

/// Extents of x [N, H, W, C], w [K, R, R, C] and y [N, P, Q, K].
struct ConvExtents {
  ConvExtents(const Shape& x, const Shape& weights, Conv2dGeometry geometry)
      : n(x[0]),
        h(x[1]),
        w(x[2]),
        c(x[3]),
        k(weights[0]),
        kernel(geometry.kernel),
        stride(geometry.stride),
        padding(geometry.padding),
        row_padding(geometry.padded_rows()) {
    PDL_CHECK(x.rank() == 4 && weights == Shape({k, kernel, kernel, c}), "x ", x.to_string(), ", w ",
              weights.to_string(), ", kernel ", kernel);
    PDL_CHECK(stride >= 1 && padding >= 0 && row_padding >= 0, "stride ", stride, ", padding ", row_padding, " x ",
              padding);
    PDL_CHECK(h + 2 * row_padding >= kernel && w + 2 * padding >= kernel, "kernel ", kernel, " on ", h, " x ", w,
              ", padding ", row_padding, " x ", padding);
    p = (h + 2 * row_padding - kernel) / stride + 1;
    q = (w + 2 * padding - kernel) / stride + 1;
  }

  std::int64_t taps() const { return kernel * kernel; }
  bool worth_threads() const { return n * p * q * k * taps() * c >= kProductsWorthThreads; }
  Shape output_shape() const { return {n, p, q, k}; }

  /// Calls pair(output, input) for each pair of one tap whose output pixel lies in an output line.
  template <typename Pair>
  void pairs_of_output_line(std::int64_t line, std::int64_t tap, Pair pair) const {
    const std::int64_t row = line % p * stride + tap / kernel - row_padding;
    if (row >= 0 && row < h) pairs_of_lines(line, line / p * h + row, tap % kernel, pair);
  }
  /// The same for the pairs whose input pixel lies in an input line.
  template <typename Pair>
  void pairs_of_input_line(std::int64_t line, std::int64_t tap, Pair pair) const {
    const std::int64_t row = line % h + row_padding - tap / kernel;  // of the output, times stride
    if (row >= 0 && row % stride == 0 && row / stride < p)
      pairs_of_lines(line / h * p + row / stride, line, tap % kernel, pair);
  }

  std::int64_t n, h, w, c, k, kernel, stride, padding, row_padding;
  std::int64_t p = 0, q = 0;

 private:
  template <typename Pair>
  void pairs_of_lines(std::int64_t output_line, std::int64_t input_line, std::int64_t s, Pair pair) const {
    const std::int64_t first = std::max<std::int64_t>(0, (padding - s + stride - 1) / stride);
    for (std::int64_t column = first; column < q && column * stride + s - padding < w; ++column) {
      pair(output_line * q + column, input_line * w + column * stride + s - padding);
    }
  }
};

}  // namespace pdl
