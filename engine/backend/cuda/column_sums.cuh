#pragma once
// Sums down the columns of a matrix whose elements are loaded, or made on the way, by whoever asks: so the pass that
// writes a gradient also sums it up.
//
// Two stages. First each block adds up one stretch of rows of one strip of columns in fp32, then a second kernel adds
// the stretches in fp64. The cut follows from the extents alone, so no sum depends on the order in which blocks run.

#include "engine/backend/cuda/kernel_tools.cuh"

namespace pdl::cuda {

inline constexpr int kSumThreads = 256;
// Four blocks on each multiprocessor of an H200: one wave. A constant, so that the cut is the same on every GPU.
inline constexpr std::int64_t kMostSumBlocks = 132 * 4;

/// How the matrix is cut.
struct SumCut {
  SumCut(std::int64_t row_count, std::int64_t column_count, int width, int rows_at_once)
      : rows(row_count), columns(column_count), groups(static_cast<int>(columns / width)) {
    strips = (groups + kWarp - 1) / kWarp;
    groups_of_strip = static_cast<int>((groups + strips - 1) / strips);
    const std::int64_t rows_of_block = kSumThreads / groups_of_strip;
    // A stretch shorter than one round of loads leaves threads without work.
    const std::int64_t most_stretches = std::max<std::int64_t>(rows / (rows_of_block * rows_at_once), 1);
    const std::int64_t wanted = std::clamp<std::int64_t>(kMostSumBlocks / strips, 1, most_stretches);
    // Whole rounds of the block's rows.
    const std::int64_t rounds = (rows + wanted * rows_of_block - 1) / (wanted * rows_of_block);
    rows_of_stretch = std::max<std::int64_t>(rounds, 1) * rows_of_block;
    stretches = std::max<std::int64_t>((rows + rows_of_stretch - 1) / rows_of_stretch, 1);
  }
  std::int64_t rows, columns;
  int groups;                      ///< groups of columns that one thread adds up: columns / vector width
  int groups_of_strip = 1;         ///< threads side by side in a block
  std::int64_t rows_of_stretch;    ///< rows that a block adds up
  std::int64_t strips, stretches;  ///< the grid
};

// ------------------------------------------------------------------------------------------------------ device helpers

/// Rows `row`, `row` + step, ... of one round, for the kWidth columns from `column` on. All are loaded before the first
/// is used. With kAll none of them lies behind the end.
template <bool kAll, int kWidth, typename Rows>
__device__ inline void add_round(float (&sums)[kWidth], const Rows& rows, std::int64_t row, std::int64_t last, int step,
                                 std::int64_t column) {
  typename Rows::Loaded loaded[Rows::kAtOnce];
#pragma unroll
  for (int r = 0; r < Rows::kAtOnce; ++r) {
    if (kAll || row + r * step < last) loaded[r] = rows.load(row + r * step, column);
  }
  float of_round[kWidth] = {};
#pragma unroll
  for (int r = 0; r < Rows::kAtOnce; ++r) {
    if (!kAll && row + r * step >= last) continue;
    float values[kWidth];
    rows.finish(values, loaded[r], row + r * step, column);
#pragma unroll
    for (int v = 0; v < kWidth; ++v) of_round[v] += values[v];
  }
#pragma unroll
  for (int v = 0; v < kWidth; ++v) sums[v] += of_round[v];
}

// ------------------------------------------------------------------------------------------------------------- kernels

/// Block (strip, stretch): to[stretch][columns of the strip] (+)= sum over the rows of the stretch. Threads stand side
/// by side over the groups of a strip, and in as many rows as fit.
template <int kWidth, typename Rows>
__global__ void __launch_bounds__(kSumThreads, 4)
    stretch_sums_kernel(float* to, const Rows rows, const SumCut cut, bool accumulate) {
  __shared__ float shared[kSumThreads * kWidth];
  const int group = static_cast<int>(threadIdx.x) % cut.groups_of_strip;
  const int row_of_block = static_cast<int>(threadIdx.x) / cut.groups_of_strip;
  const int rows_of_block = kSumThreads / cut.groups_of_strip;
  const int first_group = static_cast<int>(blockIdx.x) * cut.groups_of_strip;
  const std::int64_t last = min((std::int64_t{blockIdx.y} + 1) * cut.rows_of_stretch, cut.rows);

  float sums[kWidth] = {};
  if (row_of_block < rows_of_block && first_group + group < cut.groups) {
    const std::int64_t column = std::int64_t{first_group + group} * kWidth;
    std::int64_t row = std::int64_t{blockIdx.y} * cut.rows_of_stretch + row_of_block;
    for (; row + (Rows::kAtOnce - 1) * rows_of_block < last; row += Rows::kAtOnce * rows_of_block) {
      add_round<true>(sums, rows, row, last, rows_of_block, column);
    }
    if (row < last) add_round<false>(sums, rows, row, last, rows_of_block, column);
  }
#pragma unroll
  for (int v = 0; v < kWidth; ++v) shared[threadIdx.x * kWidth + v] = sums[v];
  __syncthreads();

  const int columns_of_strip = cut.groups_of_strip * kWidth;
  for (int c = static_cast<int>(threadIdx.x); c < columns_of_strip; c += kSumThreads) {
    const std::int64_t column = std::int64_t{first_group} * kWidth + c;
    if (column >= cut.columns) break;
    float sum = 0.0f;
    for (int row = 0; row < rows_of_block; ++row) sum += shared[row * columns_of_strip + c];
    float* const place = to + std::int64_t{blockIdx.y} * cut.columns + column;
    *place = accumulate ? *place + sum : sum;
  }
}

// ----------------------------------------------------------------------------------------------------------- launchers

/// out[c] (+)= sum over stretches of partial[stretch][c], in order.
void add_stretches(float* out, const float* partial, std::int64_t stretches, std::int64_t columns, bool accumulate,
                   cudaStream_t stream);

/// out[c] (+)= sum over row_count rows of their element c; columns are whole groups of kWidth. Works in `scratch`.
/// `Rows` says how to come by kWidth elements of a row in two steps, so that several loads are in flight:
///   Loaded load(row, column);  finish(float (&values)[kWidth], loaded, row, column);  kAtOnce rows at once.
template <int kWidth, typename Rows>
void sum_rows(float* out, const Rows& rows, std::int64_t row_count, std::int64_t columns, bool accumulate,
              CudaScratch& scratch, cudaStream_t stream) {
  PDL_CHECK(row_count >= 0 && columns > 0 && columns < (std::int64_t{1} << 31), "column sums of [", row_count, ", ",
            columns, "]");
  const SumCut cut(row_count, columns, kWidth, Rows::kAtOnce);
  const bool one_stage = cut.stretches == 1;
  const std::int64_t partial_bytes = cut.stretches * columns * static_cast<std::int64_t>(sizeof(float));
  float* const partial = one_stage ? out : static_cast<float*>(scratch.get(partial_bytes));
  const dim3 grid(static_cast<unsigned>(cut.strips), static_cast<unsigned>(cut.stretches));
  stretch_sums_kernel<kWidth><<<grid, kSumThreads, 0, stream>>>(partial, rows, cut, one_stage && accumulate);
  check_launch("stretch_sums_kernel");
  if (!one_stage) add_stretches(out, partial, cut.stretches, columns, accumulate, stream);
}

}  // namespace pdl::cuda
