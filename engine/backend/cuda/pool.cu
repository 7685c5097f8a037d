// Pooling of channels-last images. Each thread takes one vector of channels of one pixel or one window, so neighbours
// in a warp touch neighbours in memory, and each element of a gradient is written by one thread, once. Where the
// gradient of a bias is wanted too, a thread goes from window to window and sums up what it writes.

#include "engine/backend/cuda/column_sums.cuh"
#include "engine/backend/cuda/column_sums.h"
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

// What the windows of a max pool send back. With `y`, the maxima, only those above 0 send anything.
template <typename T, int kWidth>
struct MaximumGradients {
  __device__ Vector<T, kWidth> load(std::int64_t at) const {
    Vector<T, kWidth> gradient = load_vector<kWidth>(dy + at);
    if (y == nullptr) return gradient;
    const Vector<T, kWidth> maximum = load_vector<kWidth>(y + at);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) gradient.at[i] = to_float(maximum.at[i]) > 0.0f ? gradient.at[i] : T{};
    return gradient;
  }

  const T *dy, *y;
};

// One window's pixels of dx: the gradient where the maximum stood, 0 elsewhere. `corner` is its first pixel; rows of
// `pitch` pixels of `channels`; pixels beyond `rows` or `columns` do not exist.
template <typename T, int kWidth>
__device__ void spread(T* corner, const Vector<T, kWidth>& gradient, const Vector<std::uint8_t, kWidth>& place,
                       int kernel, std::int64_t pitch, std::int64_t channels, std::int64_t rows, std::int64_t columns) {
#pragma unroll
  for (int r = 0; r < kernel; ++r) {
#pragma unroll
    for (int s = 0; s < kernel; ++s) {
      if (r >= rows || s >= columns) continue;
      Vector<T, kWidth> out;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) out.at[i] = place.at[i] == r * kernel + s ? gradient.at[i] : T{};
      store_vector(corner + (r * pitch + s) * channels, out);
    }
  }
}

// A max pool on its way back.
template <typename T, int kWidth>
struct Spreading {
  // Whether each pixel of dx lies in a window, and windows can be counted in 32 bits.
  bool covers_image() const {
    return shape.p * kernel == shape.h && shape.q * kernel == shape.w && windows() < (std::int64_t{1} << 32);
  }
  std::int64_t windows() const { return shape.n * shape.p * shape.q; }

  T* dx;
  MaximumGradients<T, kWidth> gradients;
  const std::uint8_t* argmax;
  PoolShape shape;
  int kernel;
};

// The windows as rows of a matrix, for sum_rows: they cover the whole image. kFixed is the kernel's extent, or 0 when
// it is only known at run time.
template <typename T, int kWidth, int kFixed>
struct WindowRows {
  static constexpr int kAtOnce = 1;  // it mostly writes
  struct Loaded {
    Vector<T, kWidth> gradient;
    Vector<std::uint8_t, kWidth> place;
  };
  __device__ Loaded load(std::int64_t window, std::int64_t channel) const {
    const std::int64_t at = window * work.shape.c + channel;
    return {work.gradients.load(at), load_vector<kWidth>(work.argmax + at)};
  }
  __device__ void finish(float (&values)[kWidth], const Loaded& loaded, std::int64_t window,
                         std::int64_t channel) const {
    const int kernel = kFixed > 0 ? kFixed : work.kernel;
    const std::int64_t width = work.shape.w, channels = work.shape.c;
    const auto q = static_cast<std::uint32_t>(work.shape.q), line = static_cast<std::uint32_t>(window) / q;
    const std::uint32_t column = static_cast<std::uint32_t>(window) - line * q;
    // The samples' lines of windows stand one below the other: line i begins at line i * kernel of dx.
    T* const corner =
        work.dx + (std::int64_t{line} * kernel * width + std::int64_t{column} * kernel) * channels + channel;
    spread(corner, loaded.gradient, loaded.place, kernel, width, channels, kernel, kernel);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = to_float(loaded.gradient.at[i]);
  }

  Spreading<T, kWidth> work;
};

// ------------------------------------------------------------------------------------------------------------- kernels
// kFixed as above.
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
__global__ void __launch_bounds__(kThreads) spread_maxima(const Spreading<T, kWidth> work, PixelGrid<kWidth> grid) {
  const std::int64_t thread = this_thread();
  if (thread >= grid.count) return;
  const int kernel = kFixed > 0 ? kFixed : work.kernel;
  const PoolShape& shape = work.shape;
  const Pixel<kWidth> at(grid, thread);
  Vector<T, kWidth> gradient{};
  Vector<std::uint8_t, kWidth> place{};
  if (at.row < shape.p && at.column < shape.q) {
    const std::int64_t from = ((at.n * shape.p + at.row) * shape.q + at.column) * shape.c + at.channel;
    gradient = work.gradients.load(from);
    place = load_vector<kWidth>(work.argmax + from);
  }
  const std::int64_t h = std::int64_t{at.row} * kernel, w = std::int64_t{at.column} * kernel;
  T* const corner = work.dx + ((at.n * shape.h + h) * shape.w + w) * shape.c + at.channel;
  spread(corner, gradient, place, kernel, shape.w, shape.c, shape.h - h, shape.w - w);
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

template <int kFixed, typename T, int kWidth>
void launch_spread(const Spreading<T, kWidth>& work, cudaStream_t stream) {
  const PoolShape& shape = work.shape;
  const std::int64_t rows = (shape.h + work.kernel - 1) / work.kernel,
                     columns = (shape.w + work.kernel - 1) / work.kernel;
  const PixelGrid<kWidth> grid(shape.n, rows, columns, shape.c);
  spread_maxima<T, kWidth, kFixed><<<blocks_for(grid.count, kThreads), kThreads, 0, stream>>>(work, grid);
  check_launch("spread_maxima");
}

// And the sums over all pixels into dbias.
template <int kFixed, typename T, int kWidth>
void launch_summed_spread(const Spreading<T, kWidth>& work, const Tensor& dbias, bool accumulate, CudaScratch& scratch,
                          cudaStream_t stream) {
  const WindowRows<T, kWidth, kFixed> rows = {work};
  sum_rows<kWidth>(dbias.data<float>(), rows, work.windows(), work.shape.c, accumulate, scratch, stream);
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

void CudaBackend::max_pool_backward(Tensor dx, Tensor dbias, Tensor dy, Tensor argmax, Tensor y, std::int64_t kernel,
                                    bool accumulate) {
  using namespace cuda;
  const PoolShape shape(dx.shape(), dy.shape());
  check_max_pool(shape, dy, argmax, kernel);
  check_alike(dx, dy);
  PDL_CHECK(!y.defined() || (y.shape() == dy.shape() && y.dtype() == dy.dtype()), "y ", y.shape().to_string());
  PDL_CHECK(!dbias.defined() || (dbias.elements() == shape.c && dbias.dtype() == DType::fp32), "dbias ",
            dbias.shape().to_string());
  with_compute_type(dx.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T *const from = pointer<T>(dy), *const maxima = pointer<T>(y);
    T* const to = pointer<T>(dx);
    const std::uint8_t* const places = argmax.data<std::uint8_t>();
    const bool vectors = fits_pool<T>(shape, dx.elements()) && aligned_to_vectors(to, from, maxima, places);
    with_vector_width<T>(vectors, [&](auto wide) {
      constexpr int kWidth = decltype(wide)::value;
      const Spreading<T, kWidth> work = {to, {from, maxima}, places, shape, static_cast<int>(kernel)};
      if (dbias.defined() && work.covers_image()) {
        return kernel == 2 ? launch_summed_spread<2>(work, dbias, accumulate, scratch_, stream_)
                           : launch_summed_spread<0>(work, dbias, accumulate, scratch_, stream_);
      }
      kernel == 2 ? launch_spread<2>(work, stream_) : launch_spread<0>(work, stream_);
      if (!dbias.defined()) return;
      const std::int64_t pixels = shape.n * shape.h * shape.w;
      column_sums(dbias.data<float>(), to, dx.dtype(), pixels, shape.c, accumulate, scratch_, stream_);
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
