// Activations and dropout, element by element. Loops are declared free of dependences because an output may be its own
// input.

#include <algorithm>
#include <array>
#include <cstddef>

#include "engine/backend/cpu/column_sums.h"
#include "engine/backend/cpu/cpu_backend.h"
#include "engine/backend/cpu/dropout_mask.h"
#include "engine/backend/cpu/gelu.h"
#include "engine/backend/cpu/loops.h"

namespace pdl {
namespace {

void check_alike(const Tensor& y, const Tensor& x, const char* what) {
  PDL_CHECK(y.dtype() == x.dtype() && y.elements() == x.elements(), what, " ", name_of(x.dtype()), " ",
            x.shape().to_string(), " for ", name_of(y.dtype()), " ", y.shape().to_string());
}

// Calls work(first, count, scales) for runs that cover a tensor of so many elements: scales[i] is 0 or 1 / (1 - rate)
// for element first + i of the tensor.
template <typename T, typename Work>
void with_mask(const DropoutKey& key, std::int64_t elements, Work work) {
  const DropoutMask mask(key);
  PDL_CHECK(key.samples > 0 && elements % key.samples == 0, elements, " elements of ", key.samples, " samples");
  PDL_CHECK(key.sample_ids != nullptr, "dropout needs the samples' ids");
  const std::int64_t per_sample = elements / key.samples;
  const bool whole = key.local_width == 0;
  const std::int64_t width = whole ? per_sample : key.local_width;
  const std::int64_t full_width = whole ? per_sample : key.full_width;
  PDL_CHECK(width > 0 && per_sample % width == 0, "rows of ", width, " in samples of ", per_sample);
  PDL_CHECK(whole || (key.first_column >= 0 && key.first_column + width <= full_width), "columns ", key.first_column,
            "+", width, " of ", full_width);

  constexpr std::int64_t kRun = 1024;  // its scales stay in the first-level cache
  const std::int64_t first_column = whole ? 0 : key.first_column;
  const std::int64_t rows = per_sample / width, runs = (width + kRun - 1) / kRun;
  parallel_items(key.samples * rows * runs, std::min(width, kRun), [&](std::int64_t i) {
    const std::int64_t row = i / runs, column = i % runs * kRun;
    const std::int64_t count = std::min(kRun, width - column);
    std::array<T, static_cast<std::size_t>(kRun)> scales;
    mask.fill(scales.data(), key.sample_ids[row / rows], row % rows * full_width + first_column + column, count);
    work(row * width + column, count, scales.data());
  });
}

template <typename T>
void gelu_forward(T* y, const T* x, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = gelu_tanh(x[i]);
}

template <typename T>
void relu_forward(T* y, const T* x, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = x[i] < T{0} ? T{0} : x[i];  // NaN stays
}

template <typename T>
void gelu_backward(T* dx, const T* dy, const T* pre_activation, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) dx[i] = dy[i] * gelu_tanh_derivative(pre_activation[i]);
}

template <typename T>
void relu_backward(T* dx, const T* dy, const T* y, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) dx[i] = y[i] > T{0} ? dy[i] : T{0};
}

}  // namespace

void CpuBackend::activation_forward(Tensor y, Tensor x, Activation activation) {
  check_alike(y, x, "x");
  if (activation == Activation::none) return copy(y, x);
  with_float_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const y_data = y.data<T>();
    const T* const x_data = x.data<T>();
    parallel_ranges(y.elements(), [&](std::int64_t first, std::int64_t last) {
      const auto forward = activation == Activation::relu ? relu_forward<T> : gelu_forward<T>;
      forward(y_data + first, x_data + first, last - first);
    });
  });
}

void CpuBackend::activation_backward(Tensor dx, Tensor dbias, Tensor dy, Tensor saved, Activation activation,
                                     bool accumulate) {
  check_alike(dx, dy, "dy");
  if (activation != Activation::none) check_alike(dx, saved, "saved");
  const std::int64_t columns = dbias.defined() ? dbias.elements() : 1;
  PDL_CHECK(columns > 0 && dx.elements() % columns == 0, "dbias ", dbias.shape().to_string(), " for dx ",
            dx.shape().to_string());
  if (activation == Activation::none) copy(dx, dy);
  with_float_type(dx.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const dx_data = dx.data<T>();
    if (activation != Activation::none) {
      const T *const dy_data = dy.data<T>(), *const saved_data = saved.data<T>();
      parallel_ranges(dx.elements(), [&](std::int64_t first, std::int64_t last) {
        const auto backward = activation == Activation::relu ? relu_backward<T> : gelu_backward<T>;
        backward(dx_data + first, dy_data + first, saved_data + first, last - first);
      });
    }
    if (dbias.defined()) column_sums(dbias.data<T>(), dx_data, dx.elements() / columns, columns, accumulate);
  });
}

void CpuBackend::dropout(Tensor y, Tensor x, const DropoutKey& key) {
  check_alike(y, x, "x");
  if (key.rate == 0.0) return copy(y, x);
  with_float_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const y_data = y.data<T>();
    const T* const x_data = x.data<T>();
    with_mask<T>(key, y.elements(), [&](std::int64_t first, std::int64_t count, const T* scales) {
#pragma omp simd
      for (std::int64_t i = 0; i < count; ++i) y_data[first + i] = x_data[first + i] * scales[i];
    });
  });
}

void CpuBackend::residual_add(Tensor y, Tensor residual, Tensor x, const DropoutKey& key) {
  check_alike(y, residual, "residual");
  check_alike(y, x, "x");
  with_float_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const y_data = y.data<T>();
    const T* const residual_data = residual.data<T>();
    const T* const x_data = x.data<T>();
    if (key.rate == 0.0) {
      parallel_ranges(y.elements(), [&](std::int64_t first, std::int64_t last) {
#pragma omp simd
        for (std::int64_t i = first; i < last; ++i) y_data[i] = residual_data[i] + x_data[i];
      });
      return;
    }
    with_mask<T>(key, y.elements(), [&](std::int64_t first, std::int64_t count, const T* scales) {
#pragma omp simd
      for (std::int64_t i = 0; i < count; ++i)
        y_data[first + i] = residual_data[first + i] + x_data[first + i] * scales[i];
    });
  });
}

}  // namespace pdl
