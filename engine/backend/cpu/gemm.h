#pragma once
// Matrix products in fp32: the one fast kernel of this backend. Linear layers, convolutions and attention are different
// ways to say which rows meet which columns.
//
//   c[i][j] (+)= sum over k < depth of a[i][k] * b[k][j]
//
// b is packed first: panels of kTileColumns columns, each panel [depth][kTileColumns], so that the kernel streams it. a
// and c are given row by row, as pointers: rows may lie anywhere (the pixels under one tap of a convolution kernel),
// and nothing is copied. A tile of kTileRows x kTileColumns sums lives in registers.
//
// Every sum runs over k in order, from zero, and is then stored or added to c. So bits depend on depth alone, and a
// caller that cuts a long sum into pieces of at most kDepth gets the same bits however rows and columns are split over
// threads or batches.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "engine/backend/cpu/simd.h"

namespace pdl {

#if defined(__x86_64__) && !defined(__AVX512F__)
inline constexpr std::int64_t kTileVectors = 2;  // 16 registers: 12 sums, 2 of b, 1 of a
#else
inline constexpr std::int64_t kTileVectors = 4;  // 32 registers: 24 sums, 4 of b, 1 of a
#endif
inline constexpr std::int64_t kTileRows = 6;
inline constexpr std::int64_t kTileColumns = kTileVectors * kVectorFloats;
/// Longest partial sum. A panel of b of this depth stays in the second-level cache, as does a block of kBlockColumns.
inline constexpr std::int64_t kDepth = 256;
inline constexpr std::int64_t kBlockColumns = 512;  ///< columns of b that are packed at once
inline constexpr std::int64_t kBlockRows = 96;      ///< rows of a transposed a that are copied at once

/// With fewer multiply-adds, waking the other threads costs more than they save.
inline constexpr std::int64_t kProductsWorthThreads = 1 << 18;

inline std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
inline std::int64_t divide_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

/// b when packed: panel p of columns [p kTileColumns, (p + 1) kTileColumns) starts at p * kTileColumns * depth.
struct PackedB {
  const float* data;
  std::int64_t depth;  ///< rows of each panel; a product may use only the first of them

  static std::int64_t floats(std::int64_t depth, std::int64_t columns) {
    return depth * round_up(columns, kTileColumns);
  }
  const float* panel(std::int64_t first_column) const { return data + first_column * depth; }
};

/// c[i][j] (+)= sum of a[i][k] * panel[k][j] for i < rows <= kTileRows, j < columns <= kTileColumns.
void multiply_tile(float* const* c, const float* const* a, std::int64_t rows, std::int64_t depth, const float* panel,
                   std::int64_t columns, bool add);
/// The same for a transposed a: element (i, k) is a[k * kBlockRows + i].
void multiply_transposed_tile(float* const* c, const float* a, std::int64_t rows, std::int64_t depth,
                              const float* panel, std::int64_t columns, bool add);

/// packed[k][j] = row_of(k)[j]: b as it lies.
template <typename RowOf>
PackedB pack_rows(float* packed, std::int64_t depth, std::int64_t columns, RowOf row_of) {
  for (std::int64_t k = 0; k < depth; ++k) {
    const float* row = row_of(k);
    for (std::int64_t j = 0; j < columns; j += kTileColumns) {
      float* to = packed + j * depth + k * kTileColumns;
      const std::int64_t width = std::min(kTileColumns, columns - j);
      std::copy_n(row + j, width, to);
      if (width < kTileColumns) std::fill(to + width, to + kTileColumns, 0.0f);
    }
  }
  return {packed, depth};
}

/// to[k * stride + j] = from[j][k] for j < kVectorFloats, k < depth.
void transpose_strip(float* to, std::int64_t stride, const float* const* from, std::int64_t depth);

/// packed[k][j] = row_of(j)[k]: the transpose of what lies in memory.
template <typename RowOf>
PackedB pack_transposed(float* packed, std::int64_t depth, std::int64_t columns, RowOf row_of) {
  for (std::int64_t j = 0; j < columns; j += kVectorFloats) {
    const float* rows[kVectorFloats];
    // Columns past the end repeat the last one: they are computed and thrown away.
    for (std::int64_t i = 0; i < kVectorFloats; ++i) rows[i] = row_of(std::min(j + i, columns - 1));
    transpose_strip(packed + j / kTileColumns * kTileColumns * depth + j % kTileColumns, kTileColumns, rows, depth);
  }
  return {packed, depth};
}

/// c_row(i)[j] (+)= sum of a_row(i)[k] * b[k][j] for i < rows, j < columns.
template <typename CRow, typename ARow>
void multiply(std::int64_t rows, std::int64_t depth, PackedB b, std::int64_t columns, bool add, CRow c_row,
              ARow a_row) {
  for (std::int64_t i = 0; i < rows; i += kTileRows) {
    const std::int64_t height = std::min(kTileRows, rows - i);
    const float* a[kTileRows];
    float* c[kTileRows];
    for (std::int64_t r = 0; r < height; ++r) {
      a[r] = a_row(i + r);
      c[r] = c_row(i + r);
    }
    for (std::int64_t j = 0; j < columns; j += kTileColumns) {
      multiply_tile(c, a, height, depth, b.panel(j), std::min(kTileColumns, columns - j), add);
      for (std::int64_t r = 0; r < height; ++r) c[r] += kTileColumns;
    }
  }
}

/// c_row(i)[j] (+)= sum of a_row(k)[i] * b[k][j] for i < rows, j < columns: a lies transposed. `copy` has room for
/// kDepth * kBlockRows floats.
template <typename CRow, typename ARow>
void multiply_transposed(std::int64_t rows, std::int64_t depth, PackedB b, std::int64_t columns, bool add, float* copy,
                         CRow c_row, ARow a_row) {
  for (std::int64_t first = 0; first < rows; first += kBlockRows) {
    const std::int64_t block = std::min(kBlockRows, rows - first);
    // Rows of a are often a power of two apart, which is the worst distance for a cache: hence the copy.
    for (std::int64_t k = 0; k < depth; ++k) std::copy_n(a_row(k) + first, block, copy + k * kBlockRows);
    for (std::int64_t i = 0; i < block; i += kTileRows) {
      const std::int64_t height = std::min(kTileRows, block - i);
      float* c[kTileRows];
      for (std::int64_t r = 0; r < height; ++r) c[r] = c_row(first + i + r);
      for (std::int64_t j = 0; j < columns; j += kTileColumns) {
        multiply_transposed_tile(c, copy + i, height, depth, b.panel(j), std::min(kTileColumns, columns - j), add);
        for (std::int64_t r = 0; r < height; ++r) c[r] += kTileColumns;
      }
    }
  }
}

/// Blocks of a matrix of results, at least one for each thread where there are enough rows and columns.
struct ResultBlocks {
  std::int64_t rows, columns;  ///< of one block

  /// Splits columns first: each block of columns packs its own part of b, but each block of rows packs all of it again.
  static ResultBlocks by_columns(std::int64_t rows, std::int64_t columns);
  /// Splits rows first: right when a lies transposed and has to be copied as well.
  static ResultBlocks by_rows(std::int64_t rows, std::int64_t columns);
};

/// Working memory of the kernels: for each thread, a packed block of b and a copied block of a. Part of the code rather
/// than of a model, so it does not come from the device's arena.
class GemmScratch {
 public:
  GemmScratch();
  /// Makes room for all threads of the next parallel region; allocates only when they are more than ever before.
  void reserve();
  /// kDepth * kBlockColumns floats, the calling thread's own.
  float* packed() const;
  /// kDepth * kBlockRows floats, the calling thread's own.
  float* copied() const;

 private:
  struct Free {
    void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
  };
  std::vector<std::unique_ptr<float[], Free>> of_thread_;
};

}  // namespace pdl
