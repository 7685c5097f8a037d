#pragma once
// Sums down the columns of a matrix: the gradient of every bias.

#include <omp.h>

#include <algorithm>
#include <array>
#include <cstddef>

#include "engine/backend/cpu/loops.h"

namespace pdl {

/// sums[j] (+)= sum over rows of x[row][j], x [rows, columns]. Eight rows are added as a tree, such sums in order in
/// fp64; threads share out columns.
template <typename T>
void column_sums(T* sums, const T* x, std::int64_t rows, std::int64_t columns, bool accumulate) {
  constexpr std::int64_t kMaxStrip = 512, kGrain = 16;  // columns; a grain is a cache line of fp32
  const std::int64_t of_thread = (columns + omp_get_max_threads() - 1) / omp_get_max_threads();
  const std::int64_t strip = std::min(kMaxStrip, (of_thread + kGrain - 1) / kGrain * kGrain);
  parallel_items((columns + strip - 1) / strip, strip * rows, [&](std::int64_t i) {
    const std::int64_t first = i * strip, count = std::min(strip, columns - first);
    std::array<double, static_cast<std::size_t>(kMaxStrip)> totals{};
    double* const total = totals.data();
    std::int64_t row = 0;
    for (; row + 8 <= rows; row += 8) {
      const T* const a = x + row * columns + first;
      for (std::int64_t j = 0; j < count; ++j) {
        const auto pair = [=](std::int64_t r) { return a[r * columns + j] + a[(r + 1) * columns + j]; };
        total[j] += static_cast<double>((pair(0) + pair(2)) + (pair(4) + pair(6)));
      }
    }
    for (; row < rows; ++row) {
      for (std::int64_t j = 0; j < count; ++j) total[j] += static_cast<double>(x[row * columns + first + j]);
    }
    for (std::int64_t j = 0; j < count; ++j) {
      sums[first + j] = static_cast<T>(accumulate ? static_cast<double>(sums[first + j]) + total[j] : total[j]);
    }
  });
}

}  // namespace pdl
