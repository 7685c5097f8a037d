#pragma once
// GELU in its tanh form, x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3), and its derivative; see
// engine/backend/cpu/gelu.h. What ends in bf16 or fp16 uses the quick exponential and division, whose errors its
// rounding hides: with the exact ones these passes would be bound by arithmetic, not by memory.

#include "engine/backend/cuda/kernel_tools.cuh"

namespace pdl::cuda {

inline constexpr float kGeluScale = 0.7978845608028654f;  // sqrt(2 / pi)
inline constexpr float kGeluCubic = 0.044715f;

/// gelu(x), for a result of type T.
template <typename T>
__device__ inline float gelu_tanh(float x) {
  const float u = kGeluScale * (x + kGeluCubic * x * x * x);
  if constexpr (sizeof(T) == 2) {
    // Beyond 44 the sum would pass 2^126, where the quick division gives 0 or NaN.
    return __fdividef(x, 1.0f + __expf(fminf(-2.0f * u, 44.0f)));
  } else {
    return x / (1.0f + expf(-2.0f * u));
  }
}

/// d gelu(x) / dx, for a result of type T. With e = exp(-2|u|) <= 1: sigmoid(2|u|) = 1 / (1 + e) and s (1 - s) = e / (1
/// + e)^2 on both sides, so nothing cancels.
template <typename T>
__device__ inline float gelu_tanh_derivative(float x) {
  const float u = kGeluScale * (x + kGeluCubic * x * x * x);
  const float du = kGeluScale * (1.0f + 3.0f * kGeluCubic * x * x);
  const float e = __expf(-2.0f * fabsf(u));
  const float s = sizeof(T) == 2 ? __fdividef(1.0f, 1.0f + e) : 1.0f / (1.0f + e);
  return (u < 0.0f ? e * s : s) + 2.0f * x * du * e * s * s;
}

}  // namespace pdl::cuda
