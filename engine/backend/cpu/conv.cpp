#include <algorithm>

#include "engine/backend/cpu/column_sums.h"
#include "engine/backend/cpu/conv_geometry.h"
#include "engine/backend/cpu/conv_products.h"
#include "engine/backend/cpu/cpu_backend.h"
#include "engine/backend/cpu/loops.h"

namespace pdl {
namespace {

ConvExtents checked_extents(const Tensor& x, const Tensor& w, const Tensor& y, Conv2dGeometry geometry) {
  const ConvExtents e(x.shape(), w.shape(), geometry);
  PDL_CHECK(y.shape() == e.output_shape(), "y ", y.shape().to_string(), ", not ", e.output_shape().to_string());
  PDL_CHECK(x.dtype() == w.dtype() && x.dtype() == y.dtype(), "mixed element types");
  return e;
}

float* checked_workspace(const Tensor& workspace, const ConvExtents& e) {
  const std::int64_t bytes = conv_products::packed_floats(e) * size_of(DType::fp32);
  PDL_CHECK(workspace.defined() && workspace.bytes() >= bytes, "workspace of ", workspace.bytes(), " bytes, not ",
            bytes);
  return static_cast<float*>(workspace.raw());
}

// --- fp64: plain loops over pairs of pixels
// --------------------------------------------------------------------------------

void forward(const ConvExtents& e, double* y, const double* x, const double* w, const double* bias, bool relu) {
#pragma omp parallel for schedule(static) if (e.worth_threads())
  for (std::int64_t line = 0; line < e.n * e.p; ++line) {
    double* const y_line = y + line * e.q * e.k;
    for (std::int64_t i = 0; i < e.q * e.k; ++i) y_line[i] = bias == nullptr ? 0.0 : bias[i % e.k];
    for (std::int64_t tap = 0; tap < e.taps(); ++tap) {
      e.pairs_of_output_line(line, tap, [&](std::int64_t output, std::int64_t input) {
        for (std::int64_t k = 0; k < e.k; ++k) {
          const double *const pixel = x + input * e.c, *const weights = w + (k * e.taps() + tap) * e.c;
          y[output * e.k + k] += lane_sum<double>(e.c, [=](std::int64_t c) { return pixel[c] * weights[c]; });
        }
      });
    }
    for (std::int64_t i = 0; i < e.q * e.k && relu; ++i) y_line[i] = y_line[i] < 0.0 ? 0.0 : y_line[i];
  }
}

void backward_data(const ConvExtents& e, double* dx, const double* dy, const double* w) {
#pragma omp parallel for schedule(static) if (e.worth_threads())
  for (std::int64_t line = 0; line < e.n * e.h; ++line) {
    std::fill_n(dx + line * e.w * e.c, e.w * e.c, 0.0);
    for (std::int64_t tap = 0; tap < e.taps(); ++tap) {
      e.pairs_of_input_line(line, tap, [&](std::int64_t output, std::int64_t input) {
        for (std::int64_t k = 0; k < e.k; ++k) {
          for (std::int64_t c = 0; c < e.c; ++c) {
            dx[input * e.c + c] += dy[output * e.k + k] * w[(k * e.taps() + tap) * e.c + c];
          }
        }
      });
    }
  }
}

void backward_weight(const ConvExtents& e, double* dw, const double* dy, const double* x, bool accumulate) {
#pragma omp parallel for schedule(static) if (e.worth_threads())
  for (std::int64_t k = 0; k < e.k; ++k) {
    if (!accumulate) std::fill_n(dw + k * e.taps() * e.c, e.taps() * e.c, 0.0);
    for (std::int64_t tap = 0; tap < e.taps(); ++tap) {
      for (std::int64_t line = 0; line < e.n * e.p; ++line) {
        e.pairs_of_output_line(line, tap, [&](std::int64_t output, std::int64_t input) {
          for (std::int64_t c = 0; c < e.c; ++c) {
            dw[(k * e.taps() + tap) * e.c + c] += dy[output * e.k + k] * x[input * e.c + c];
          }
        });
      }
    }
  }
}

}  // namespace

void CpuBackend::conv2d_forward(Tensor y, Tensor x, Tensor w, Tensor bias, Conv2dGeometry geometry,
                                Activation activation, Tensor workspace) {
  const ConvExtents e = checked_extents(x, w, y, geometry);
  PDL_CHECK(!bias.defined() || bias.elements() == e.k, "bias ", bias.shape().to_string());
  PDL_CHECK(activation != Activation::gelu_tanh, "convolutions end in relu or in nothing");
  const bool relu = activation == Activation::relu;
  if (x.dtype() == DType::fp64) {
    forward(e, y.data<double>(), x.data<double>(), w.data<double>(), bias.defined() ? bias.data<double>() : nullptr,
            relu);
  } else {
    conv_products::forward(e, y.data<float>(), x.data<float>(), w.data<float>(),
                           bias.defined() ? bias.data<float>() : nullptr, relu, checked_workspace(workspace, e),
                           *scratch_);
  }
}

void CpuBackend::conv2d_backward_data(Tensor dx, Tensor dy, Tensor w, Conv2dGeometry geometry, Tensor workspace) {
  const ConvExtents e = checked_extents(dx, w, dy, geometry);
  if (dx.dtype() == DType::fp64) {
    backward_data(e, dx.data<double>(), dy.data<double>(), w.data<double>());
  } else {
    conv_products::backward_data(e, dx.data<float>(), dy.data<float>(), w.data<float>(),
                                 checked_workspace(workspace, e), *scratch_);
  }
}

void CpuBackend::conv2d_backward_weight(Tensor dw, Tensor dbias, Tensor dy, Tensor x, Conv2dGeometry geometry,
                                        bool accumulate, Tensor) {
  const ConvExtents e = checked_extents(x, dw, dy, geometry);
  PDL_CHECK(!dbias.defined() || dbias.elements() == e.k, "dbias ", dbias.shape().to_string());
  if (x.dtype() == DType::fp64) {
    backward_weight(e, dw.data<double>(), dy.data<double>(), x.data<double>(), accumulate);
  } else {
    conv_products::backward_weight(e, dw.data<float>(), dy.data<float>(), x.data<float>(), accumulate, *scratch_);
  }
  if (!dbias.defined()) return;
  with_float_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    column_sums(dbias.data<T>(), dy.data<T>(), e.n * e.p * e.q, e.k, accumulate);
  });
}

std::int64_t CpuBackend::conv2d_workspace_bytes(const Shape& x, const Shape& w, Conv2dGeometry geometry, DType dtype) {
  return dtype == DType::fp32 ? conv_products::packed_floats(ConvExtents(x, w, geometry)) * size_of(dtype) : 0;
}

}  // namespace pdl
