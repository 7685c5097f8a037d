// Bias and activation in one pass over the output of a matrix product.

#include "engine/backend/cuda/activation.cuh"
#include "engine/backend/cuda/kernel_tools.cuh"
#include "engine/backend/cuda/linear_kernels.h"

namespace pdl::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kBlocks = 132 * 8;  // as many as run at once

// ------------------------------------------------------------------------------------------------------------- kernels
// A thread stays in its column, whose bias it keeps, and goes down the rows. No __restrict__: y may be sums.
template <typename T, int kWidth, Activation kActivation>
__global__ void bias_activation_kernel(T* y, T* sums, const T* bias, std::int64_t rows, std::int64_t columns) {
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth;
  if (column >= columns) return;
  float shift[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) shift[i] = bias == nullptr ? 0.0f : to_float(bias[column + i]);
  const bool keeps_sums = bias != nullptr && sums != y;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.y) * blockDim.y;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < rows; row += step) {
    const std::int64_t at = row * columns + column;
    Vector<T, kWidth> x = load_vector<kWidth>(sums + at), result;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      // What backward will see is the rounded sum, so that is what the activation works on.
      if (bias != nullptr) x.at[i] = from_float<T>(to_float(x.at[i]) + shift[i]);
      result.at[i] = from_float<T>(activate<T, kActivation>(to_float(x.at[i])));
    }
    if (keeps_sums) store_vector(sums + at, x);
    store_vector(y + at, result);
  }
}

// ----------------------------------------------------------------------------------------------------------- launchers
template <typename T, int kWidth, Activation kActivation>
void launch(T* y, T* sums, const T* bias, std::int64_t rows, std::int64_t columns, cudaStream_t stream) {
  const std::int64_t vectors = columns / kWidth;
  int across = kWarp;
  while (across < kThreads && across < vectors) across *= 2;
  const int down = kThreads / across;
  const unsigned grid_x = blocks_for(vectors, across);
  const std::int64_t grid_y = std::clamp<std::int64_t>(kBlocks / grid_x, 1, blocks_for(rows, down));
  const dim3 grid(grid_x, static_cast<unsigned>(std::min<std::int64_t>(grid_y, 65535)));
  const dim3 block(static_cast<unsigned>(across), static_cast<unsigned>(down));
  bias_activation_kernel<T, kWidth, kActivation><<<grid, block, 0, stream>>>(y, sums, bias, rows, columns);
  check_launch("bias_activation_kernel");
}

template <typename T, Activation kActivation>
void launch_width(T* y, T* sums, const T* bias, std::int64_t rows, std::int64_t columns, cudaStream_t stream) {
  constexpr int kWide = kVectorWidth<T>;
  if (columns % kWide == 0 && aligned_to_vectors(y, sums)) {
    launch<T, kWide, kActivation>(y, sums, bias, rows, columns, stream);
  } else {
    launch<T, 1, kActivation>(y, sums, bias, rows, columns, stream);
  }
}

}  // namespace

void bias_activation(void* y, void* sums, const void* bias, std::int64_t rows, std::int64_t columns, DType dtype,
                     Activation activation, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return;
  with_compute_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    T *const to = static_cast<T*>(y), *const from = static_cast<T*>(sums);
    const T* const shift = static_cast<const T*>(bias);
    switch (activation) {
      case Activation::none:
        return launch_width<T, Activation::none>(to, from, shift, rows, columns, stream);
      case Activation::relu:
        return launch_width<T, Activation::relu>(to, from, shift, rows, columns, stream);
      case Activation::gelu_tanh:
        return launch_width<T, Activation::gelu_tanh>(to, from, shift, rows, columns, stream);
    }
  });
}

}  // namespace pdl::cuda
