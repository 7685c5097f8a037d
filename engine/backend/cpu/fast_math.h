#pragma once
// Elementary functions that a compiler can vectorise: no branches, no tables, no library call.

#include <bit>
#include <cmath>
#include <cstdint>

#include "engine/backend/cpu/simd.h"

namespace pdl {

/// e^x with a relative error below 1.3e-7 (one unit in the last place). Results below 2^-125 are 0, NaN stays NaN.
inline float fast_exp(float x) {
  constexpr float kLog2e = 1.44269504f;
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // n * kLn2High is exact for |n| < 2^15
  constexpr float kRound = 12582912.0f;                                // 1.5 * 2^23: adding it rounds to an integer
  // Where the exponent below is 0, and where the product below overflows to infinity.
  constexpr float kLowest = -87.336f, kHighest = 88.8f;
  const float clamped = x < kLowest ? kLowest : (x > kHighest ? kHighest : x);
  const float rounded = multiply_add(clamped, kLog2e, kRound);
  const float n = rounded - kRound;
  const float r = multiply_add(n, -kLn2Low, multiply_add(n, -kLn2High, clamped));  // |r| <= ln(2) / 2
  float p = 1.9875691500e-4f;
  p = multiply_add(p, r, 1.3981999507e-3f);
  p = multiply_add(p, r, 8.3334519073e-3f);
  p = multiply_add(p, r, 4.1665795894e-2f);
  p = multiply_add(p, r, 1.6666665459e-1f);
  p = multiply_add(p, r, 5.0000001201e-1f);
  p = multiply_add(p * r, r, r) + 1.0f;
  // 2^n as 2 * 2^(n-1): n can be 128, which is no exponent of a float, and at n = -126 the second factor is 0.
  const std::int32_t exponent = std::bit_cast<std::int32_t>(rounded) - std::bit_cast<std::int32_t>(kRound) + 126;
  return (p + p) * std::bit_cast<float>(static_cast<std::uint32_t>(exponent) << 23);
}

/// The exponential of the element type: the approximation above in fp32, the library's in fp64.
template <typename T>
T exp_of(T x);
template <>
inline float exp_of<float>(float x) {
  return fast_exp(x);
}
template <>
inline double exp_of<double>(double x) {
  return std::exp(x);
}

}  // namespace pdl
