// Softmax and cross entropy of logits [M, V], one block per row. A row comes from memory once, into shared memory where
// it fits, and its gradient goes there once. A thread reads and writes the same elements in every pass, so the gradient
// may take the place of the logits, and passes need no barrier but those of their reductions.

#include <cuda_pipeline.h>

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

// ----------------------------------------------------------------------------------------------------------- launchers

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
  const int vectors = (rows.width + kWidth - 1) / kWidth;
  const int threads = std::min((vectors + kWarp - 1) / kWarp * kWarp, kMostThreads);
  kernel<<<blocks_for(count, 1), static_cast<unsigned>(threads), static_cast<std::size_t>(shared_bytes), stream>>>(
      rows);
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

}  // namespace
}  // namespace cuda

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
