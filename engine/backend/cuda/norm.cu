// Layer norm over the last axis of x [M, C]:
//
//   xhat = (x - mean) rstd,  rstd = 1 / sqrt(var + 1e-5),  y = xhat gamma + beta
//   dx   = rstd (g - mean_c(g) - xhat mean_c(g xhat)) + dresidual,  g = dy gamma
//   dgamma (+)= sum_m dy xhat,  dbeta (+)= sum_m dy
//
// Every tensor of M rows is read once: a row of up to 128 vectors of 16 bytes lies in the registers of one warp, longer
// ones in those of four or eight. Other rows (beyond 4096 elements, or not whole vectors) take a slower path that reads
// them again from the cache. Blocks loop over rows, so gamma is fetched once per block, and sums over rows grow in
// registers: each block leaves one partial sum of dgamma and dbeta, and a second kernel adds those in order.

#include <algorithm>
#include <cstring>

#include "engine/backend/cuda/cuda_backend.h"
#include "engine/backend/cuda/kernel_tools.cuh"

namespace pdl {
namespace cuda {
namespace {

constexpr float kEpsilon = 1e-5f;
constexpr int kMostVectors = 4;            // that one thread holds of a tensor's row
constexpr std::int64_t kMostWidth = 4096;  // elements of a row in registers

// A row has one, four or eight warps; a block has four warps at least.
template <int kRowWarps>
constexpr int kBlockThreads = std::max(kRowWarps, 4) * kWarp;
template <int kRowWarps>
constexpr int kBlockRows = kBlockThreads<kRowWarps> / (kRowWarps * kWarp);
// Blocks that a multiprocessor is meant to hold; the compiler keeps the registers within that. Backward needs two sums
// per element beside the rows.
template <int kRowWarps>
constexpr int kForwardBlocks = 1024 / kBlockThreads<kRowWarps>;
template <typename T, int kVectors, int kRowWarps>
constexpr int kBackwardBlocks = (kVectors < kMostVectors ? 5
                                 : sizeof(T) == 2        ? 3
                                                         : 4) *
                                128 / kBlockThreads<kRowWarps>;

constexpr int kLongThreads = 256, kLongBlocks = 2;  // the path for other rows

// ------------------------------------------------------------------------------------------------------ device helpers
// Sums over the threads of a row, the same on each of them. `shared` [kRowWarps * kCount] is not read when a row has
// one warp; it may be written again once the block has met at another __syncthreads().
template <int kRowWarps, int kCount>
__device__ void row_sums(float (&x)[kCount], float* shared) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = warp_sum(x[i]);
  if constexpr (kRowWarps > 1) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) shared[warp * kCount + i] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = shared[i];
#pragma unroll
      for (int other = 1; other < kRowWarps; ++other) x[i] += shared[other * kCount + i];
    }
  }
}

// A row is held as it lies in memory, in 32-bit words: its fp32 values can take twice the registers. These are its
// vectors `thread`, `thread` + kRowThreads, ..., zeros behind its end.
template <int kRowThreads, int kVectors, typename T>
__device__ void load_row(uint4 (&to)[kVectors], const T* row, int thread, int vectors) {
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = thread + k * kRowThreads;
    to[k] = v < vectors ? reinterpret_cast<const uint4*>(row)[v] : uint4{};
  }
}

// The values of one vector.
template <typename T, int kWidth>
__device__ void unpack(float (&to)[kWidth], const uint4& words) {
  static_assert(kWidth == kVectorWidth<T>);
  Vector<T, kWidth> vector;
  memcpy(&vector, &words, sizeof(words));
#pragma unroll
  for (int i = 0; i < kWidth; ++i) to[i] = to_float(vector.at[i]);
}

// Makes the compiler believe that the words change here, so that it unpacks them once more where they are used again
// instead of holding the values.
template <int kVectors>
__device__ void forget_values(uint4 (&row)[kVectors]) {
#pragma unroll
  for (uint4& words : row) asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

// gamma and beta may start anywhere; in shared memory they are aligned.
template <typename T>
__device__ void stage(T* shared, const T* from, int width) {
  for (int c = static_cast<int>(threadIdx.x); c < width; c += static_cast<int>(blockDim.x)) shared[c] = from[c];
}

// One vector's part of the sums over rows, and of the row's sums of g and of g xhat. `gamma` is its part of gamma.
template <typename T, int kWidth>
__device__ void add_to_sums(float (&dgamma)[kWidth], float (&dbeta)[kWidth], float (&row)[2], const uint4& dy,
                            const uint4& x, const T* gamma, float mean, float rstd) {
  float upstream[kWidth], value[kWidth], scale[kWidth];
  unpack<T>(upstream, dy);
  unpack<T>(value, x);
  load_floats(scale, gamma);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float xhat = (value[i] - mean) * rstd, g = upstream[i] * scale[i];
    dbeta[i] += upstream[i];
    dgamma[i] += upstream[i] * xhat;
    row[0] += g;
    row[1] += g * xhat;
  }
}

// Adds the gradient of one vector of x; `means` are the row's of g and of g xhat.
template <typename T, int kWidth>
__device__ void add_gradient(float (&to)[kWidth], const float (&means)[2], const uint4& dy, const uint4& x,
                             const T* gamma, float mean, float rstd) {
  float upstream[kWidth], value[kWidth], scale[kWidth];
  unpack<T>(upstream, dy);
  unpack<T>(value, x);
  load_floats(scale, gamma);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float xhat = (value[i] - mean) * rstd;
    to[i] += rstd * (upstream[i] * scale[i] - means[0] - xhat * means[1]);
  }
}

template <typename T>
struct Gradients {
  T* dx;
  const T *dy, *dresidual, *x, *gamma;  // dresidual is null when there is none; dx may be dresidual or dy
  const float *mean, *rstd;
  std::int64_t rows;
  int width;
};

// ------------------------------------------------------------------------------------------------------------- kernels
template <typename T, int kVectors, int kRowWarps>
__global__ void __launch_bounds__(kBlockThreads<kRowWarps>, kForwardBlocks<kRowWarps>)
    normalise(T* y, float* means, float* rstds, const T* x, const T* gamma, const T* beta, std::int64_t rows,
              int width) {
  constexpr int kWidth = kVectorWidth<T>, kRowThreads = kRowWarps * kWarp;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ float sums[2][kRowWarps];
  T *const gammas = reinterpret_cast<T*>(shared_bytes), *const betas = gammas + width;
  stage(gammas, gamma, width);
  stage(betas, beta, width);
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x) % kRowThreads, vectors = width / kWidth;
  constexpr std::int64_t kRows = kBlockRows<kRowWarps>;
  for (std::int64_t row = blockIdx.x * kRows + threadIdx.x / kRowThreads; row < rows; row += gridDim.x * kRows) {
    uint4 in[kVectors];
    load_row<kRowThreads>(in, x + row * width, thread, vectors);
    float mean[1] = {0.0f}, squares[1] = {0.0f};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      float value[kWidth];
      unpack<T>(value, in[k]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) mean[0] += value[i];
    }
    row_sums<kRowWarps>(mean, sums[0]);
    mean[0] /= static_cast<float>(width);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (thread + k * kRowThreads >= vectors) continue;
      float value[kWidth];
      unpack<T>(value, in[k]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float centred = value[i] - mean[0];
        squares[0] += centred * centred;
      }
    }
    row_sums<kRowWarps>(squares, sums[1]);
    const float rstd = 1.0f / sqrtf(squares[0] / static_cast<float>(width) + kEpsilon);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = thread + k * kRowThreads;
      if (v >= vectors) continue;
      float value[kWidth], scale[kWidth], out[kWidth];
      unpack<T>(value, in[k]);
      load_floats(scale, gammas + v * kWidth);
      load_floats(out, betas + v * kWidth);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) out[i] += (value[i] - mean[0]) * rstd * scale[i];
      store_floats(y + row * width + v * kWidth, out);
    }
    if (thread == 0) {
      means[row] = mean[0];
      rstds[row] = rstd;
    }
  }
}

// One row after another for each block, which reads it three times.
template <typename T>
__global__ void __launch_bounds__(kLongThreads)
    normalise_long(T* y, float* means, float* rstds, const T* x, const T* gamma, const T* beta, std::int64_t rows,
                   std::int64_t width) {
  __shared__ float sums[2][kLongThreads / kWarp];
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const in = x + row * width;
    float mean = 0.0f, squares = 0.0f;
    for (std::int64_t c = threadIdx.x; c < width; c += kLongThreads) mean += to_float(in[c]);
    mean = block_sum(mean, sums[0]) / static_cast<float>(width);
    for (std::int64_t c = threadIdx.x; c < width; c += kLongThreads) {
      const float centred = to_float(in[c]) - mean;
      squares += centred * centred;
    }
    squares = block_sum(squares, sums[1]);
    const float rstd = 1.0f / sqrtf(squares / static_cast<float>(width) + kEpsilon);
    for (std::int64_t c = threadIdx.x; c < width; c += kLongThreads) {
      const float out = (to_float(in[c]) - mean) * rstd * to_float(gamma[c]) + to_float(beta[c]);
      y[row * width + c] = from_float<T>(out);
    }
    if (threadIdx.x == 0) {
      means[row] = mean;
      rstds[row] = rstd;
    }
  }
}

// Adds the accumulators of a block's rows side by side, in order, and writes them as this block's row of `partial`
// [blocks, 2, C]. `total` [C] is shared memory.
template <int kRowThreads, int kWidth, int kVectors>
__device__ void write_partial(float* partial, float* total, const float (&sums)[kVectors][kWidth], int thread,
                              int width) {
  const int slot = static_cast<int>(threadIdx.x) / kRowThreads;
  for (int turn = 0; turn < static_cast<int>(blockDim.x) / kRowThreads; ++turn) {
    if (slot == turn) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int first = (thread + k * kRowThreads) * kWidth;
        if (first >= width) continue;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) total[first + i] = turn == 0 ? sums[k][i] : total[first + i] + sums[k][i];
      }
    }
    __syncthreads();
  }
  for (int c = static_cast<int>(threadIdx.x); c < width; c += static_cast<int>(blockDim.x)) partial[c] = total[c];
  __syncthreads();  // `total` is used again
}

template <typename T, int kVectors, int kRowWarps>
__global__ void __launch_bounds__(kBlockThreads<kRowWarps>, kBackwardBlocks<T, kVectors, kRowWarps>)
    normalise_backward(const Gradients<T> io, float* partial) {
  constexpr int kWidth = kVectorWidth<T>, kRowThreads = kRowWarps * kWarp;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ float sums[2][2 * kRowWarps];
  const int width = io.width, vectors = width / kWidth;
  float* const total = reinterpret_cast<float*>(shared_bytes);  // [C], then gamma
  T* const gammas = reinterpret_cast<T*>(total + width);
  stage(gammas, io.gamma, width);
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
  const float inverse_width = 1.0f / static_cast<float>(width);
  constexpr std::int64_t kRows = kBlockRows<kRowWarps>;
  float dgamma[kVectors][kWidth] = {}, dbeta[kVectors][kWidth] = {};
  int buffer = 0;
  for (std::int64_t row = blockIdx.x * kRows + threadIdx.x / kRowThreads; row < io.rows; row += gridDim.x * kRows) {
    const std::int64_t at = row * width;
    uint4 dy[kVectors], x[kVectors], base[kVectors];
    load_row<kRowThreads>(dy, io.dy + at, thread, vectors);
    load_row<kRowThreads>(x, io.x + at, thread, vectors);
    load_row<kRowThreads>(base, io.dresidual == nullptr ? io.dy + at : io.dresidual + at, thread,
                          io.dresidual == nullptr ? 0 : vectors);
    const float mean = io.mean[row], rstd = io.rstd[row];
    float means[2] = {0.0f, 0.0f};  // of g and of g xhat
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = thread + k * kRowThreads;
      if (v >= vectors) continue;
      add_to_sums(dgamma[k], dbeta[k], means, dy[k], x[k], gammas + v * kWidth, mean, rstd);
    }
    row_sums<kRowWarps>(means, sums[buffer]);
    forget_values(dy);
    forget_values(x);
    forget_values(base);
    buffer ^= 1;  // the next row's sums must not overtake a warp that still reads these
    means[0] *= inverse_width;
    means[1] *= inverse_width;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = thread + k * kRowThreads;
      if (v >= vectors) continue;
      float out[kWidth];
      unpack<T>(out, base[k]);
      add_gradient(out, means, dy[k], x[k], gammas + v * kWidth, mean, rstd);
      store_floats(io.dx + at + v * kWidth, out);
    }
  }
  float* const own = partial + blockIdx.x * std::int64_t{2} * width;
  write_partial<kRowThreads>(own, total, dgamma, thread, width);
  write_partial<kRowThreads>(own + width, total, dbeta, thread, width);
}

// Each thread owns columns, whose sums over the block's rows it keeps in the block's row of `partial`.
template <typename T>
__global__ void __launch_bounds__(kLongThreads) normalise_long_backward(const Gradients<T> io, float* partial) {
  __shared__ float sums[2][kLongThreads / kWarp];
  const std::int64_t width = io.width;
  float* const dgamma = partial + blockIdx.x * 2 * width;
  float* const dbeta = dgamma + width;
  for (std::int64_t c = threadIdx.x; c < width; c += kLongThreads) dgamma[c] = dbeta[c] = 0.0f;
  for (std::int64_t row = blockIdx.x; row < io.rows; row += gridDim.x) {
    const T *const dy = io.dy + row * width, *const x = io.x + row * width;
    const float mean = io.mean[row], rstd = io.rstd[row];
    float g_mean = 0.0f, projected = 0.0f;
    for (std::int64_t c = threadIdx.x; c < width; c += kLongThreads) {
      const float g = to_float(dy[c]) * to_float(io.gamma[c]);
      g_mean += g;
      projected += g * ((to_float(x[c]) - mean) * rstd);
    }
    g_mean = block_sum(g_mean, sums[0]) / static_cast<float>(width);
    projected = block_sum(projected, sums[1]) / static_cast<float>(width);
    for (std::int64_t c = threadIdx.x; c < width; c += kLongThreads) {
      const float upstream = to_float(dy[c]), xhat = (to_float(x[c]) - mean) * rstd;
      dgamma[c] += upstream * xhat;
      dbeta[c] += upstream;
      float out = rstd * (upstream * to_float(io.gamma[c]) - g_mean - xhat * projected);
      if (io.dresidual != nullptr) out += to_float(io.dresidual[row * width + c]);
      io.dx[row * width + c] = from_float<T>(out);
    }
  }
}

// dgamma and dbeta (+)= the sums of the columns of partial [count, 2, C], in a fixed order. A block takes 32 columns:
// warp w adds rows w, w + 32, ..., then one warp adds the 32 sums of each column.
__global__ void __launch_bounds__(1024)
    add_partials(float* dgamma, float* dbeta, const float* partial, int count, std::int64_t width, bool accumulate) {
  __shared__ float sums[kWarp][kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t column = std::int64_t{blockIdx.x} * kWarp + lane;
  float sum = 0.0f;
  if (column < 2 * width) {
#pragma unroll 4
    for (int row = warp; row < count; row += kWarp) sum += partial[row * 2 * width + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= 2 * width) return;
  sum = 0.0f;
#pragma unroll
  for (int other = 0; other < kWarp; ++other) sum += sums[other][lane];
  float* const to = column < width ? dgamma + column : dbeta + (column - width);
  *to = accumulate ? *to + sum : sum;
}

// ----------------------------------------------------------------------------------------------------------- launchers
struct Rows {
  Rows(const Tensor& x, const Tensor& mean, const Tensor& rstd) : count(x.shape()[0]), width(x.shape()[1]) {
    PDL_CHECK(x.shape().rank() == 2 && width > 0, "x ", x.shape().to_string());
    PDL_CHECK(width < (std::int64_t{1} << 30), "layer norm of ", width, " elements");
    PDL_CHECK(mean.elements() == count && rstd.elements() == count, mean.shape().to_string(), " means and ",
              rstd.shape().to_string(), " deviations for ", count, " rows");
    PDL_CHECK(mean.dtype() == DType::fp32 && rstd.dtype() == DType::fp32, "statistics have to be fp32");
  }
  std::int64_t count, width;
};

void check_vector(const Tensor& vector, std::int64_t width, DType dtype, const char* name) {
  PDL_CHECK(vector.elements() == width && vector.dtype() == dtype, name, " ", name_of(vector.dtype()), " ",
            vector.shape().to_string(), " for rows of ", width);
}

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Calls work(vectors of a thread, warps of a row), both constants, for rows that fit the registers; false for others.
template <typename T, typename Work>
bool with_row_layout(std::int64_t width, bool aligned, Work work) {
  if (!aligned || width % kVectorWidth<T> != 0 || width > kMostWidth) return false;
  const std::int64_t vectors = width / kVectorWidth<T>;
  if (vectors <= kWarp) {
    work(Constant<1>{}, Constant<1>{});
  } else if (vectors <= 2 * kWarp) {
    work(Constant<2>{}, Constant<1>{});
  } else if (vectors <= 4 * kWarp) {
    work(Constant<4>{}, Constant<1>{});
  } else if (vectors <= 2 * 4 * kWarp) {
    work(Constant<2>{}, Constant<4>{});
  } else if (vectors <= 4 * 4 * kWarp) {
    work(Constant<4>{}, Constant<4>{});
  } else if constexpr (kMostWidth / kVectorWidth<T> > 4 * 4 * kWarp) {
    static_assert(kMostWidth / kVectorWidth<T> <= kMostVectors * 8 * kWarp);
    work(Constant<4>{}, Constant<8>{});
  }
  return true;
}

// Blocks for so many rows: no more than stay on the device at once.
unsigned looping_blocks(std::int64_t rows, std::int64_t block_rows, int per_multiprocessor) {
  return std::min(blocks_for(rows, block_rows), static_cast<unsigned>(multiprocessors() * per_multiprocessor));
}

// Sums [count, 2, C] of dgamma and dbeta that blocks have left in scratch memory.
struct Partials {
  const float* sums;
  int count;
};

template <typename T>
Partials launch_backward(const Gradients<T>& io, CudaScratch& scratch, cudaStream_t stream) {
  float* partial = nullptr;
  unsigned blocks = 0;
  const auto prepare = [&](std::int64_t block_rows, int per_multiprocessor) {
    blocks = looping_blocks(io.rows, block_rows, per_multiprocessor);
    const std::int64_t floats = std::int64_t{2} * blocks * io.width;
    partial = static_cast<float*>(scratch.get(floats * static_cast<std::int64_t>(sizeof(float))));
  };
  const bool aligned = aligned_to_vectors(io.dx, io.dy, io.dresidual, io.x);
  const bool fits = with_row_layout<T>(io.width, aligned, [&](auto vectors, auto row_warps) {
    constexpr int kVectors = decltype(vectors)::value, kRowWarps = decltype(row_warps)::value;
    prepare(kBlockRows<kRowWarps>, kBackwardBlocks<T, kVectors, kRowWarps>);
    const std::size_t shared = static_cast<std::size_t>(io.width) * (sizeof(float) + sizeof(T));
    normalise_backward<T, kVectors, kRowWarps><<<blocks, kBlockThreads<kRowWarps>, shared, stream>>>(io, partial);
    check_launch("normalise_backward");
  });
  if (!fits) {
    prepare(1, kLongBlocks);
    normalise_long_backward<T><<<blocks, kLongThreads, 0, stream>>>(io, partial);
    check_launch("normalise_long_backward");
  }
  return {partial, static_cast<int>(blocks)};
}

}  // namespace
}  // namespace cuda

void CudaBackend::layernorm_forward(Tensor y, Tensor mean, Tensor rstd, Tensor x, Tensor gamma, Tensor beta) {
  using namespace cuda;
  const Rows rows(x, mean, rstd);
  PDL_CHECK(y.shape() == x.shape() && y.dtype() == x.dtype(), "y ", y.shape().to_string(), ", x ",
            x.shape().to_string());
  check_vector(gamma, rows.width, x.dtype(), "gamma");
  check_vector(beta, rows.width, x.dtype(), "beta");
  with_compute_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T *const y_data = pointer<T>(y), *const x_data = pointer<T>(x);
    T *const scales = pointer<T>(gamma), *const shifts = pointer<T>(beta);
    float *const means = pointer<float>(mean), *const rstds = pointer<float>(rstd);
    const bool aligned = aligned_to_vectors(y_data, x_data);
    const bool fits = with_row_layout<T>(rows.width, aligned, [&](auto vectors, auto row_warps) {
      constexpr int kVectors = decltype(vectors)::value, kRowWarps = decltype(row_warps)::value;
      const unsigned blocks = looping_blocks(rows.count, kBlockRows<kRowWarps>, kForwardBlocks<kRowWarps>);
      const std::size_t shared = static_cast<std::size_t>(rows.width) * 2 * sizeof(T);
      normalise<T, kVectors, kRowWarps><<<blocks, kBlockThreads<kRowWarps>, shared, stream_>>>(
          y_data, means, rstds, x_data, scales, shifts, rows.count, static_cast<int>(rows.width));
      check_launch("normalise");
    });
    if (fits) return;
    normalise_long<T><<<looping_blocks(rows.count, 1, 8), kLongThreads, 0, stream_>>>(
        y_data, means, rstds, x_data, scales, shifts, rows.count, rows.width);
    check_launch("normalise_long");
  });
}

void CudaBackend::layernorm_backward(Tensor dx, Tensor dgamma, Tensor dbeta, Tensor dy, Tensor dresidual, Tensor x,
                                     Tensor gamma, Tensor mean, Tensor rstd, bool accumulate) {
  using namespace cuda;
  const Rows rows(x, mean, rstd);
  PDL_CHECK(dx.shape() == x.shape() && dy.shape() == x.shape(), "dx ", dx.shape().to_string(), ", dy ",
            dy.shape().to_string(), ", x ", x.shape().to_string());
  PDL_CHECK(dx.dtype() == x.dtype() && dy.dtype() == x.dtype(), "dx ", name_of(dx.dtype()), ", dy ",
            name_of(dy.dtype()), ", x ", name_of(x.dtype()));
  PDL_CHECK(!dresidual.defined() || (dresidual.elements() == x.elements() && dresidual.dtype() == x.dtype()),
            "dresidual ", name_of(dresidual.dtype()), " ", dresidual.shape().to_string());
  check_vector(gamma, rows.width, x.dtype(), "gamma");
  check_vector(dgamma, rows.width, DType::fp32, "dgamma");
  check_vector(dbeta, rows.width, DType::fp32, "dbeta");
  with_compute_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Gradients<T> io = {.dx = pointer<T>(dx),
                             .dy = pointer<T>(dy),
                             .dresidual = pointer<T>(dresidual),
                             .x = pointer<T>(x),
                             .gamma = pointer<T>(gamma),
                             .mean = pointer<float>(mean),
                             .rstd = pointer<float>(rstd),
                             .rows = rows.count,
                             .width = static_cast<int>(rows.width)};
    const Partials partials = launch_backward<T>(io, scratch_, stream_);
    add_partials<<<blocks_for(2 * rows.width, kWarp), kWarp * kWarp, 0, stream_>>>(
        pointer<float>(dgamma), pointer<float>(dbeta), partials.sums, partials.count, rows.width, accumulate);
    check_launch("add_partials");
  });
}

}  // namespace pdl
