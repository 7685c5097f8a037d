// Sums down the columns of a matrix, in two stages. First each block adds up one stretch of rows of one strip of
// columns in fp32, then a second kernel adds the stretches in fp64. The cut follows from the extents alone, so no sum
// depends on the order in which blocks run.

#include "engine/backend/cuda/column_sums.h"

#include "engine/backend/cuda/kernel_tools.cuh"

namespace pdl::cuda {
namespace {

constexpr int kThreads = 256;
// Four blocks on each multiprocessor of an H200: one wave. A constant, so that the cut is the same on every GPU.
constexpr std::int64_t kMostBlocks = 132 * 4;
constexpr int kRowsAtOnce = 4;  // loads in flight per thread; add_rows spells their tree out

// How the matrix is cut.
struct Cut {
  std::int64_t rows, columns;
  int groups;                      // groups of columns that one thread adds up: columns / vector width
  int groups_of_strip;             // threads side by side in a block
  std::int64_t rows_of_stretch;    // rows that a block adds up
  std::int64_t strips, stretches;  // the grid
};

Cut cut_of(std::int64_t rows, std::int64_t columns, int width) {
  Cut cut{};
  cut.rows = rows;
  cut.columns = columns;
  cut.groups = static_cast<int>(columns / width);
  cut.strips = (cut.groups + kWarp - 1) / kWarp;
  cut.groups_of_strip = static_cast<int>((cut.groups + cut.strips - 1) / cut.strips);
  const std::int64_t rows_of_block = kThreads / cut.groups_of_strip;
  // A stretch shorter than one round of loads leaves threads without work.
  const std::int64_t most_stretches = std::max<std::int64_t>(rows / (rows_of_block * kRowsAtOnce), 1);
  const std::int64_t wanted = std::clamp<std::int64_t>(kMostBlocks / cut.strips, 1, most_stretches);
  // Whole rounds of the block's rows.
  const std::int64_t rounds = (rows + wanted * rows_of_block - 1) / (wanted * rows_of_block);
  cut.rows_of_stretch = std::max<std::int64_t>(rounds, 1) * rows_of_block;
  cut.stretches = std::max<std::int64_t>((rows + cut.rows_of_stretch - 1) / cut.rows_of_stretch, 1);
  return cut;
}

// ------------------------------------------------------------------------------------------------------ device helpers

// sums += rows first, first + step, ... of [first, last), for the kWidth columns that start at `x`.
template <int kWidth, typename T>
__device__ void add_rows(float (&sums)[kWidth], const T* x, std::int64_t first, std::int64_t last, int step,
                         std::int64_t columns) {
  for (std::int64_t row = first; row < last; row += kRowsAtOnce * step) {
    Vector<T, kWidth> loaded[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      loaded[r] = row + r * step < last ? load_vector<kWidth>(x + (row + r * step) * columns) : Vector<T, kWidth>{};
    }
#pragma unroll
    for (int v = 0; v < kWidth; ++v) {
      sums[v] += (to_float(loaded[0].at[v]) + to_float(loaded[1].at[v])) +
                 (to_float(loaded[2].at[v]) + to_float(loaded[3].at[v]));
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- kernels

// Block (strip, stretch): to[stretch][columns of the strip] (+)= sum over the rows of the stretch. Threads stand side
// by side over the groups of a strip, and in as many rows as fit.
template <int kWidth, typename T>
__global__ void __launch_bounds__(kThreads, 4) stretch_sums_kernel(float* to, const T* x, Cut cut, bool accumulate) {
  __shared__ float shared[kThreads * kWidth];
  const int group = static_cast<int>(threadIdx.x) % cut.groups_of_strip;
  const int row_of_block = static_cast<int>(threadIdx.x) / cut.groups_of_strip;
  const int rows_of_block = kThreads / cut.groups_of_strip;
  const int first_group = static_cast<int>(blockIdx.x) * cut.groups_of_strip;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * cut.rows_of_stretch;
  const std::int64_t last = min(first + cut.rows_of_stretch, cut.rows);

  float sums[kWidth] = {};
  if (row_of_block < rows_of_block && first_group + group < cut.groups) {
    add_rows<kWidth>(sums, x + static_cast<std::int64_t>(first_group + group) * kWidth, first + row_of_block, last,
                     rows_of_block, cut.columns);
  }
#pragma unroll
  for (int v = 0; v < kWidth; ++v) shared[threadIdx.x * kWidth + v] = sums[v];
  __syncthreads();

  const int columns_of_strip = cut.groups_of_strip * kWidth;
  for (int c = static_cast<int>(threadIdx.x); c < columns_of_strip; c += kThreads) {
    const std::int64_t column = static_cast<std::int64_t>(first_group) * kWidth + c;
    if (column >= cut.columns) break;
    float sum = 0.0f;
    for (int row = 0; row < rows_of_block; ++row) sum += shared[row * columns_of_strip + c];
    float* const place = to + static_cast<std::int64_t>(blockIdx.y) * cut.columns + column;
    *place = accumulate ? *place + sum : sum;
  }
}

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

// ----------------------------------------------------------------------------------------------------------- launchers

template <int kWidth, typename T>
void launch(float* out, const T* x, std::int64_t rows, std::int64_t columns, bool accumulate, CudaScratch& scratch,
            cudaStream_t stream) {
  const Cut cut = cut_of(rows, columns, kWidth);
  const bool one_stage = cut.stretches == 1;
  float* const partial =
      one_stage ? out
                : static_cast<float*>(scratch.get(cut.stretches * columns * static_cast<std::int64_t>(sizeof(float))));
  const dim3 grid(static_cast<unsigned>(cut.strips), static_cast<unsigned>(cut.stretches));
  stretch_sums_kernel<kWidth><<<grid, kThreads, 0, stream>>>(partial, x, cut, one_stage && accumulate);
  check_launch("stretch_sums_kernel");
  if (one_stage) return;
  add_stretches_kernel<<<blocks_for(columns, kWarp), dim3(kWarp, kWarp), 0, stream>>>(out, partial, cut.stretches,
                                                                                      columns, accumulate);
  check_launch("add_stretches_kernel");
}

}  // namespace

void column_sums(float* out, const void* x, DType dtype, std::int64_t rows, std::int64_t columns, bool accumulate,
                 CudaScratch& scratch, cudaStream_t stream) {
  PDL_CHECK(rows >= 0 && columns >= 0 && columns < (std::int64_t{1} << 31), "column sums of [", rows, ", ", columns,
            "]");
  if (columns == 0) return;
  with_compute_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* const from = static_cast<const T*>(x);
    if (columns % kVectorWidth<T> == 0 && aligned_to_vectors(from)) {
      launch<kVectorWidth<T>>(out, from, rows, columns, accumulate, scratch, stream);
    } else {
      launch<1>(out, from, rows, columns, accumulate, scratch, stream);
    }
  });
}

}  // namespace pdl::cuda
