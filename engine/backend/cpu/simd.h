#pragma once
// The widest float vector that this build may use, and its one fused operation. The rest is plain arithmetic on the
// type.

#include <cmath>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace pdl {

#if defined(__AVX512F__)
inline constexpr int kVectorFloats = 16;
inline constexpr const char* kVectorName = "AVX-512";
#elif defined(__AVX__)
inline constexpr int kVectorFloats = 8;
inline constexpr const char* kVectorName = "AVX";
#else
inline constexpr int kVectorFloats = 4;
inline constexpr const char* kVectorName = "128-bit";
#endif

using FloatVector [[gnu::vector_size(kVectorFloats * sizeof(float))]] = float;

inline FloatVector load_vector(const float* from) {
  FloatVector v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
inline void store_vector(float* to, FloatVector v) { std::memcpy(to, &v, sizeof(v)); }

/// All elements equal to `value`. (Subtracting zero changes no value, which adding zero does to -0.)
inline FloatVector broadcast(float value) { return value - FloatVector{}; }

/// a * b + c, rounded once where the hardware can; loops over the scalar form become vector code.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}
inline FloatVector multiply_add(FloatVector a, FloatVector b, FloatVector c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

}  // namespace pdl
