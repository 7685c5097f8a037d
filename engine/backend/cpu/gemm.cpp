#include "engine/backend/cpu/gemm.h"

#include <omp.h>

#include <cstring>

namespace pdl {
namespace {

// Where element (i, k) of a lies.
struct RowsOfA {
  const float* row[kTileRows];
  float operator()(std::int64_t i, std::int64_t k) const { return row[i][k]; }
};
struct TransposedA {
  const float* first;
  float operator()(std::int64_t i, std::int64_t k) const { return first[k * kBlockRows + i]; }
};

// A full tile of kVectors vectors a row. The loops over rows and vectors are unrolled, so that the sums are registers.
template <std::int64_t kVectors, typename A>
void full_tile(float* const* c, const A a, std::int64_t depth, const float* panel, bool add) {
  FloatVector sum[kTileRows][kVectors] = {};
  for (std::int64_t k = 0; k < depth; ++k) {
    FloatVector b[kVectors];
    for (std::int64_t v = 0; v < kVectors; ++v) b[v] = load_vector(panel + k * kTileColumns + v * kVectorFloats);
#pragma GCC unroll 6
    for (std::int64_t i = 0; i < kTileRows; ++i) {
      const FloatVector factor = broadcast(a(i, k));
#pragma GCC unroll 4
      for (std::int64_t v = 0; v < kVectors; ++v) sum[i][v] = multiply_add(factor, b[v], sum[i][v]);
    }
  }
#pragma GCC unroll 6
  for (std::int64_t i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
    for (std::int64_t v = 0; v < kVectors; ++v) {
      float* const to = c[i] + v * kVectorFloats;
      store_vector(to, add ? load_vector(to) + sum[i][v] : sum[i][v]);
    }
  }
}

template <typename A>
void whole_vectors(float* const* c, const A& a, std::int64_t depth, const float* panel, std::int64_t vectors,
                   bool add) {
  static_assert(kTileVectors <= 4);
  switch (vectors) {
    case 1:
      return full_tile<1>(c, a, depth, panel, add);
    case 2:
      return full_tile<2>(c, a, depth, panel, add);
    case 3:
      return full_tile<3>(c, a, depth, panel, add);
    default:
      return full_tile<4>(c, a, depth, panel, add);
  }
}

// At the edges of c the tile is computed whole, aside, and the part that exists is copied.
template <typename A>
void edge_tile(float* const* c, const A& a, std::int64_t rows, std::int64_t depth, const float* panel,
               std::int64_t columns, bool add) {
  alignas(64) float aside[kTileRows][kTileColumns];
  float* to[kTileRows];
  for (std::int64_t i = 0; i < kTileRows; ++i) to[i] = aside[i];
  whole_vectors(to, a, depth, panel, divide_up(columns, kVectorFloats), false);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) c[i][j] = add ? c[i][j] + aside[i][j] : aside[i][j];
  }
}

template <typename A>
void any_tile(float* const* c, const A& a, std::int64_t rows, std::int64_t depth, const float* panel,
              std::int64_t columns, bool add) {
  if (rows == kTileRows && columns % kVectorFloats == 0) {
    whole_vectors(c, a, depth, panel, columns / kVectorFloats, add);
  } else {
    edge_tile(c, a, rows, depth, panel, columns, add);
  }
}

}  // namespace

void multiply_tile(float* const* c, const float* const* a, std::int64_t rows, std::int64_t depth, const float* panel,
                   std::int64_t columns, bool add) {
  RowsOfA rows_of_a;
  for (std::int64_t i = 0; i < kTileRows; ++i) rows_of_a.row[i] = a[i < rows ? i : 0];
  any_tile(c, rows_of_a, rows, depth, panel, columns, add);
}

void multiply_transposed_tile(float* const* c, const float* a, std::int64_t rows, std::int64_t depth,
                              const float* panel, std::int64_t columns, bool add) {
  any_tile(c, TransposedA{a}, rows, depth, panel, columns, add);
}

void transpose_strip(float* to, std::int64_t stride, const float* const* from, std::int64_t depth) {
  std::int64_t k = 0;
  for (; k + kVectorFloats <= depth; k += kVectorFloats) {
    // Through a square that fits the first-level cache: rows are read whole, then written whole.
    float square[kVectorFloats][kVectorFloats];
    for (std::int64_t j = 0; j < kVectorFloats; ++j) std::memcpy(square[j], from[j] + k, sizeof(square[j]));
    for (std::int64_t i = 0; i < kVectorFloats; ++i) {
      for (std::int64_t j = 0; j < kVectorFloats; ++j) to[(k + i) * stride + j] = square[j][i];
    }
  }
  for (; k < depth; ++k) {
    for (std::int64_t j = 0; j < kVectorFloats; ++j) to[k * stride + j] = from[j][k];
  }
}

ResultBlocks ResultBlocks::by_columns(std::int64_t rows, std::int64_t columns) {
  const std::int64_t threads = omp_get_max_threads();
  const std::int64_t parts = round_up(divide_up(columns, kBlockColumns), threads);
  const std::int64_t width = round_up(divide_up(columns, parts), kTileColumns);
  const std::int64_t height = divide_up(rows, divide_up(threads, divide_up(columns, width)));
  return {round_up(height, kTileRows), width};
}

ResultBlocks ResultBlocks::by_rows(std::int64_t rows, std::int64_t columns) {
  return {round_up(divide_up(rows, omp_get_max_threads()), kTileRows), std::min(kBlockColumns, columns)};
}

GemmScratch::GemmScratch() { reserve(); }

void GemmScratch::reserve() {
  constexpr std::size_t kFloats = kDepth * (kBlockColumns + kBlockRows);
  while (of_thread_.size() < static_cast<std::size_t>(omp_get_max_threads())) {
    auto* memory = static_cast<float*>(::operator new[](kFloats * sizeof(float), std::align_val_t{64}));
    std::memset(memory, 0, kFloats * sizeof(float));
    of_thread_.emplace_back(memory);
  }
}

float* GemmScratch::packed() const { return of_thread_[static_cast<std::size_t>(omp_get_thread_num())].get(); }
float* GemmScratch::copied() const { return packed() + kDepth * kBlockColumns; }

}  // namespace pdl
