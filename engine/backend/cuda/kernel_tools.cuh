#pragma once
// What the kernels share: element types, 16-byte vectors, reductions over warps and blocks, launch shapes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "engine/backend/backend.h"
#include "engine/backend/cuda/dropout_mask.cuh"
#include "engine/base/error.h"
#include "engine/device/cuda_device.h"

namespace pdl::cuda {

using bf16 = __nv_bfloat16;
using half = __half;

inline constexpr int kWarp = 32;

// ------------------------------------------------------------------------------------------------------ element types
template <typename T>
struct DTypeOfDevice;
template <>
struct DTypeOfDevice<float> {
  static constexpr DType value = DType::fp32;
};
template <>
struct DTypeOfDevice<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOfDevice<half> {
  static constexpr DType value = DType::fp16;
};

/// Typed pointer into a tensor; null for an undefined one.
template <typename T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.raw());
}

/// Calls work(T{}) with the element type of a compute tensor: fp32, bf16 or fp16.
template <typename Work>
void with_compute_type(DType dtype, Work work) {
  switch (dtype) {
    case DType::fp32:
      return work(float{});
    case DType::bf16:
      return work(bf16{});
    case DType::fp16:
      return work(half{});
    default:
      PDL_CHECK(false, "the GPU computes in fp32, bf16 and fp16, not in ", name_of(dtype));
  }
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
__device__ inline float to_float(half x) { return __half2float(x); }

template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline half from_float<half>(float x) {
  return __float2half_rn(x);
}

/// kWidth elements that move as one access.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T at[kWidth];
};
/// Elements in 16 bytes.
template <typename T>
inline constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

template <int kWidth, typename T>
__device__ inline Vector<T, kWidth> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, kWidth>*>(from);
}
/// `to` is in global memory. 8 and 16 bytes move as integers: copied as structs of elements, the compiler splits many
/// of these accesses again.
template <int kWidth, typename T>
__device__ inline void store_vector(T* to, const Vector<T, kWidth>& vector) {
  using Word = std::conditional_t<sizeof vector % 16 == 0, uint4, uint2>;
  if constexpr (sizeof vector % sizeof(Word) == 0) {
    constexpr int kWords = static_cast<int>(sizeof vector / sizeof(Word));
    Word words[kWords];
    memcpy(words, &vector, sizeof vector);
#pragma unroll
    for (int i = 0; i < kWords; ++i) __stwb(reinterpret_cast<Word*>(to) + i, words[i]);
  } else {
    *reinterpret_cast<Vector<T, kWidth>*>(to) = vector;
  }
}

/// The same accesses with conversion to and from fp32. `from` and `to` are aligned to the whole vector.
template <int kWidth, typename T>
__device__ inline void load_floats(float (&to)[kWidth], const T* from) {
  const Vector<T, kWidth> vector = load_vector<kWidth>(from);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) to[i] = to_float(vector.at[i]);
}
template <int kWidth, typename T>
__device__ inline void store_floats(T* to, const float (&from)[kWidth]) {
  Vector<T, kWidth> vector;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) vector.at[i] = from_float<T>(from[i]);
  store_vector(to, vector);
}

/// Numbers vectors of kWidth elements. Division by 32-bit numbers is many times faster; single elements are the slow
/// path for everything that does not fit.
template <int kWidth>
using VectorIndex = std::conditional_t<kWidth == 1, std::int64_t, std::uint32_t>;
/// Whether so many elements are whole vectors that VectorIndex can count.
template <typename T>
bool fits_vectors(std::int64_t elements) {
  return elements % kVectorWidth<T> == 0 && elements / kVectorWidth<T> < (std::int64_t{1} << 32) - 4096;
}
/// Calls work(std::integral_constant<int, kWidth>{}): 16-byte vectors of T, or single elements.
template <typename T, typename Work>
void with_vector_width(bool vectors, Work work) {
  if (vectors) {
    work(std::integral_constant<int, kVectorWidth<T>>{});
  } else {
    work(std::integral_constant<int, 1>{});
  }
}

/// True when all of the pointers are multiples of 16 bytes: then whole vectors may be moved.
template <typename... Pointers>
bool aligned_to_vectors(const Pointers*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

// --------------------------------------------------------------------------------------------------------- reductions
template <typename T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
}

/// Sum over the block, the same on every thread; whole warps only. `shared` holds one T per warp; may be used again
/// after the next __syncthreads().
template <typename T>
__device__ inline T block_sum(T x, T* shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  x = warp_sum(x);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  x = lane < warps ? shared[lane] : T{0};
  return warp_sum(x);
}

// ------------------------------------------------------------------------------------------------------------ launches
/// Blocks that cover `items` with `per_block` each.
inline unsigned blocks_for(std::int64_t items, std::int64_t per_block) {
  const std::int64_t blocks = (items + per_block - 1) / per_block;
  PDL_CHECK(blocks < (std::int64_t{1} << 31), items, " items are too many for one launch");
  return static_cast<unsigned>(std::max<std::int64_t>(blocks, 1));
}

/// Multiprocessors of the current device: kernels that loop start a few blocks on each.
inline int multiprocessors() {
  int device = 0, count = 0;
  PDL_CUDA(cudaGetDevice(&device));
  PDL_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

/// After every launch: says which kernel could not start.
inline void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

}  // namespace pdl::cuda
