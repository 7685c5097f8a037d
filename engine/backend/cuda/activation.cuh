#pragma once
// Activations and their derivatives, one element at a time. GELU is the tanh form, x sigmoid(2 u) with
// u = sqrt(2 / pi) (x + 0.044715 x^3); see engine/backend/cpu/gelu.h.
//
// Passes over bf16 and fp16 are as quick as memory only with few instructions for each element. There, powers of two
// and reciprocals come from the special function unit as they are, with relative errors of 2^-22, which rounding hides;
// the library's own quick forms would take care of denormal numbers on top. An exponent that overflows is right, too:
// the sigmoid is then 0.

#include "engine/backend/cuda/kernel_tools.cuh"

namespace pdl::cuda {

inline constexpr float kGeluScale = 0.7978845608028654f;  // sqrt(2 / pi)
inline constexpr float kGeluCubic = 0.044715f;

/// 2^x and 1 / x: approximations whose denormal inputs and results are 0.
__device__ inline float quick_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ inline float quick_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// sigmoid(2 u) = 1 / (1 + 2^(-2 u log2(e))).
__device__ inline float quick_gelu_sigmoid(float x, float x_squared) {
  constexpr float kLinear = -2.0f * kGeluScale * 1.4426950408889634f, kCubic = kLinear * kGeluCubic;
  return quick_reciprocal(1.0f + quick_exp2(x * fmaf(kCubic, x_squared, kLinear)));
}

/// gelu(x), for a result of type T.
template <typename T>
__device__ inline float gelu_tanh(float x) {
  if constexpr (sizeof(T) == 2) return x * quick_gelu_sigmoid(x, x * x);
  const float u = kGeluScale * (x + kGeluCubic * x * x * x);
  return x / (1.0f + expf(-2.0f * u));
}

/// d gelu(x) / dx = s + 2 x u' s (1 - s) with s = sigmoid(2 u), for a result of type T.
template <typename T>
__device__ inline float gelu_tanh_derivative(float x) {
  if constexpr (sizeof(T) == 2) {
    const float x_squared = x * x, s = quick_gelu_sigmoid(x, x_squared);
    const float slope = x * fmaf(6.0f * kGeluScale * kGeluCubic, x_squared, 2.0f * kGeluScale);  // 2 x u'
    return s * fmaf(slope, 1.0f - s, 1.0f);
  }
  // With e = exp(-2|u|) <= 1: sigmoid(2|u|) = 1 / (1 + e) and s (1 - s) = e / (1 + e)^2 on both sides, so nothing
  // cancels.
  const float u = kGeluScale * (x + kGeluCubic * x * x * x);
  const float du = kGeluScale * (1.0f + 3.0f * kGeluCubic * x * x);
  const float e = __expf(-2.0f * fabsf(u));
  const float s = 1.0f / (1.0f + e);
  return (u < 0.0f ? e * s : s) + 2.0f * x * du * e * s * s;
}

/// y = activation(x), for a result of type T. NaN stays.
template <typename T, Activation kActivation>
__device__ inline float activate(float x) {
  if constexpr (kActivation == Activation::relu) return x < 0.0f ? 0.0f : x;
  if constexpr (kActivation == Activation::gelu_tanh) return gelu_tanh<T>(x);
  return x;
}

/// dy * activation'(saved), for a result of type T; see activation_backward.
template <typename T, Activation kActivation>
__device__ inline float activation_gradient(float dy, float saved) {
  if constexpr (kActivation == Activation::relu) return saved > 0.0f ? dy : 0.0f;
  if constexpr (kActivation == Activation::gelu_tanh) return dy * gelu_tanh_derivative<T>(saved);
  return dy;
}

}  // namespace pdl::cuda
