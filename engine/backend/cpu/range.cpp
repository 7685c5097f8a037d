// Flat ranges: what gradients, parameters and moments are to optimizers and communication.

#include <algorithm>
#include <cstring>

#include "engine/backend/cpu/cpu_backend.h"
#include "engine/backend/cpu/loops.h"
#include "engine/backend/cpu/segments.h"

namespace pdl {
namespace {

// Calls work(T{}) with T the element type, floating-point or integer.
template <typename Work>
void with_any_type(DType dtype, Work work) {
  switch (dtype) {
    case DType::fp64:
      return work(double{});
    case DType::fp32:
      return work(float{});
    case DType::int64:
      return work(std::int64_t{});
    case DType::int32:
      return work(std::int32_t{});
    case DType::uint8:
      return work(std::uint8_t{});
    default:
      PDL_CHECK(false, "the CPU has no arithmetic for ", name_of(dtype));
  }
}

void check_same_length(const Tensor& y, const Tensor& x) {
  PDL_CHECK(y.elements() == x.elements(), x.shape().to_string(), " for ", y.shape().to_string());
}

}  // namespace

void CpuBackend::fill(Tensor x, double value) {
  with_any_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const data = x.data<T>();
    const T element = static_cast<T>(value);
    parallel_ranges(x.elements(),
                    [&](std::int64_t first, std::int64_t last) { std::fill(data + first, data + last, element); });
  });
}

void CpuBackend::copy(Tensor y, Tensor x) {
  check_same_length(y, x);
  if (y.dtype() == x.dtype()) {
    char* const to = static_cast<char*>(y.raw());
    const char* const from = static_cast<const char*>(x.raw());
    if (to == from) return;
    const std::int64_t size = size_of(x.dtype());
    parallel_ranges(x.elements(), [&](std::int64_t first, std::int64_t last) {
      std::memcpy(to + first * size, from + first * size, static_cast<std::size_t>((last - first) * size));
    });
    return;
  }
  with_any_type(y.dtype(), [&](auto y_zero) {
    with_any_type(x.dtype(), [&](auto x_zero) {
      using To = decltype(y_zero);
      using From = decltype(x_zero);
      To* const to = y.data<To>();
      const From* const from = x.data<From>();
      parallel_ranges(x.elements(), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t i = first; i < last; ++i) to[i] = static_cast<To>(from[i]);
      });
    });
  });
}

void CpuBackend::copy_block(Tensor y, std::int64_t y_pitch, Tensor x, std::int64_t x_pitch, std::int64_t rows,
                            std::int64_t columns) {
  check_block(y, y_pitch, x, x_pitch, rows, columns);
  char* const to = static_cast<char*>(y.raw());
  const char* const from = static_cast<const char*>(x.raw());
  const std::int64_t size = size_of(x.dtype());
  parallel_items(rows, columns, [&](std::int64_t row) {
    std::memcpy(to + row * y_pitch * size, from + row * x_pitch * size, static_cast<std::size_t>(columns * size));
  });
}

void CpuBackend::add(Tensor y, Tensor x, double scale) {
  check_same_length(y, x);
  with_float_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const y_data = y.data<T>();
    const T* const x_data = x.data<T>();
    const T factor = static_cast<T>(scale);
    parallel_ranges(y.elements(), [&](std::int64_t first, std::int64_t last) {
#pragma omp simd
      for (std::int64_t i = first; i < last; ++i) y_data[i] += factor * x_data[i];
    });
  });
}

void CpuBackend::scale(Tensor x, double factor) {
  with_float_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const data = x.data<T>();
    const T by = static_cast<T>(factor);
    parallel_ranges(x.elements(), [&](std::int64_t first, std::int64_t last) {
#pragma omp simd
      for (std::int64_t i = first; i < last; ++i) data[i] *= by;
    });
  });
}

void CpuBackend::accumulate_sum(Tensor total, Tensor x) {
  PDL_CHECK(total.elements() == 1, "total ", total.shape().to_string());
  double* const sum = total.data<double>();
  with_float_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T* const data = x.data<T>();
    // One running sum: cutting x into several calls changes nothing, so neither does the size of a micro-batch.
    for (std::int64_t i = 0; i < x.elements(); ++i) *sum += static_cast<double>(data[i]);
  });
}

void CpuBackend::sum_of_squares(Tensor totals, Tensor x, const UpdateSegment* segments, std::int64_t count) {
  PDL_CHECK(totals.elements() == count, totals.shape().to_string(), " totals for ", count, " segments");
  double* const sums = totals.data<double>();
  std::fill_n(sums, count, 0.0);
  with_float_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T* const data = x.data<T>();
    reduce_pieces<double>(
        segments, count, x.elements(),
        [&](const Piece& piece) {
          return lane_sum<double>(piece.count, [from = data + piece.first](std::int64_t i) {
            const double value = static_cast<double>(from[i]);
            return value * value;
          });
        },
        [&](const Piece& piece, double partial) { sums[piece.segment] += partial; });
  });
}

}  // namespace pdl
