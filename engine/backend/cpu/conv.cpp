// Convolutions. fp64: plain loops. fp32: oneDNN, wherever its plan serves the operation; else the own kernel of
// conv_products.h, which is faster on small maps (see onednn_conv.cpp) and does everything in a build without oneDNN.
// Bias gradients are column sums of our own.

#include <algorithm>

#include "engine/backend/cpu/column_sums.h"
#include "engine/backend/cpu/conv_geometry.h"
#include "engine/backend/cpu/conv_products.h"
#include "engine/backend/cpu/cpu_backend.h"
#include "engine/backend/cpu/loops.h"
#include "engine/backend/cpu/onednn_library.h"

namespace pdl {
namespace {

ConvExtents checked_extents(const Tensor& x, const Tensor& w, const Tensor& y, Conv2dGeometry geometry) {
  const ConvExtents e(x.shape(), w.shape(), geometry);
  PDL_CHECK(y.shape() == e.output_shape(), "y ", y.shape().to_string(), ", not ", e.output_shape().to_string());
  PDL_CHECK(x.dtype() == w.dtype() && x.dtype() == y.dtype(), "mixed element types");
  return e;
}

// Of the three operations in fp32, as each must find what was planned. Own kernels need room only for packed weights.
std::int64_t workspace_bytes(const ConvExtents& e, const OneDnnConvPlan& plan) {
  const bool packs = !plan.forward || !plan.backward_data;
  return std::max(plan.workspace_bytes, packs ? conv_products::packed_floats(e) * size_of(DType::fp32) : 0);
}

float* checked_workspace(const Tensor& workspace, const ConvExtents& e, const OneDnnConvPlan& plan) {
  const std::int64_t bytes = workspace_bytes(e, plan);
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

// Not left to oneDNN's convolution: its relu turns NaN into 0, and a training that has diverged would not show.
void relu_in_place(float* y, std::int64_t count) {
  parallel_ranges(count, [=](std::int64_t first, std::int64_t last) {
#pragma omp simd
    for (std::int64_t i = first; i < last; ++i) y[i] = y[i] < 0.0f ? 0.0f : y[i];
  });
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
    return;
  }
  const OneDnnConvPlan& plan = onednn_conv_->plan(e);
  float* const room = checked_workspace(workspace, e, plan);
  const float* const bias_values = bias.defined() ? bias.data<float>() : nullptr;
  if (plan.forward) {
    onednn_conv_->forward(e, y.data<float>(), x.data<float>(), w.data<float>(), bias_values, room);
    if (relu) relu_in_place(y.data<float>(), y.elements());
  } else {
    conv_products::forward(e, y.data<float>(), x.data<float>(), w.data<float>(), bias_values, relu, room, *scratch_);
  }
}

void CpuBackend::conv2d_backward_data(Tensor dx, Tensor dy, Tensor w, Conv2dGeometry geometry, Tensor workspace) {
  const ConvExtents e = checked_extents(dx, w, dy, geometry);
  if (dx.dtype() == DType::fp64) {
    backward_data(e, dx.data<double>(), dy.data<double>(), w.data<double>());
    return;
  }
  const OneDnnConvPlan& plan = onednn_conv_->plan(e);
  float* const room = checked_workspace(workspace, e, plan);
  if (plan.backward_data) {
    onednn_conv_->backward_data(e, dx.data<float>(), dy.data<float>(), w.data<float>(), room);
  } else {
    conv_products::backward_data(e, dx.data<float>(), dy.data<float>(), w.data<float>(), room, *scratch_);
  }
}

void CpuBackend::conv2d_backward_weight(Tensor dw, Tensor dbias, Tensor dy, Tensor x, Conv2dGeometry geometry,
                                        bool accumulate, Tensor workspace) {
  const ConvExtents e = checked_extents(x, dw, dy, geometry);
  PDL_CHECK(!dbias.defined() || dbias.elements() == e.k, "dbias ", dbias.shape().to_string());
  if (x.dtype() == DType::fp64) {
    backward_weight(e, dw.data<double>(), dy.data<double>(), x.data<double>(), accumulate);
  } else if (const OneDnnConvPlan& plan = onednn_conv_->plan(e); plan.backward_weight) {
    onednn_conv_->backward_weight(e, dw.data<float>(), dy.data<float>(), x.data<float>(), accumulate,
                                  checked_workspace(workspace, e, plan));
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
  if (dtype != DType::fp32 || x.elements() == 0) return 0;
  const ConvExtents e(x, w, geometry);
  return workspace_bytes(e, onednn_conv_->plan(e));
}

}  // namespace pdl
