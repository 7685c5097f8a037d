#pragma once
// Square roots of many numbers. std::sqrt reports negative arguments through errno, and by that alone keeps a loop over
// it from becoming vector code: hence the instructions by name. Both round correctly, so both give the same bits.

#include <cmath>
#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace pdl {
namespace detail {

#if defined(__AVX512F__)
inline constexpr std::int64_t kRootBytes = 64;
inline void root_in_place(float* x) { _mm512_storeu_ps(x, _mm512_maskz_sqrt_ps(0xFFFF, _mm512_loadu_ps(x))); }
inline void root_in_place(double* x) { _mm512_storeu_pd(x, _mm512_maskz_sqrt_pd(0xFF, _mm512_loadu_pd(x))); }
#elif defined(__AVX__)
inline constexpr std::int64_t kRootBytes = 32;
inline void root_in_place(float* x) { _mm256_storeu_ps(x, _mm256_sqrt_ps(_mm256_loadu_ps(x))); }
inline void root_in_place(double* x) { _mm256_storeu_pd(x, _mm256_sqrt_pd(_mm256_loadu_pd(x))); }
#elif defined(__SSE2__)
inline constexpr std::int64_t kRootBytes = 16;
inline void root_in_place(float* x) { _mm_storeu_ps(x, _mm_sqrt_ps(_mm_loadu_ps(x))); }
inline void root_in_place(double* x) { _mm_storeu_pd(x, _mm_sqrt_pd(_mm_loadu_pd(x))); }
#else
inline constexpr std::int64_t kRootBytes = 1;
inline void root_in_place(float* x) { *x = std::sqrt(*x); }
inline void root_in_place(double* x) { *x = std::sqrt(*x); }
#endif

}  // namespace detail

/// x[i] = sqrt(x[i]) for i < count.
template <typename T>
void square_roots(T* x, std::int64_t count) {
  constexpr std::int64_t kWide = detail::kRootBytes > 1 ? detail::kRootBytes / static_cast<std::int64_t>(sizeof(T)) : 1;
  std::int64_t i = 0;
  for (; i + kWide <= count; i += kWide) detail::root_in_place(x + i);
  for (; i < count; ++i) x[i] = std::sqrt(x[i]);
}

}  // namespace pdl
