#pragma once
// The parts of attention that are not matrix products, for the general way in attention.cpp. There each head's q, k and
// v are matrices of their own, so that one batched product serves all heads at once.

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "engine/backend/backend.h"

namespace pdl::cuda {

/// Heads [first, first + count) of the B * A heads of all samples: head i is head i % A of sample i / A.
struct HeadRange {
  std::int64_t first, count;
  std::int64_t t, a, d;

  /// Elements from row to row of a head's own matrix [T, D]; the columns behind D are zero.
  std::int64_t d_pitch() const { return (d + 7) / 8 * 8; }
  /// fp32 elements from row to row of a head's scores [T, T].
  std::int64_t t_pitch() const { return (t + 7) / 8 * 8; }
  std::int64_t matrix_elements() const { return t * d_pitch(); }
  std::int64_t score_elements() const { return t * t_pitch(); }
};

/// The 1 or 3 matrices of a head: [count, T, d_pitch] each. Unused ones are null.
using HeadParts = std::array<void*, 3>;

/// Part s of every head from `interleaved` [B, T, A, parts, D], parts = 1 or 3.
void gather_heads(const HeadParts& to, const void* interleaved, int parts, const HeadRange& heads, DType dtype,
                  cudaStream_t stream);
/// The way back.
void scatter_heads(void* interleaved, const HeadParts& from, int parts, const HeadRange& heads, DType dtype,
                   cudaStream_t stream);

/// In each row i of the scores [count, T, t_pitch]: stats = log sum exp over keys j <= i, then the weights
/// m exp(score - stats), 0 where j > i, with m dropout's 0 or 1 / (1 - rate). The weights are of type `dtype` and take
/// the place of the scores: rows begin where they began. `stats` is the whole [B, A, T].
void causal_softmax(float* scores, float* stats, const HeadRange& heads, const DropoutKey& key, std::int64_t first_head,
                    DType dtype, cudaStream_t stream);

/// With p = exp(score - stats): the scores become the weights m p again, and `dweights` (dy v^T, in fp32) becomes the
/// gradient of the scores, p (m dweights - dy y), both in the manner of causal_softmax. dy and y are the whole
/// [B, T, A, D].
void causal_softmax_backward(float* scores, float* dweights, const void* dy, const void* y, const float* stats,
                             const HeadRange& heads, const DropoutKey& key, std::int64_t first_head, DType dtype,
                             cudaStream_t stream);

}  // namespace pdl::cuda
