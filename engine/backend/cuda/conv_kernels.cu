#include "engine/backend/cuda/conv_kernels.h"
#include "engine/backend/cuda/kernel_tools.cuh"

namespace pdl::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWide = static_cast<int>(kWideChannels);

// ------------------------------------------------------------------------------------------------------------- kernels
// One pixel per thread. The element type does not matter, as zero is zero in both.
template <int kChannels>
__global__ void widen_kernel(std::uint16_t* __restrict__ to, const std::uint16_t* __restrict__ from,
                             std::int64_t rows) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  Vector<std::uint16_t, kWide> wide;
#pragma unroll
  for (int c = 0; c < kWide; ++c) wide.at[c] = c < kChannels ? from[row * kChannels + c] : std::uint16_t{0};
  store_vector(to + row * kWide, wide);
}

// Matrices of one width: plain ranges, kWidth elements per thread.
template <typename T, int kWidth>
__global__ void add_range_kernel(float* __restrict__ to, const T* __restrict__ from, std::int64_t count,
                                 bool accumulate) {
  const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth;
  if (at >= count) return;
  const Vector<T, kWidth> gradient = load_vector<kWidth>(from + at);
  Vector<float, kWidth> total = {};
  if (accumulate) total = load_vector<kWidth>(to + at);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) total.at[i] += to_float(gradient.at[i]);
  store_vector(to + at, total);
}

template <typename T>
__global__ void add_columns_kernel(float* __restrict__ to, const T* __restrict__ from, std::int64_t count,
                                   std::int64_t channels, std::int64_t from_channels, bool accumulate) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= count) return;
  const float gradient = to_float(from[at / channels * from_channels + at % channels]);
  to[at] = accumulate ? to[at] + gradient : gradient;
}

// ----------------------------------------------------------------------------------------------------------- launchers
template <int kChannels>
void launch_widen(void* to, const void* from, std::int64_t rows, cudaStream_t stream) {
  widen_kernel<kChannels><<<blocks_for(rows, kThreads), kThreads, 0, stream>>>(
      static_cast<std::uint16_t*>(to), static_cast<const std::uint16_t*>(from), rows);
}

template <typename T, int kWidth>
void launch_add_range(float* to, const T* from, std::int64_t count, bool accumulate, cudaStream_t stream) {
  add_range_kernel<T, kWidth>
      <<<blocks_for(count, kThreads * kWidth), kThreads, 0, stream>>>(to, from, count, accumulate);
}

}  // namespace

void widen_channels(void* to, const void* from, DType dtype, std::int64_t rows, std::int64_t channels,
                    cudaStream_t stream) {
  PDL_CHECK(is_half(dtype) && channels >= 1 && channels < kWideChannels, channels, " channels of ", name_of(dtype));
  PDL_CHECK(aligned_to_vectors(to), "widened image is not aligned");
  using Launch = void (*)(void*, const void*, std::int64_t, cudaStream_t);
  constexpr Launch kLaunches[] = {launch_widen<1>, launch_widen<2>, launch_widen<3>, launch_widen<4>,
                                  launch_widen<5>, launch_widen<6>, launch_widen<7>};
  kLaunches[channels - 1](to, from, rows, stream);
  check_launch("widen_channels");
}

void add_weight_gradient(float* to, const void* from, DType dtype, std::int64_t rows, std::int64_t channels,
                         std::int64_t from_channels, bool accumulate, cudaStream_t stream) {
  const std::int64_t count = rows * channels;
  if (count == 0) return;
  with_compute_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kWidth = 4;  // 16 bytes of the destination
    const T* gradient = static_cast<const T*>(from);
    if (channels != from_channels) {
      add_columns_kernel<T><<<blocks_for(count, kThreads), kThreads, 0, stream>>>(to, gradient, count, channels,
                                                                                  from_channels, accumulate);
    } else if (count % kWidth == 0 && aligned_to_vectors(to, gradient)) {
      launch_add_range<T, kWidth>(to, gradient, count, accumulate, stream);
    } else {
      launch_add_range<T, 1>(to, gradient, count, accumulate, stream);
    }
  });
  check_launch("add_weight_gradient");
}

}  // namespace pdl::cuda
