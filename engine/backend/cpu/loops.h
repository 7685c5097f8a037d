#pragma once
// What the loops of this backend share: the choice of the element type, work split over threads, sums in a fixed order.
//
// No result depends on the number of threads, on where a tensor lies in memory or on the width of the processor's
// vectors: threads share out items whose results do not touch, and the order of a sum follows from its length alone.

#include <algorithm>
#include <cstdint>

#include "engine/backend/backend.h"

namespace pdl {

/// Calls work(T{}) with T the element type, float or double.
template <typename Work>
void with_float_type(DType dtype, Work work) {
  PDL_CHECK(dtype == DType::fp32 || dtype == DType::fp64, "the CPU computes in fp32 and fp64, not in ", name_of(dtype));
  if (dtype == DType::fp32) {
    work(float{});
  } else {
    work(double{});
  }
}

/// Below this many elements, waking the other threads costs more than they save.
inline constexpr std::int64_t kElementsWorthThreads = 16384;

/// work(i) for every i in [0, count), over threads when the items together touch enough elements. `work` must not
/// throw.
template <typename Work>
void parallel_items(std::int64_t count, std::int64_t elements_per_item, Work work) {
  const bool worthwhile = count > 1 && count * elements_per_item >= kElementsWorthThreads;
#pragma omp parallel for schedule(static) if (worthwhile)
  for (std::int64_t i = 0; i < count; ++i) work(i);
}

/// work(first, last) for consecutive pieces of [0, count). `work` must not throw.
template <typename Work>
void parallel_ranges(std::int64_t count, Work work) {
  constexpr std::int64_t kRange = 4096;  // short enough to share out evenly, long enough to forget the call
  parallel_items((count + kRange - 1) / kRange, kRange,
                 [&](std::int64_t i) { work(i * kRange, std::min(count, (i + 1) * kRange)); });
}

/// How many partial sums run side by side: they fill two of the widest vectors, and fp32 errors stay small.
template <typename T>
inline constexpr std::int64_t kLanes = 128 / static_cast<std::int64_t>(sizeof(T));

/// lanes[0..kWidth) to one number, as a tree; uses the lanes up. Recursion, as loops of constant length become vector
/// code.
template <std::int64_t kWidth, typename T, typename Combine>
T combine_lanes(T* lanes, Combine combine) {
  if constexpr (kWidth == 1) {
    return lanes[0];
  } else {
    constexpr std::int64_t kHalf = kWidth / 2;
    for (std::int64_t lane = 0; lane < kHalf; ++lane) lanes[lane] = combine(lanes[lane], lanes[lane + kHalf]);
    return combine_lanes<kHalf>(lanes, combine);
  }
}

/// Sum of term(i), i in [0, count): element i goes to partial sum i % kLanes, and the partial sums are added as a tree.
template <typename T, typename Term>
T lane_sum(std::int64_t count, Term term) {
  alignas(64) T lanes[kLanes<T>] = {};
  std::int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) {
#pragma omp simd
    for (std::int64_t lane = 0; lane < kLanes<T>; ++lane) lanes[lane] += term(i + lane);
  }
  for (std::int64_t lane = 0; i < count; ++i, ++lane) lanes[lane] += term(i);
  return combine_lanes<kLanes<T>>(lanes, [](T a, T b) { return a + b; });
}

/// Sums as above over stretches of 1024 elements, the stretches added in fp64: for long sums of fp32 terms.
template <typename T, typename Term>
double long_sum(std::int64_t count, Term term) {
  constexpr std::int64_t kStretch = 1024;
  double total = 0.0;
  for (std::int64_t first = 0; first < count; first += kStretch) {
    total += static_cast<double>(
        lane_sum<T>(std::min(kStretch, count - first), [&](std::int64_t i) { return term(first + i); }));
  }
  return total;
}

}  // namespace pdl
