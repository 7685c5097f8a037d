#include "engine/backend/cuda/attention_kernels.h"

#include "engine/backend/cuda/dropout_mask.cuh"
#include "engine/backend/cuda/kernel_tools.cuh"

namespace pdl::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarp;  // a warp works on one row of scores
constexpr int kLaneKeys = 4;                     // keys of a lane side by side: one step of the random numbers
constexpr int kStep = kWarp * kLaneKeys;         // keys of a warp at once

// ------------------------------------------------------------------------------------------------------ device helpers
/// What the kernels need of a range of heads and of dropout.
struct Rows {
  HeadRange heads;
  std::int64_t pitch;       ///< of the scores
  std::int64_t first_head;  ///< of this shard, in the unsharded sample
  bool drops;
  DropoutMask mask;

  Rows(const HeadRange& heads_in, const DropoutKey& key, std::int64_t first_head_in)
      : heads(heads_in), pitch(heads_in.t_pitch()), first_head(first_head_in), drops(key.rate > 0.0), mask(key) {}

  __host__ __device__ std::int64_t count() const { return heads.count * heads.t; }
};

/// One row of scores: a head, counted over all samples, and a query.
struct Row {
  std::int64_t head, query;
  std::int64_t element;    ///< of key 0, in the unsharded sample
  std::int64_t sample_id;  ///< 0 without dropout

  __device__ Row(const Rows& rows, std::int64_t index) {
    head = rows.heads.first + index / rows.heads.t;
    query = index % rows.heads.t;
    element = ((rows.first_head + head % rows.heads.a) * rows.heads.t + query) * rows.heads.t;
    sample_id = rows.drops ? rows.mask.sample_ids[head / rows.heads.a] : 0;
  }
};

__device__ inline std::uint32_t word_at(const uint4& low, const uint4& high, int index) {
  switch (index) {
    case 0:
      return low.x;
    case 1:
      return low.y;
    case 2:
      return low.z;
    case 3:
      return low.w;
    case 4:
      return high.x;
    case 5:
      return high.y;
    case 6:
      return high.z;
    default:
      return high.w;
  }
}

/// Dropout's factors of four elements from `element` on, which may be any.
__device__ inline void four_scales(float (&to)[kLaneKeys], const DropoutMask& mask, std::int64_t sample_id,
                                   std::int64_t element) {
  const int shift = static_cast<int>(element % 4);
  const uint4 low = mask.words(sample_id, element / 4);
  const uint4 high = shift == 0 ? low : mask.words(sample_id, element / 4 + 1);
#pragma unroll
  for (int i = 0; i < kLaneKeys; ++i) to[i] = mask.scale_of(word_at(low, high, shift + i));
}

// ------------------------------------------------------------------------------------------------------------- kernels
struct Parts {
  void* at[3];
};

// One vector of kWidth elements per thread. `d` and `d_pitch` count vectors; `total` is that of all threads.
template <typename T, int kWidth, bool kGather>
__global__ void move_heads_kernel(Parts matrices, T* interleaved, unsigned parts, HeadRange heads, unsigned d,
                                  unsigned d_pitch, unsigned total) {
  using Piece = Vector<T, kWidth>;
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= total) return;
  const unsigned columns = kGather ? d_pitch : d;
  const unsigned column = index % columns;
  const unsigned part = index / columns % parts;
  const unsigned row = index / columns / parts;  // of all heads of the range
  const unsigned t = static_cast<unsigned>(heads.t), a = static_cast<unsigned>(heads.a);
  const unsigned head = static_cast<unsigned>(heads.first) + row / t;
  const std::int64_t token = static_cast<std::int64_t>(head / a) * t + row % t;
  Piece* const own = static_cast<Piece*>(part == 0   ? matrices.at[0]
                                         : part == 1 ? matrices.at[1]
                                                     : matrices.at[2]) +
                     static_cast<std::int64_t>(row) * d_pitch + column;
  Piece* const other = reinterpret_cast<Piece*>(interleaved) + ((token * a + head % a) * parts + part) * d + column;
  if constexpr (kGather) {
    Piece piece;
    if (column < d) {
      piece = *other;
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) piece.at[i] = from_float<T>(0.0f);
    }
    *own = piece;
  } else {
    *other = *own;
  }
}

// A row of weights in T begins where its scores in fp32 began. A warp reads kStep scores, then writes over their first
// half at most: scores that it has still to read lie behind what it writes.
template <typename T>
__global__ void causal_softmax_kernel(float* scores, float* stats, Rows rows) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
  if (index >= rows.count()) return;  // the whole warp
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const Row row(rows, index);
  float* const from = scores + index * rows.pitch;
  T* const to = reinterpret_cast<T*>(from);

  float largest = -INFINITY, sum = 0.0f;
  for (std::int64_t key = lane * kLaneKeys; key <= row.query; key += kStep) {
    const Vector<float, kLaneKeys> four = load_vector<kLaneKeys>(from + key);
    float top = largest;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      if (key + i <= row.query) top = fmaxf(top, four.at[i]);
    }
    sum *= expf(largest - top);
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      if (key + i <= row.query) sum += expf(four.at[i] - top);
    }
    largest = top;
  }
  const float top = warp_max(largest);
  // A lane without keys adds 0: its largest is minus infinity.
  const float log_sum_exp = top + logf(warp_sum(sum * expf(largest - top)));
  if (lane == 0) stats[row.head * rows.heads.t + row.query] = log_sum_exp;

  for (std::int64_t first = 0; first < rows.pitch; first += kStep) {
    const std::int64_t key = first + lane * kLaneKeys;
    Vector<float, kLaneKeys> four;
    if (key <= row.query) four = load_vector<kLaneKeys>(from + key);
    __syncwarp();
    if (key >= rows.pitch) continue;
    Vector<T, kLaneKeys> weights;
    float kept[kLaneKeys] = {1.0f, 1.0f, 1.0f, 1.0f};
    if (rows.drops && key <= row.query) four_scales(kept, rows.mask, row.sample_id, row.element + key);
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      weights.at[i] = from_float<T>(key + i <= row.query ? kept[i] * expf(four.at[i] - log_sum_exp) : 0.0f);
    }
    store_vector(to + key, weights);
  }
}

template <typename T>
__global__ void causal_softmax_backward_kernel(float* scores, float* dweights, const T* dy, const T* y,
                                               const float* stats, Rows rows) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
  if (index >= rows.count()) return;  // the whole warp
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const Row row(rows, index);
  float *const scores_row = scores + index * rows.pitch, *const dweights_row = dweights + index * rows.pitch;
  T *const to_weights = reinterpret_cast<T*>(scores_row), *const to_dscores = reinterpret_cast<T*>(dweights_row);

  const std::int64_t token = row.head / rows.heads.a * rows.heads.t + row.query;
  const std::int64_t vector = (token * rows.heads.a + row.head % rows.heads.a) * rows.heads.d;
  float dy_y = 0.0f;
  for (std::int64_t d = lane; d < rows.heads.d; d += kWarp) dy_y += to_float(dy[vector + d]) * to_float(y[vector + d]);
  dy_y = warp_sum(dy_y);
  const float log_sum_exp = stats[row.head * rows.heads.t + row.query];

  for (std::int64_t first = 0; first < rows.pitch; first += kStep) {
    const std::int64_t key = first + lane * kLaneKeys;
    Vector<float, kLaneKeys> score, dweight;
    if (key <= row.query) {
      score = load_vector<kLaneKeys>(scores_row + key);
      dweight = load_vector<kLaneKeys>(dweights_row + key);
    }
    __syncwarp();
    if (key >= rows.pitch) continue;
    Vector<T, kLaneKeys> weights, dscores;
    float kept[kLaneKeys] = {1.0f, 1.0f, 1.0f, 1.0f};
    if (rows.drops && key <= row.query) four_scales(kept, rows.mask, row.sample_id, row.element + key);
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const bool counts = key + i <= row.query;
      const float weight = counts ? expf(score.at[i] - log_sum_exp) : 0.0f;
      weights.at[i] = from_float<T>(counts ? kept[i] * weight : 0.0f);
      dscores.at[i] = from_float<T>(counts ? weight * (kept[i] * dweight.at[i] - dy_y) : 0.0f);
    }
    store_vector(to_weights + key, weights);
    store_vector(to_dscores + key, dscores);
  }
}

// ----------------------------------------------------------------------------------------------------------- launchers
template <typename T, int kWidth, bool kGather>
void launch_move(const HeadParts& matrices, void* interleaved, int parts, const HeadRange& heads, cudaStream_t stream) {
  const Parts at = {{matrices[0], matrices[1], matrices[2]}};
  const std::int64_t d = heads.d / kWidth, d_pitch = heads.d_pitch() / kWidth;
  const std::int64_t total = heads.count * heads.t * parts * (kGather ? d_pitch : d);
  PDL_CHECK(total < (std::int64_t{1} << 31) && heads.first + heads.count < (std::int64_t{1} << 31), total,
            " pieces of heads are too many for one launch");
  move_heads_kernel<T, kWidth, kGather><<<blocks_for(total, kThreads), kThreads, 0, stream>>>(
      at, static_cast<T*>(interleaved), static_cast<unsigned>(parts), heads, static_cast<unsigned>(d),
      static_cast<unsigned>(d_pitch), static_cast<unsigned>(total));
  check_launch("move_heads_kernel");
}

template <bool kGather>
void move_heads(const HeadParts& matrices, void* interleaved, int parts, const HeadRange& heads, DType dtype,
                cudaStream_t stream) {
  PDL_CHECK(parts == 1 || parts == 3, parts, " parts");
  if (heads.count == 0) return;
  with_compute_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kWide = kVectorWidth<T>;
    const bool wide = heads.d % kWide == 0 && aligned_to_vectors(static_cast<const void*>(interleaved));
    if (wide) {
      launch_move<T, kWide, kGather>(matrices, interleaved, parts, heads, stream);
    } else {
      launch_move<T, 1, kGather>(matrices, interleaved, parts, heads, stream);
    }
  });
}

}  // namespace

void gather_heads(const HeadParts& to, const void* interleaved, int parts, const HeadRange& heads, DType dtype,
                  cudaStream_t stream) {
  move_heads<true>(to, const_cast<void*>(interleaved), parts, heads, dtype, stream);
}

void scatter_heads(void* interleaved, const HeadParts& from, int parts, const HeadRange& heads, DType dtype,
                   cudaStream_t stream) {
  move_heads<false>(from, interleaved, parts, heads, dtype, stream);
}

void causal_softmax(float* scores, float* stats, const HeadRange& heads, const DropoutKey& key, std::int64_t first_head,
                    DType dtype, cudaStream_t stream) {
  if (heads.count == 0) return;
  const Rows rows(heads, key, first_head);
  with_compute_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    causal_softmax_kernel<T><<<blocks_for(rows.count(), kRowsPerBlock), kThreads, 0, stream>>>(scores, stats, rows);
    check_launch("causal_softmax_kernel");
  });
}

void causal_softmax_backward(float* scores, float* dweights, const void* dy, const void* y, const float* stats,
                             const HeadRange& heads, const DropoutKey& key, std::int64_t first_head, DType dtype,
                             cudaStream_t stream) {
  if (heads.count == 0) return;
  const Rows rows(heads, key, first_head);
  with_compute_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    causal_softmax_backward_kernel<T><<<blocks_for(rows.count(), kRowsPerBlock), kThreads, 0, stream>>>(
        scores, dweights, static_cast<const T*>(dy), static_cast<const T*>(y), stats, rows);
    check_launch("causal_softmax_backward_kernel");
  });
}

}  // namespace pdl::cuda
