// Linear layers. fp64: plain loops. fp32: oneDNN multiplies and adds the bias, and the activation is a pass of our own,
// as oneDNN's relu turns NaN into 0; a build without oneDNN uses the kernel of gemm.h, with all three in one pass.

#include <algorithm>

#include "engine/backend/cpu/column_sums.h"
#include "engine/backend/cpu/cpu_backend.h"
#include "engine/backend/cpu/gelu.h"
#include "engine/backend/cpu/gemm.h"
#include "engine/backend/cpu/loops.h"
#include "engine/backend/cpu/onednn_library.h"

namespace pdl {
namespace {

struct Extents {
  std::int64_t rows, in, out;  // M, I, O
  bool worth_threads() const { return rows * in * out >= kProductsWorthThreads; }
};

Extents checked_extents(const Tensor& x, const Tensor& w, const Tensor& y) {
  PDL_CHECK(x.shape().rank() == 2 && w.shape().rank() == 2, "x ", x.shape().to_string(), ", w ", w.shape().to_string());
  const Extents e = {x.shape()[0], x.shape()[1], w.shape()[0]};
  PDL_CHECK(w.shape()[1] == e.in, "x ", x.shape().to_string(), " meets w ", w.shape().to_string());
  PDL_CHECK(y.shape() == Shape({e.rows, e.out}), "y ", y.shape().to_string(), " for x ", x.shape().to_string());
  PDL_CHECK(x.dtype() == w.dtype() && x.dtype() == y.dtype(), "mixed element types");
  return e;
}

// Where sums of products go, and what makes y of them. `sums` is y itself or where the pre-activation is kept; it
// receives sums + bias. `bias` and `residual` may be null.
template <typename T>
struct Output {
  // `count` elements of one row: the first one is element `at` of y, in column `column`.
  void finish(std::int64_t at, std::int64_t column, std::int64_t count) const {
    T *const to = y + at, *const from = sums + at;
    if (bias != nullptr) {
#pragma omp simd
      for (std::int64_t j = 0; j < count; ++j) from[j] += bias[column + j];
    }
    if (activation == Activation::relu) {
#pragma omp simd
      for (std::int64_t j = 0; j < count; ++j) to[j] = from[j] < T{0} ? T{0} : from[j];
    } else if (activation == Activation::gelu_tanh) {
#pragma omp simd
      for (std::int64_t j = 0; j < count; ++j) to[j] = gelu_tanh(from[j]);
    } else if (residual != nullptr) {
#pragma omp simd
      for (std::int64_t j = 0; j < count; ++j) to[j] = residual[at + j] + from[j];
    }
  }

  T *y, *sums;
  const T *bias, *residual;
  Activation activation;
};

// --- fp64: plain loops
// -----------------------------------------------------------------------------------------------------

void forward(const Extents& e, const Output<double>& output, const double* x, const double* w, GemmScratch&,
             OneDnnMatmul&) {
#pragma omp parallel for schedule(static) if (e.worth_threads())
  for (std::int64_t m = 0; m < e.rows; ++m) {
    for (std::int64_t o = 0; o < e.out; ++o) {
      output.sums[m * e.out + o] =
          lane_sum<double>(e.in, [&](std::int64_t i) { return x[m * e.in + i] * w[o * e.in + i]; });
    }
    output.finish(m * e.out, 0, e.out);
  }
}

void backward_data(const Extents& e, double* dx, const double* dy, const double* w, GemmScratch&, OneDnnMatmul&) {
#pragma omp parallel for schedule(static) if (e.worth_threads())
  for (std::int64_t m = 0; m < e.rows; ++m) {
    std::fill_n(dx + m * e.in, e.in, 0.0);
    for (std::int64_t o = 0; o < e.out; ++o) {
      for (std::int64_t i = 0; i < e.in; ++i) dx[m * e.in + i] += dy[m * e.out + o] * w[o * e.in + i];
    }
  }
}

void backward_weight(const Extents& e, double* dw, const double* dy, const double* x, bool accumulate, GemmScratch&,
                     OneDnnMatmul&) {
#pragma omp parallel for schedule(static) if (e.worth_threads())
  for (std::int64_t o = 0; o < e.out; ++o) {
    if (!accumulate) std::fill_n(dw + o * e.in, e.in, 0.0);
    for (std::int64_t m = 0; m < e.rows; ++m) {
      for (std::int64_t i = 0; i < e.in; ++i) dw[o * e.in + i] += dy[m * e.out + o] * x[m * e.in + i];
    }
  }
}

// --- fp32: oneDNN, else packed products
// -------------------------------------------------------------------------------------------------

// Calls work(first_row, rows, first_column, columns) for each block of a matrix [rows, columns] of results, on all
// threads.
template <typename Work>
void for_each_block(const Extents& e, std::int64_t rows, std::int64_t columns, const ResultBlocks& block,
                    GemmScratch& scratch, Work work) {
  scratch.reserve();
#pragma omp parallel for collapse(2) schedule(dynamic) if (e.worth_threads())
  for (std::int64_t j = 0; j < columns; j += block.columns) {
    for (std::int64_t i = 0; i < rows; i += block.rows) {
      work(i, std::min(block.rows, rows - i), j, std::min(block.columns, columns - j));
    }
  }
}

void forward(const Extents& e, const Output<float>& output, const float* x, const float* w, GemmScratch& scratch,
             OneDnnMatmul& onednn) {
  if (onednn.forward(e.rows, e.in, e.out, output.sums, x, w, output.bias)) {
    if (output.activation == Activation::none && output.residual == nullptr) return;
    Output<float> biased = output;
    biased.bias = nullptr;
    parallel_items(e.rows, e.out, [&](std::int64_t m) { biased.finish(m * e.out, 0, e.out); });
    return;
  }
  const auto block = [&](std::int64_t first_row, std::int64_t rows, std::int64_t first_column, std::int64_t columns) {
    for (std::int64_t k = 0; k < e.in; k += kDepth) {
      const std::int64_t depth = std::min(kDepth, e.in - k);
      const PackedB b = pack_transposed(scratch.packed(), depth, columns,
                                        [&](std::int64_t j) { return w + (first_column + j) * e.in + k; });
      // Few rows at a time, so that they are still in the cache when the activation comes.
      for (std::int64_t i = first_row; i < first_row + rows; i += kBlockRows) {
        const std::int64_t height = std::min(kBlockRows, first_row + rows - i);
        const auto at = [&](std::int64_t r) { return (i + r) * e.out + first_column; };
        multiply(
            height, depth, b, columns, k > 0, [&](std::int64_t r) { return output.sums + at(r); },
            [&](std::int64_t r) { return x + (i + r) * e.in + k; });
        if (k + depth < e.in) continue;
        for (std::int64_t r = 0; r < height; ++r) output.finish(at(r), first_column, columns);
      }
    }
  };
  for_each_block(e, e.rows, e.out, ResultBlocks::by_columns(e.rows, e.out), scratch, block);
}

void backward_data(const Extents& e, float* dx, const float* dy, const float* w, GemmScratch& scratch,
                   OneDnnMatmul& onednn) {
  if (onednn.backward_data(e.rows, e.in, e.out, dx, dy, w)) return;
  const auto block = [&](std::int64_t first_row, std::int64_t rows, std::int64_t first_column, std::int64_t columns) {
    for (std::int64_t k = 0; k < e.out; k += kDepth) {
      const std::int64_t depth = std::min(kDepth, e.out - k);
      const PackedB b = pack_rows(scratch.packed(), depth, columns,
                                  [&](std::int64_t o) { return w + (k + o) * e.in + first_column; });
      multiply(
          rows, depth, b, columns, k > 0, [&](std::int64_t r) { return dx + (first_row + r) * e.in + first_column; },
          [&](std::int64_t r) { return dy + (first_row + r) * e.out + k; });
    }
  };
  for_each_block(e, e.rows, e.in, ResultBlocks::by_columns(e.rows, e.in), scratch, block);
}

void backward_weight(const Extents& e, float* dw, const float* dy, const float* x, bool accumulate,
                     GemmScratch& scratch, OneDnnMatmul& onednn) {
  if (onednn.backward_weight(e.rows, e.in, e.out, dw, dy, x, accumulate)) return;
  const auto block = [&](std::int64_t first_row, std::int64_t rows, std::int64_t first_column, std::int64_t columns) {
    for (std::int64_t k = 0; k < e.rows; k += kDepth) {
      const std::int64_t depth = std::min(kDepth, e.rows - k);
      const PackedB b = pack_rows(scratch.packed(), depth, columns,
                                  [&](std::int64_t m) { return x + (k + m) * e.in + first_column; });
      multiply_transposed(
          rows, depth, b, columns, accumulate || k > 0, scratch.copied(),
          [&](std::int64_t o) { return dw + (first_row + o) * e.in + first_column; },
          [&](std::int64_t m) { return dy + (k + m) * e.out + first_row; });
    }
  };
  for_each_block(e, e.out, e.in, ResultBlocks::by_rows(e.out, e.in), scratch, block);
}

}  // namespace

void CpuBackend::linear_forward(Tensor y, Tensor pre_activation, Tensor x, Tensor w, Tensor bias, Activation activation,
                                Tensor residual) {
  const Extents e = checked_extents(x, w, y);
  PDL_CHECK(!bias.defined() || bias.elements() == e.out, "bias ", bias.shape().to_string());
  PDL_CHECK(!pre_activation.defined() || pre_activation.shape() == y.shape(), "pre-activation ",
            pre_activation.shape().to_string());
  PDL_CHECK(!residual.defined() || (residual.shape() == y.shape() && activation == Activation::none), "residual ",
            residual.shape().to_string(), " for y ", y.shape().to_string());
  with_float_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const bool keeps_sums = activation == Activation::gelu_tanh && pre_activation.defined();
    const Output<T> output = {.y = y.data<T>(),
                              .sums = keeps_sums ? pre_activation.data<T>() : y.data<T>(),
                              .bias = bias.defined() ? bias.data<T>() : nullptr,
                              .residual = residual.defined() ? residual.data<T>() : nullptr,
                              .activation = activation};
    forward(e, output, x.data<T>(), w.data<T>(), *scratch_, *onednn_matmul_);
  });
}

void CpuBackend::linear_backward_data(Tensor dx, Tensor dbias, Tensor dy, Tensor w, Tensor pre_activation,
                                      Activation activation, bool accumulate) {
  PDL_CHECK(!dbias.defined() || activation != Activation::none, "no activation, so no bias ahead of it");
  const Extents e = checked_extents(dx, w, dy);
  with_float_type(dx.dtype(), [&](auto zero) {
    using T = decltype(zero);
    backward_data(e, dx.data<T>(), dy.data<T>(), w.data<T>(), *scratch_, *onednn_matmul_);
  });
  if (activation != Activation::none) activation_backward(dx, dbias, dx, pre_activation, activation, accumulate);
}

void CpuBackend::linear_backward_weight(Tensor dw, Tensor dbias, Tensor dy, Tensor x, bool accumulate) {
  const Extents e = checked_extents(x, dw, dy);
  PDL_CHECK(!dbias.defined() || dbias.elements() == e.out, "dbias ", dbias.shape().to_string());
  with_float_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    backward_weight(e, dw.data<T>(), dy.data<T>(), x.data<T>(), accumulate, *scratch_, *onednn_matmul_);
    if (dbias.defined()) column_sums(dbias.data<T>(), dy.data<T>(), e.rows, e.out, accumulate);
  });
}

}  // namespace pdl
