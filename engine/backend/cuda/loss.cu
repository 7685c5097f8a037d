// Softmax and cross entropy of logits [M, V], one block per row. A row comes from memory once, into shared memory where
// it fits, and its gradient goes there once. A thread reads and writes the same elements in every pass, so the gradient
// may take the place of the logits, and passes need no barrier but those of their reductions.
//
// Where classes are divided over ranks a row comes from memory twice: once for its four numbers, and, when those of all
// shards are known, once for its gradient.

#include <cuda_pipeline.h>

#include <climits>
#include <cmath>
#include <type_traits>

#include "engine/backend/cuda/cuda_backend.h"
#include "engine/backend/cuda/kernel_tools.cuh"

namespace pdl {
namespace cuda {
namespace {

// Two rows of a large vocabulary fit into a multiprocessor's shared memory: while one is loaded the other computes.
constexpr int kMostThreads = 512;

template <typename T>
struct LossRows {
  T* dlogits;  // null: nobody wants it; may be logits
  float *row_loss, *row_correct;
  const T* logits;
  const std::int32_t* targets;
  int width, classes;
  float scale;
};

// One shard of each row, and the stats [S, M, 4] of all shards once these are known.
template <typename T>
struct ShardRows {
  LossRows<T> rows;
  float4* stats;
  int first_class, shards;
};

// ------------------------------------------------------------------------------------------------------ device helpers

// exp for x <= 0: the accurate one for fp32, two instructions for types that round the result away.
template <typename T>
__device__ float exp_of(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return expf(x);
  } else {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
    return result;
  }
}

// As block_sum.
__device__ float block_max(float x, float* shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  x = warp_max(x);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return warp_max(lane < warps ? shared[lane] : -INFINITY);
}

// work(first) for the vectors of [0, count) that are this thread's: `first` is a vector's first element.
template <int kWidth, typename Work>
__device__ void for_own_vectors(int count, Work work) {
  const int step = static_cast<int>(blockDim.x) * kWidth;
  for (int first = static_cast<int>(threadIdx.x) * kWidth; first < count; first += step) work(first);
}

// This thread's elements of the row, copied to `to` in shared memory.
template <int kWidth, typename T>
__device__ void stage_row(T* to, const T* from, int classes) {
  for_own_vectors<kWidth>(classes, [&](int first) {
    if constexpr (sizeof(T) * kWidth == 16) {
      __pipeline_memcpy_async(to + first, from + first, 16);
    } else {
      for (int k = 0; k < kWidth; ++k) to[first + k] = from[first + k];
    }
  });
  __pipeline_commit();
  __pipeline_wait_prior(0);
}

// Elements first .. first + kWidth - 1 of a row; what lies behind the classes counts as minus infinity.
template <int kWidth, typename T>
__device__ void load_logits(float (&to)[kWidth], const T* row, int first, int classes) {
  load_floats(to, row + first);
  if (first + kWidth <= classes) return;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    if (first + k >= classes) to[k] = -INFINITY;
  }
}

// True when one of this thread's logits in front of the target is the largest too.
template <int kWidth, typename T>
__device__ bool one_in_front(const T* row, int target, int classes, float largest) {
  bool found = false;
  for_own_vectors<kWidth>(target, [&](int first) {
    float values[kWidth];
    load_logits(values, row, first, classes);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) found = found || (first + k < target && values[k] == largest);
  });
  return found;
}

// gradient = factor * exp(logits - largest), `of_target` at the target, 0 behind the classes.
template <int kWidth, typename T>
__device__ void write_gradient(T* gradient, const T* row, const LossRows<T>& rows, float largest, float factor,
                               int target, float of_target) {
  for_own_vectors<kWidth>(rows.width, [&](int first) {
    float values[kWidth] = {};
    if (first < rows.classes) {
      load_logits(values, row, first, rows.classes);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = factor * exp_of<T>(values[k] - largest);
    }
    const bool has_target = first <= target && target<first + kWidth, has_padding = first + kWidth> rows.classes;
    if (has_target || has_padding) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (first + k == target) values[k] = of_target;
        if (first + k >= rows.classes) values[k] = 0.0f;
      }
    }
    store_floats(gradient + first, values);
  });
}

// As block_sum.
__device__ int block_min(int x, int* shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  x = __reduce_min_sync(0xffffffffu, x);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return __reduce_min_sync(0xffffffffu, lane < warps ? shared[lane] : INT_MAX);
}

// Of logits seen so far: the largest, the sum of exp(logit - largest) and where the first largest stands. A NaN is no
// largest; it comes out in the sum.
template <typename T>
struct RunningSoftmax {
  float largest = -INFINITY, sum = 0.0f;
  int first = INT_MAX;

  // What to subtract: all at minus infinity add up to 0.
  static __device__ float shift(float largest) { return largest == -INFINITY ? 0.0f : largest; }

  // Logits from `place` on, which come in increasing order.
  template <int kWidth>
  __device__ void add(const float (&values)[kWidth], int place) {
    float before = largest;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (values[k] > largest) {
        largest = values[k];
        first = place + k;
      }
    }
    if (largest > before) sum *= exp_of<T>(before - shift(largest));
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum += exp_of<T>(values[k] - shift(largest));
  }
};

// {largest, sum, target's logit, first largest} of a whole row, from those of its shards.
__device__ float4 join_row(const float4* stats, std::int64_t row, std::int64_t count, int shards) {
  float4 whole = {-INFINITY, 0.0f, -INFINITY, -1.0f};
  for (int shard = 0; shard < shards; ++shard) {
    const float4 one = stats[shard * count + row];
    whole.z = fmaxf(whole.z, one.z);
    if (one.x > whole.x) {
      whole.x = one.x;
      whole.w = one.w;
    }
  }
  for (int shard = 0; shard < shards; ++shard) {
    const float4 one = stats[shard * count + row];
    whole.y += one.y * expf(one.x - whole.x);
  }
  return whole;
}

// ------------------------------------------------------------------------------------------------------------- kernels

template <typename T, int kWidth, bool kStaged>
__global__ void __launch_bounds__(kMostThreads, 2) cross_entropy_kernel(LossRows<T> rows) {
  extern __shared__ uint4 staged[];  // the row, when kStaged
  __shared__ float shared[2][kMostThreads / kWarp];
  // The last rows first: they are the ones that the matrix product has just left in the cache.
  const std::int64_t row = gridDim.x - 1 - blockIdx.x;
  const int classes = rows.classes, target = rows.targets[row];
  const T* const logits = rows.logits + row * rows.width;
  T* const gradient = rows.dlogits == nullptr ? nullptr : rows.dlogits + row * rows.width;
  const bool first_thread = threadIdx.x == 0;

  if (target < 0 || target >= classes) {  // -1 is ignored; anything else is no class and must not be read
    if (first_thread) rows.row_loss[row] = target == -1 ? 0.0f : nanf("");
    if (first_thread) rows.row_correct[row] = 0.0f;
    if (gradient == nullptr) return;
    for_own_vectors<kWidth>(rows.width, [&](int first) {
      const float zeros[kWidth] = {};
      store_floats(gradient + first, zeros);
    });
    return;
  }

  // Read before the gradient takes its place: no thread writes until all have passed the barriers below.
  const float target_logit = to_float(logits[target]);
  const T* own = logits;
  if constexpr (kStaged) {
    stage_row<kWidth>(reinterpret_cast<T*>(staged), logits, classes);
    own = reinterpret_cast<const T*>(staged);
  }

  float largest = -INFINITY;  // NaNs do not count: they come out in the sum
  for_own_vectors<kWidth>(classes, [&](int first) {
    float values[kWidth];
    load_logits(values, own, first, classes);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) largest = fmaxf(largest, values[k]);
  });
  largest = block_max(largest, shared[0]);

  float sum = 0.0f;
  for_own_vectors<kWidth>(classes, [&](int first) {
    float values[kWidth];
    load_logits(values, own, first, classes);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum += exp_of<T>(values[k] - largest);
  });
  sum = block_sum(sum, shared[1]);

  bool correct = target_logit == largest;
  if (correct) {  // the whole block: it may not be the first
    correct = __syncthreads_or(one_in_front<kWidth>(own, target, classes, largest) ? 1 : 0) == 0;
  }

  if (first_thread) rows.row_loss[row] = logf(sum) + (largest - target_logit);
  if (first_thread) rows.row_correct[row] = correct ? 1.0f : 0.0f;
  if (gradient == nullptr) return;
  const double probability = static_cast<double>(exp_of<T>(target_logit - largest)) / static_cast<double>(sum);
  write_gradient<kWidth>(gradient, own, rows, largest, rows.scale / sum, target,
                         static_cast<float>(static_cast<double>(rows.scale) * (probability - 1.0)));
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kMostThreads) shard_stats_kernel(ShardRows<T> shard) {
  __shared__ float shared[2][kMostThreads / kWarp];
  __shared__ int places[kMostThreads / kWarp];
  const std::int64_t row = gridDim.x - 1 - blockIdx.x;
  const int classes = shard.rows.classes, target = shard.rows.targets[row] - shard.first_class;
  const T* const logits = shard.rows.logits + row * shard.rows.width;
  RunningSoftmax<T> own;
  for_own_vectors<kWidth>(classes, [&](int first) {
    float values[kWidth];
    load_logits(values, logits, first, classes);
    own.add(values, first);
  });
  const float largest = block_max(own.largest, shared[0]);
  const float sum = block_sum(own.sum * exp_of<T>(own.largest - RunningSoftmax<T>::shift(largest)), shared[1]);
  const int first = block_min(own.largest == largest ? own.first : INT_MAX, places);
  if (threadIdx.x != 0) return;
  const bool has_target = target >= 0 && target < classes;
  shard.stats[row] = {largest, sum, has_target ? to_float(logits[target]) : -INFINITY,
                      first == INT_MAX ? -1.0f : static_cast<float>(shard.first_class + first)};
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kMostThreads) join_shards_kernel(ShardRows<T> shard) {
  const LossRows<T>& rows = shard.rows;
  const std::int64_t row = gridDim.x - 1 - blockIdx.x;
  const int wanted = rows.targets[row], own_target = wanted - shard.first_class;
  const bool ignored = wanted < 0, first_thread = threadIdx.x == 0;
  const float4 whole = join_row(shard.stats, row, gridDim.x, shard.shards);
  if (first_thread) rows.row_loss[row] = ignored ? 0.0f : logf(whole.y) + (whole.x - whole.z);
  if (first_thread) rows.row_correct[row] = !ignored && whole.w == static_cast<float>(wanted) ? 1.0f : 0.0f;
  if (rows.dlogits == nullptr) return;
  T* const gradient = rows.dlogits + row * rows.width;
  if (ignored) {
    for_own_vectors<kWidth>(rows.width, [&](int first) {
      const float zeros[kWidth] = {};
      store_floats(gradient + first, zeros);
    });
    return;
  }
  const int target = own_target >= 0 && own_target < rows.classes ? own_target : -1;
  const double probability = static_cast<double>(exp_of<T>(whole.z - whole.x)) / static_cast<double>(whole.y);
  write_gradient<kWidth>(gradient, rows.logits + row * rows.width, rows, whole.x, rows.scale / whole.y, target,
                         static_cast<float>(static_cast<double>(rows.scale) * (probability - 1.0)));
}

// ----------------------------------------------------------------------------------------------------------- launchers

// Threads for a row of so many vectors.
unsigned threads_for(int vectors) {
  return static_cast<unsigned>(std::max(kWarp, std::min((vectors + kWarp - 1) / kWarp * kWarp, kMostThreads)));
}

// Bytes of dynamic shared memory that a block may ask for, beside the few of its reductions.
int most_shared_bytes() {
  int device = 0, bytes = 0;
  PDL_CUDA(cudaGetDevice(&device));
  PDL_CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes - 1024;
}

template <typename T, int kWidth, bool kStaged>
void launch(const LossRows<T>& rows, std::int64_t count, int shared_bytes, cudaStream_t stream) {
  auto* const kernel = cross_entropy_kernel<T, kWidth, kStaged>;
  if (kStaged) {
    PDL_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    PDL_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  }
  const unsigned threads = threads_for((rows.width + kWidth - 1) / kWidth);
  kernel<<<blocks_for(count, 1), threads, static_cast<std::size_t>(shared_bytes), stream>>>(rows);
  check_launch("cross_entropy_kernel");
}

template <int kWidth, typename T>
void launch_staged_if_it_fits(const LossRows<T>& rows, std::int64_t count, cudaStream_t stream) {
  const std::int64_t vectors = (rows.classes + kWidth - 1) / kWidth;
  const std::int64_t bytes = (vectors * kWidth * static_cast<std::int64_t>(sizeof(T)) + 15) / 16 * 16;
  if (bytes <= most_shared_bytes()) {
    launch<T, kWidth, true>(rows, count, static_cast<int>(bytes), stream);
  } else {
    launch<T, kWidth, false>(rows, count, 0, stream);
  }
}

// The part of both halves that is the same; throws when tensors do not fit.
template <typename T>
ShardRows<T> shard_rows(const Tensor& logits, const Tensor& targets, const Tensor& stats, std::int64_t first_class,
                        std::int64_t classes) {
  PDL_CHECK(logits.shape().rank() == 2 && first_class >= 0 && classes >= 0 && classes <= logits.shape()[1], "logits ",
            logits.shape().to_string(), " of ", classes, " classes from ", first_class, " on");
  const std::int64_t count = logits.shape()[0], width = logits.shape()[1];
  // Places in a row are 32-bit numbers, and classes are numbered in fp32.
  PDL_CHECK(width <= (std::int64_t{1} << 30) && first_class + classes <= (std::int64_t{1} << 24), first_class, " + ",
            width, " classes");
  PDL_CHECK(targets.elements() == count && count > 0 && stats.elements() % (4 * count) == 0, targets.elements(),
            " targets and ", stats.elements(), " stats for ", logits.shape().to_string());
  PDL_CHECK(aligned_to_vectors(stats.data<float>()), "stats are read four at a time");
  return {.rows = {.dlogits = nullptr,
                   .row_loss = nullptr,
                   .row_correct = nullptr,
                   .logits = pointer<T>(logits),
                   .targets = targets.data<std::int32_t>(),
                   .width = static_cast<int>(width),
                   .classes = static_cast<int>(classes),
                   .scale = 0.0f},
          .stats = reinterpret_cast<float4*>(stats.data<float>()),
          .first_class = static_cast<int>(first_class),
          .shards = static_cast<int>(stats.elements() / (4 * count))};
}

}  // namespace
}  // namespace cuda

void CudaBackend::cross_entropy_shard(Tensor stats, Tensor logits, Tensor targets, std::int64_t first_class,
                                      std::int64_t classes) {
  using namespace cuda;
  with_compute_type(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const ShardRows<T> shard = shard_rows<T>(logits, targets, stats, first_class, classes);
    PDL_CHECK(shard.shards == 1, stats.elements(), " stats of one shard");
    const std::int64_t width = logits.shape()[1];
    with_vector_width<T>(width % kVectorWidth<T> == 0 && aligned_to_vectors(shard.rows.logits), [&](auto wide) {
      constexpr int kWidth = decltype(wide)::value;
      const unsigned threads = threads_for((shard.rows.width + kWidth - 1) / kWidth);
      shard_stats_kernel<T, kWidth><<<blocks_for(logits.shape()[0], 1), threads, 0, stream_>>>(shard);
      check_launch("shard_stats_kernel");
    });
  });
}

void CudaBackend::cross_entropy_join(Tensor dlogits, Tensor row_loss, Tensor row_correct, Tensor logits, Tensor targets,
                                     Tensor stats, std::int64_t first_class, std::int64_t classes, double scale) {
  using namespace cuda;
  const std::int64_t count = logits.shape()[0], width = logits.shape()[1];
  PDL_CHECK(row_loss.elements() == count && row_correct.elements() == count, count, " rows, ", row_loss.elements(),
            " losses, ", row_correct.elements(), " marks");
  PDL_CHECK(!dlogits.defined() || (dlogits.shape() == logits.shape() && dlogits.dtype() == logits.dtype()), "dlogits ",
            name_of(dlogits.dtype()), " ", dlogits.shape().to_string());
  with_compute_type(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    ShardRows<T> shard = shard_rows<T>(logits, targets, stats, first_class, classes);
    shard.rows.dlogits = pointer<T>(dlogits);
    shard.rows.row_loss = row_loss.data<float>();
    shard.rows.row_correct = row_correct.data<float>();
    shard.rows.scale = static_cast<float>(scale);
    const bool vectors = width % kVectorWidth<T> == 0 && aligned_to_vectors(shard.rows.logits, shard.rows.dlogits);
    with_vector_width<T>(vectors, [&](auto wide) {
      constexpr int kWidth = decltype(wide)::value;
      const unsigned threads = threads_for((shard.rows.width + kWidth - 1) / kWidth);
      join_shards_kernel<T, kWidth><<<blocks_for(count, 1), threads, 0, stream_>>>(shard);
      check_launch("join_shards_kernel");
    });
  });
}

void CudaBackend::cross_entropy(Tensor dlogits, Tensor row_loss, Tensor row_correct, Tensor logits, Tensor targets,
                                std::int64_t classes, double scale) {
  using namespace cuda;
  PDL_CHECK(logits.shape().rank() == 2 && classes > 0 && classes <= logits.shape()[1], "logits ",
            logits.shape().to_string(), " of ", classes, " classes");
  const std::int64_t count = logits.shape()[0], width = logits.shape()[1];
  PDL_CHECK(width <= (std::int64_t{1} << 30), width, " logits in a row");  // places in a row are 32-bit numbers
  PDL_CHECK(row_loss.elements() == count && row_correct.elements() == count && targets.elements() == count, count,
            " rows, ", row_loss.elements(), " losses, ", row_correct.elements(), " marks, ", targets.elements(),
            " targets");
  PDL_CHECK(!dlogits.defined() || (dlogits.shape() == logits.shape() && dlogits.dtype() == logits.dtype()), "dlogits ",
            name_of(dlogits.dtype()), " ", dlogits.shape().to_string());
  with_compute_type(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const LossRows<T> rows = {.dlogits = pointer<T>(dlogits),
                              .row_loss = row_loss.data<float>(),
                              .row_correct = row_correct.data<float>(),
                              .logits = pointer<T>(logits),
                              .targets = targets.data<std::int32_t>(),
                              .width = static_cast<int>(width),
                              .classes = static_cast<int>(classes),
                              .scale = static_cast<float>(scale)};
    if (count == 0) return;
    if (width % kVectorWidth<T> == 0 && aligned_to_vectors(rows.logits, rows.dlogits)) {
      launch_staged_if_it_fits<kVectorWidth<T>>(rows, count, stream_);
    } else {
      launch_staged_if_it_fits<1>(rows, count, stream_);
    }
  });
}

}  // namespace pdl
