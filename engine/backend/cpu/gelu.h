#pragma once
// GELU in its tanh form, for the matrix product that ends in it and for its backward pass:
//
//   gelu(x) = x (1 + tanh(u)) / 2 = x sigmoid(2 u),   u = sqrt(2 / pi) (x + 0.044715 x^3)
//
// fp64 follows the first form to the letter. fp32 uses the second: one vectorisable exponential, and no cancellation
// where tanh nears -1.

#include <cmath>
#include <type_traits>

#include "engine/backend/cpu/fast_math.h"

namespace pdl {

namespace detail {
inline constexpr double kGeluScale = 0.79788456080286535588;  // sqrt(2 / pi)
inline constexpr double kGeluCubic = 0.044715;
}  // namespace detail

/// gelu(x).
template <typename T>
T gelu_tanh(T x) {
  constexpr T kScale = static_cast<T>(detail::kGeluScale), kCubic = static_cast<T>(detail::kGeluCubic);
  const T u = kScale * (x + kCubic * x * x * x);
  if constexpr (std::is_same_v<T, float>) {
    return x / (1.0f + fast_exp(-2.0f * u));
  } else {
    return T{0.5} * x * (T{1} + std::tanh(u));
  }
}

/// d gelu(x) / dx.
template <typename T>
T gelu_tanh_derivative(T x) {
  constexpr T kScale = static_cast<T>(detail::kGeluScale), kCubic = static_cast<T>(detail::kGeluCubic);
  const T u = kScale * (x + kCubic * x * x * x);
  const T du = kScale * (T{1} + T{3} * kCubic * x * x);
  if constexpr (std::is_same_v<T, float>) {
    // With e = exp(-2|u|) <= 1: sigmoid(2|u|) = 1 / (1 + e), and s (1 - s) = e / (1 + e)^2 on both sides, without
    // cancellation.
    const float e = fast_exp(-2.0f * std::fabs(u));
    const float s = 1.0f / (1.0f + e);
    return (u < 0.0f ? e * s : s) + 2.0f * x * du * e * s * s;
  } else {
    const T t = std::tanh(u);
    return T{0.5} * (T{1} + t) + T{0.5} * x * (T{1} - t * t) * du;
  }
}

}  // namespace pdl
