// Sums down the columns of a matrix in memory, and the second stage of all column sums: see column_sums.cuh.

#include "engine/backend/cuda/column_sums.h"

#include "engine/backend/cuda/column_sums.cuh"

namespace pdl::cuda {
namespace {

// ------------------------------------------------------------------------------------------------------ device helpers

// The rows of a matrix as they lie.
template <typename T, int kWidth>
struct PlainRows {
  static constexpr int kAtOnce = 4;
  using Loaded = Vector<T, kWidth>;
  __device__ Loaded load(std::int64_t row, std::int64_t column) const {
    return load_vector<kWidth>(x + row * columns + column);
  }
  __device__ void finish(float (&values)[kWidth], const Loaded& loaded, std::int64_t, std::int64_t) const {
#pragma unroll
    for (int v = 0; v < kWidth; ++v) values[v] = to_float(loaded.at[v]);
  }

  const T* x;
  std::int64_t columns;
};

// ------------------------------------------------------------------------------------------------------------- kernels

// out[c] (+)= sum over stretches of partial[stretch][c]. Block: 32 columns by 32 rows of threads.
__global__ void __launch_bounds__(kWarp* kWarp)
    add_stretches_kernel(float* out, const float* partial, std::int64_t stretches, std::int64_t columns,
                         bool accumulate) {
  __shared__ double shared[kWarp][kWarp];
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  double sum = 0.0;
  if (column < columns) {
#pragma unroll 4
    for (std::int64_t s = threadIdx.y; s < stretches; s += kWarp)
      sum += static_cast<double>(partial[s * columns + column]);
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  double total = 0.0;
  for (int row = 0; row < kWarp; ++row) total += shared[row][threadIdx.x];
  out[column] = static_cast<float>(accumulate ? static_cast<double>(out[column]) + total : total);
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------- launchers

void add_stretches(float* out, const float* partial, std::int64_t stretches, std::int64_t columns, bool accumulate,
                   cudaStream_t stream) {
  add_stretches_kernel<<<blocks_for(columns, kWarp), dim3(kWarp, kWarp), 0, stream>>>(out, partial, stretches, columns,
                                                                                      accumulate);
  check_launch("add_stretches_kernel");
}

void column_sums(float* out, const void* x, DType dtype, std::int64_t rows, std::int64_t columns, bool accumulate,
                 CudaScratch& scratch, cudaStream_t stream) {
  if (columns == 0) return;
  with_compute_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* const from = static_cast<const T*>(x);
    with_vector_width<T>(columns % kVectorWidth<T> == 0 && aligned_to_vectors(from), [&](auto wide) {
      constexpr int kWidth = decltype(wide)::value;
      sum_rows<kWidth>(out, PlainRows<T, kWidth>{from, columns}, rows, columns, accumulate, scratch, stream);
    });
  });
}

}  // namespace pdl::cuda
