// Pooling of channels-last images. Each thread takes one vector of channels of one pixel or one window, so neighbours
// in a warp touch neighbours in memory, and each element of a gradient is written by one thread, once.

#include "engine/backend/cuda/cuda_backend.h"
#include "engine/backend/cuda/kernel_tools.cuh"

namespace pdl {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// ------------------------------------------------------------------------------------------------------ device helpers
// Extents of a pooling from x [N, H, W, C] to y [N, P, Q, C].
struct PoolShape {
  PoolShape(const Shape& x, const Shape& y) : n(x[0]), h(x[1]), w(x[2]), c(x[3]), p(y[1]), q(y[2]) {
    PDL_CHECK(x.rank() == 4 && y.rank() == 4, x.to_string(), " pooled to ", y.to_string());
    PDL_CHECK(y[0] == n && y[3] == c && p > 0 && q > 0, x.to_string(), " pooled to ", y.to_string());
    PDL_CHECK(std::max(h, w) < 65536 && std::max(p, q) < 65536, x.to_string(), " pooled to ", y.to_string());
  }
  std::int64_t n, h, w, c, p, q;
};

// A grid of threads [N, rows, columns, vectors of C].
template <int kWidth>
struct PixelGrid {
  using Index = VectorIndex<kWidth>;
  PixelGrid(std::int64_t samples, std::int64_t row_count, std::int64_t column_count, std::int64_t channels)
      : rows(static_cast<Index>(row_count)),
        columns(static_cast<Index>(column_count)),
        vectors(static_cast<Index>(channels / kWidth)),
        count(samples * row_count * column_count * (channels / kWidth)) {}
  Index rows, columns, vectors;
  std::int64_t count;
};

// What this thread is of a grid: sample n, row, column, first channel.
template <int kWidth>
struct Pixel {
  using Index = VectorIndex<kWidth>;
  __device__ Pixel(const PixelGrid<kWidth>& grid, std::int64_t thread) {
    const Index vector = static_cast<Index>(thread), pixel = vector / grid.vectors, line = pixel / grid.columns;
    channel = static_cast<std::int64_t>(vector - pixel * grid.vectors) * kWidth;
    column = static_cast<int>(pixel - line * grid.columns);
    n = line / grid.rows;
    row = static_cast<int>(line - static_cast<Index>(n) * grid.rows);
  }
  std::int64_t n, channel;
  int row, column;
};

__device__ std::int64_t this_thread() { return std::int64_t{blockIdx.x} * kThreads + threadIdx.x; }

// Window i of `count` over `extent`: [floor(i extent / count), ceil((i + 1) extent / count)), PyTorch's bounds. With
// `count` and `extent` exchanged it gives the windows that place i lies in.
struct Window {
  __device__ Window(int i, int count, int extent)
      : first(static_cast<int>(static_cast<std::uint32_t>(i) * static_cast<std::uint32_t>(extent) / count)),
        last(static_cast<int>((static_cast<std::uint32_t>(i + 1) * static_cast<std::uint32_t>(extent) + count - 1) /
                              count)) {}
  __device__ int size() const { return last - first; }
  int first, last;
};

// ------------------------------------------------------------------------------------------------------------- kernels
// kFixed is the kernel's extent, or 0 when it is only known at run time.
template <typename T, int kWidth, int kFixed>
__global__ void __launch_bounds__(kThreads)
    max_of_windows(T* y, std::uint8_t* argmax, const T* x, PoolShape shape, PixelGrid<kWidth> grid, int extent) {
  const std::int64_t thread = this_thread();
  if (thread >= grid.count) return;
  const int kernel = kFixed > 0 ? kFixed : extent;
  const Pixel<kWidth> at(grid, thread);
  const T* const corner =
      x + ((at.n * shape.h + at.row * kernel) * shape.w + at.column * kernel) * shape.c + at.channel;
  float best[kWidth];
  load_floats(best, corner);
  Vector<std::uint8_t, kWidth> place{};
#pragma unroll
  for (int r = 0; r < kernel; ++r) {
#pragma unroll
    for (int s = 0; s < kernel; ++s) {
      if (r + s == 0) continue;
      float candidate[kWidth];
      load_floats(candidate, corner + (r * shape.w + s) * shape.c);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        // A NaN wins and stays: divergence must not hide behind a maximum.
        const bool wins = candidate[i] > best[i] || candidate[i] != candidate[i];
        best[i] = wins ? candidate[i] : best[i];
        place.at[i] = wins ? static_cast<std::uint8_t>(r * kernel + s) : place.at[i];
      }
    }
  }
  store_floats(y + thread * kWidth, best);
  store_vector(argmax + thread * kWidth, place);
}

// Threads form a grid that covers all of dx, [N, ceil(H / k), ceil(W / k), C]: what lies in no window of y becomes 0.
template <typename T, int kWidth, int kFixed>
__global__ void __launch_bounds__(kThreads)
    spread_maxima(T* dx, const T* dy, const std::uint8_t* argmax, PoolShape shape, PixelGrid<kWidth> grid, int extent) {
  const std::int64_t thread = this_thread();
  if (thread >= grid.count) return;
  const int kernel = kFixed > 0 ? kFixed : extent;
  const Pixel<kWidth> at(grid, thread);
  Vector<T, kWidth> gradient{};
  Vector<std::uint8_t, kWidth> place{};
  if (at.row < shape.p && at.column < shape.q) {
    const std::int64_t from = ((at.n * shape.p + at.row) * shape.q + at.column) * shape.c + at.channel;
    gradient = load_vector<kWidth>(dy + from);
    place = load_vector<kWidth>(argmax + from);
  }
  const std::int64_t h = std::int64_t{at.row} * kernel, w = std::int64_t{at.column} * kernel;
  T* const corner = dx + ((at.n * shape.h + h) * shape.w + w) * shape.c + at.channel;
#pragma unroll
  for (int r = 0; r < kernel; ++r) {
#pragma unroll
    for (int s = 0; s < kernel; ++s) {
      if (h + r >= shape.h || w + s >= shape.w) continue;
      Vector<T, kWidth> out;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) out.at[i] = place.at[i] == r * kernel + s ? gradient.at[i] : T{};
      store_vector(corner + (r * shape.w + s) * shape.c, out);
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) average_windows(T* y, const T* x, PoolShape shape, PixelGrid<kWidth> grid) {
  const std::int64_t thread = this_thread();
  if (thread >= grid.count) return;
  const Pixel<kWidth> at(grid, thread);
  const int height = static_cast<int>(shape.h), width = static_cast<int>(shape.w);
  const Window rows(at.row, static_cast<int>(shape.p), height), columns(at.column, static_cast<int>(shape.q), width);
  const T* const image = x + at.n * shape.h * shape.w * shape.c + at.channel;
  float sum[kWidth] = {};
  for (int h = rows.first; h < rows.last; ++h) {
    for (int w = columns.first; w < columns.last; ++w) {
      float value[kWidth];
      load_floats(value, image + (h * shape.w + w) * shape.c);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += value[i];
    }
  }
  const float area = static_cast<float>(rows.size()) * static_cast<float>(columns.size());
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] /= area;
  store_floats(y + thread * kWidth, sum);
}

// Gathers: windows overlap where they do not divide the image evenly.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    spread_averages(T* dx, const T* dy, PoolShape shape, PixelGrid<kWidth> grid) {
  const std::int64_t thread = this_thread();
  if (thread >= grid.count) return;
  const Pixel<kWidth> at(grid, thread);
  const int height = static_cast<int>(shape.h), width = static_cast<int>(shape.w);
  const int p_count = static_cast<int>(shape.p), q_count = static_cast<int>(shape.q);
  const Window over_rows(at.row, height, p_count), over_columns(at.column, width, q_count);
  const T* const pooled = dy + at.n * shape.p * shape.q * shape.c + at.channel;
  float sum[kWidth] = {};
  for (int p = over_rows.first; p < over_rows.last; ++p) {
    const Window rows(p, p_count, height);
    for (int q = over_columns.first; q < over_columns.last; ++q) {
      const Window columns(q, q_count, width);
      const float area = static_cast<float>(rows.size()) * static_cast<float>(columns.size());
      float value[kWidth];
      load_floats(value, pooled + (p * shape.q + q) * shape.c);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += value[i] / area;
    }
  }
  store_floats(dx + thread * kWidth, sum);
}

// ----------------------------------------------------------------------------------------------------------- launchers
void check_max_pool(const PoolShape& shape, const Tensor& y, const Tensor& argmax, std::int64_t kernel) {
  PDL_CHECK(kernel >= 1 && kernel <= 16, "kernel ", kernel, ": a position in its window has to fit a byte");
  PDL_CHECK(shape.p == shape.h / kernel && shape.q == shape.w / kernel, "windows of ", kernel, " from ", shape.h, " x ",
            shape.w, " to ", shape.p, " x ", shape.q);
  PDL_CHECK(argmax.dtype() == DType::uint8 && argmax.shape() == y.shape(), "argmax ", argmax.shape().to_string());
}

void check_alike(const Tensor& x, const Tensor& y) {
  PDL_CHECK(x.dtype() == y.dtype(), name_of(x.dtype()), " pooled to ", name_of(y.dtype()));
}

// Whether vectors may be used for an image of so many elements; smaller ones of the same channels then fit as well.
template <typename T>
bool fits_pool(const PoolShape& shape, std::int64_t elements) {
  return shape.c % kVectorWidth<T> == 0 && fits_vectors<T>(elements);
}

}  // namespace
}  // namespace cuda

void CudaBackend::max_pool_forward(Tensor y, Tensor argmax, Tensor x, std::int64_t kernel) {
  using namespace cuda;
  const PoolShape shape(x.shape(), y.shape());
  check_max_pool(shape, y, argmax, kernel);
  check_alike(x, y);
  with_compute_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T *const to = pointer<T>(y), *const from = pointer<T>(x);
    std::uint8_t* const places = argmax.data<std::uint8_t>();
    const bool vectors = fits_pool<T>(shape, x.elements()) && aligned_to_vectors(to, from, places);
    with_vector_width<T>(vectors, [&](auto wide) {
      constexpr int kWidth = decltype(wide)::value;
      const PixelGrid<kWidth> grid(shape.n, shape.p, shape.q, shape.c);
      const auto of_kernel = kernel == 2 ? max_of_windows<T, kWidth, 2> : max_of_windows<T, kWidth, 0>;
      of_kernel<<<blocks_for(grid.count, kThreads), kThreads, 0, stream_>>>(to, places, from, shape, grid,
                                                                            static_cast<int>(kernel));
      check_launch("max_of_windows");
    });
  });
}

void CudaBackend::max_pool_backward(Tensor dx, Tensor dy, Tensor argmax, std::int64_t kernel) {
  using namespace cuda;
  const PoolShape shape(dx.shape(), dy.shape());
  check_max_pool(shape, dy, argmax, kernel);
  check_alike(dx, dy);
  with_compute_type(dx.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T *const to = pointer<T>(dx), *const from = pointer<T>(dy);
    const std::uint8_t* const places = argmax.data<std::uint8_t>();
    const bool vectors = fits_pool<T>(shape, dx.elements()) && aligned_to_vectors(to, from, places);
    with_vector_width<T>(vectors, [&](auto wide) {
      constexpr int kWidth = decltype(wide)::value;
      const std::int64_t rows = (shape.h + kernel - 1) / kernel, columns = (shape.w + kernel - 1) / kernel;
      const PixelGrid<kWidth> grid(shape.n, rows, columns, shape.c);
      const auto of_kernel = kernel == 2 ? spread_maxima<T, kWidth, 2> : spread_maxima<T, kWidth, 0>;
      of_kernel<<<blocks_for(grid.count, kThreads), kThreads, 0, stream_>>>(to, from, places, shape, grid,
                                                                            static_cast<int>(kernel));
      check_launch("spread_maxima");
    });
  });
}

void CudaBackend::adaptive_avg_pool_forward(Tensor y, Tensor x) {
  using namespace cuda;
  const PoolShape shape(x.shape(), y.shape());
  check_alike(x, y);
  if (shape.p == shape.h && shape.q == shape.w) return copy(y, x);  // windows of one pixel
  with_compute_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T *const to = pointer<T>(y), *const from = pointer<T>(x);
    const std::int64_t elements = std::max(x.elements(), y.elements());
    with_vector_width<T>(fits_pool<T>(shape, elements) && aligned_to_vectors(to, from), [&](auto wide) {
      constexpr int kWidth = decltype(wide)::value;
      const PixelGrid<kWidth> grid(shape.n, shape.p, shape.q, shape.c);
      average_windows<T, kWidth><<<blocks_for(grid.count, kThreads), kThreads, 0, stream_>>>(to, from, shape, grid);
      check_launch("average_windows");
    });
  });
}

void CudaBackend::adaptive_avg_pool_backward(Tensor dx, Tensor dy) {
  using namespace cuda;
  const PoolShape shape(dx.shape(), dy.shape());
  check_alike(dx, dy);
  if (shape.p == shape.h && shape.q == shape.w) return copy(dx, dy);
  with_compute_type(dx.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T *const to = pointer<T>(dx), *const from = pointer<T>(dy);
    const std::int64_t elements = std::max(dx.elements(), dy.elements());
    with_vector_width<T>(fits_pool<T>(shape, elements) && aligned_to_vectors(to, from), [&](auto wide) {
      constexpr int kWidth = decltype(wide)::value;
      const PixelGrid<kWidth> grid(shape.n, shape.h, shape.w, shape.c);
      spread_averages<T, kWidth><<<blocks_for(grid.count, kThreads), kThreads, 0, stream_>>>(to, from, shape, grid);
      check_launch("spread_averages");
    });
  });
}

}  // namespace pdl
