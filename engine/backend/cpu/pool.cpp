// Pooling of channels-last images: every loop ends in one over channels, which lie side by side.

#include <algorithm>
#include <cstddef>

#include "engine/backend/cpu/column_sums.h"
#include "engine/backend/cpu/cpu_backend.h"
#include "engine/backend/cpu/loops.h"

namespace pdl {
namespace {

// Extents of a pooling from x [N, H, W, C] to y [N, P, Q, C].
struct PoolShape {
  PoolShape(const Shape& x, const Shape& y) : n(x[0]), h(x[1]), w(x[2]), c(x[3]), p(y[1]), q(y[2]) {
    PDL_CHECK(x.rank() == 4 && y.rank() == 4, x.to_string(), " pooled to ", y.to_string());
    PDL_CHECK(y[0] == n && y[3] == c && p > 0 && q > 0, x.to_string(), " pooled to ", y.to_string());
  }
  std::int64_t n, h, w, c, p, q;
};

void check_max_pool(const PoolShape& shape, const Tensor& y, const Tensor& argmax, std::int64_t kernel) {
  PDL_CHECK(kernel >= 1 && kernel <= 16, "kernel ", kernel, ": a position in its window has to fit a byte");
  PDL_CHECK(shape.p == shape.h / kernel && shape.q == shape.w / kernel, "windows of ", kernel, " from ", shape.h, " x ",
            shape.w, " to ", shape.p, " x ", shape.q);
  PDL_CHECK(argmax.dtype() == DType::uint8 && argmax.shape() == y.shape(), "argmax ", argmax.shape().to_string());
}

// One window, all channels: x points at its first corner.
template <typename T>
void max_of_window(T* y, std::uint8_t* argmax, const T* x, const PoolShape& shape, std::int64_t kernel) {
  std::copy_n(x, shape.c, y);
  std::fill_n(argmax, shape.c, std::uint8_t{0});
  for (std::int64_t position = 1; position < kernel * kernel; ++position) {
    const T* candidate = x + (position / kernel * shape.w + position % kernel) * shape.c;
#pragma omp simd
    for (std::int64_t c = 0; c < shape.c; ++c) {
      // A NaN wins and stays: divergence must not hide behind a maximum.
      const bool wins = candidate[c] > y[c] || candidate[c] != candidate[c];
      y[c] = wins ? candidate[c] : y[c];
      argmax[c] = wins ? static_cast<std::uint8_t>(position) : argmax[c];
    }
  }
}

// Where `y` is not null, only maxima above 0 receive a gradient.
template <typename T>
void spread_over_window(T* dx, const T* dy, const std::uint8_t* argmax, const T* y, const PoolShape& shape,
                        std::int64_t kernel) {
  for (std::int64_t position = 0; position < kernel * kernel; ++position) {
    T* target = dx + (position / kernel * shape.w + position % kernel) * shape.c;
    const auto wanted = static_cast<std::uint8_t>(position);
    if (y == nullptr) {
#pragma omp simd
      for (std::int64_t c = 0; c < shape.c; ++c) target[c] = argmax[c] == wanted ? dy[c] : T{0};
    } else {
#pragma omp simd
      for (std::int64_t c = 0; c < shape.c; ++c) target[c] = argmax[c] == wanted && y[c] > T{0} ? dy[c] : T{0};
    }
  }
}

// Window i of `count` over `extent`: [floor(i extent / count), ceil((i + 1) extent / count)), PyTorch's bounds.
struct Window {
  Window(std::int64_t i, std::int64_t count, std::int64_t extent)
      : first(i * extent / count), last(((i + 1) * extent + count - 1) / count) {}
  std::int64_t size() const { return last - first; }
  std::int64_t first, last;
};

// out[c] = mean of the window of one sample.
template <typename T>
void average_window(T* out, const T* sample, const Window& rows, const Window& columns, const PoolShape& shape) {
  std::fill_n(out, shape.c, T{0});
  for (std::int64_t h = rows.first; h < rows.last; ++h) {
    for (std::int64_t w = columns.first; w < columns.last; ++w) {
      const T* const in = sample + (h * shape.w + w) * shape.c;
#pragma omp simd
      for (std::int64_t c = 0; c < shape.c; ++c) out[c] += in[c];
    }
  }
  const T area = static_cast<T>(rows.size() * columns.size());
#pragma omp simd
  for (std::int64_t c = 0; c < shape.c; ++c) out[c] /= area;
}

// Adds in[c] / area to every place of the window of one sample.
template <typename T>
void spread_average(T* sample, const T* in, const Window& rows, const Window& columns, const PoolShape& shape) {
  const T area = static_cast<T>(rows.size() * columns.size());
  for (std::int64_t h = rows.first; h < rows.last; ++h) {
    for (std::int64_t w = columns.first; w < columns.last; ++w) {
      T* const out = sample + (h * shape.w + w) * shape.c;
#pragma omp simd
      for (std::int64_t c = 0; c < shape.c; ++c) out[c] += in[c] / area;
    }
  }
}

}  // namespace

void CpuBackend::max_pool_forward(Tensor y, Tensor argmax, Tensor x, std::int64_t kernel) {
  const PoolShape shape(x.shape(), y.shape());
  check_max_pool(shape, y, argmax, kernel);
  with_float_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const y_data = y.data<T>();
    const T* const x_data = x.data<T>();
    std::uint8_t* const positions = argmax.data<std::uint8_t>();
    parallel_items(shape.n * shape.p, shape.w * shape.c * kernel, [&](std::int64_t row) {
      const T* x_row = x_data + (row / shape.p * shape.h + row % shape.p * kernel) * shape.w * shape.c;
      for (std::int64_t q = 0; q < shape.q; ++q) {
        const std::int64_t at = (row * shape.q + q) * shape.c;
        max_of_window(y_data + at, positions + at, x_row + q * kernel * shape.c, shape, kernel);
      }
    });
  });
}

void CpuBackend::max_pool_backward(Tensor dx, Tensor dbias, Tensor dy, Tensor argmax, Tensor y, std::int64_t kernel,
                                   bool accumulate) {
  const PoolShape shape(dx.shape(), dy.shape());
  check_max_pool(shape, dy, argmax, kernel);
  PDL_CHECK(!y.defined() || (y.shape() == dy.shape() && y.dtype() == dy.dtype()), "y ", y.shape().to_string(),
            " for dy ", dy.shape().to_string());
  PDL_CHECK(!dbias.defined() || dbias.elements() == shape.c, "dbias ", dbias.shape().to_string());
  with_float_type(dx.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const dx_data = dx.data<T>();
    const T *const dy_data = dy.data<T>(), *const y_data = y.defined() ? y.data<T>() : nullptr;
    const std::uint8_t* const positions = argmax.data<std::uint8_t>();
    const std::int64_t width = shape.w * shape.c, covered = shape.q * kernel * shape.c;
    parallel_items(shape.n * shape.p, width * kernel, [&](std::int64_t row) {
      const std::int64_t p = row % shape.p;
      T* const dx_row = dx_data + (row / shape.p * shape.h + p * kernel) * width;
      for (std::int64_t q = 0; q < shape.q; ++q) {
        const std::int64_t at = (row * shape.q + q) * shape.c;
        spread_over_window(dx_row + q * kernel * shape.c, dy_data + at, positions + at,
                           y_data == nullptr ? nullptr : y_data + at, shape, kernel);
      }
      // What no window covers: the right border of these rows, and below the last windows whole rows.
      for (std::int64_t r = 0; r < kernel; ++r) std::fill(dx_row + r * width + covered, dx_row + (r + 1) * width, T{0});
      if (p == shape.p - 1) std::fill_n(dx_row + kernel * width, (shape.h - shape.p * kernel) * width, T{0});
    });
    // Over all of dx, zeros included: the bits of a convolution that sums its own dy.
    if (dbias.defined()) column_sums(dbias.data<T>(), dx_data, shape.n * shape.h * shape.w, shape.c, accumulate);
  });
}

void CpuBackend::adaptive_avg_pool_forward(Tensor y, Tensor x) {
  const PoolShape shape(x.shape(), y.shape());
  with_float_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const y_data = y.data<T>();
    const T* const x_data = x.data<T>();
    const std::int64_t sample = shape.h * shape.w * shape.c, windows = shape.p * shape.q;
    parallel_items(shape.n * windows, sample / windows, [&](std::int64_t i) {
      const std::int64_t n = i / windows, window = i % windows;
      const Window rows(window / shape.q, shape.p, shape.h), columns(window % shape.q, shape.q, shape.w);
      average_window(y_data + i * shape.c, x_data + n * sample, rows, columns, shape);
    });
  });
}

void CpuBackend::adaptive_avg_pool_backward(Tensor dx, Tensor dy) {
  const PoolShape shape(dx.shape(), dy.shape());
  with_float_type(dx.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const dx_data = dx.data<T>();
    const T* const dy_data = dy.data<T>();
    const std::int64_t sample = shape.h * shape.w * shape.c, windows = shape.p * shape.q;
    // Windows overlap where they do not divide the image evenly, so only samples are independent.
    parallel_items(shape.n, sample, [&](std::int64_t n) {
      std::fill_n(dx_data + n * sample, sample, T{0});
      for (std::int64_t window = 0; window < windows; ++window) {
        const Window rows(window / shape.q, shape.p, shape.h), columns(window % shape.q, shape.q, shape.w);
        spread_average(dx_data + n * sample, dy_data + (n * windows + window) * shape.c, rows, columns, shape);
      }
    });
  });
}

}  // namespace pdl
