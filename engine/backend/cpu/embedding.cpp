// Token and position embeddings.
//
// Backward adds rows of dy to the rows of dwte that tokens choose. Each row of dwte has one owner among the threads,
// who adds to it in the order of the tokens: no atomics, the same bits with any number of threads, and no sweep over
// the vocabulary unless it has to be zeroed.

#include <omp.h>

#include <algorithm>
#include <array>
#include <cstddef>

#include "engine/backend/cpu/cpu_backend.h"
#include "engine/backend/cpu/dropout_mask.h"
#include "engine/backend/cpu/loops.h"

namespace pdl {
namespace {

// Extents of tokens [B, T] and y or dy [B, T, C], against tables [rows, C].
struct EmbeddingShape {
  EmbeddingShape(const Tensor& y, const Tensor& tokens) {
    PDL_CHECK(tokens.shape().rank() == 2 && y.shape().rank() == 3, "tokens ", tokens.shape().to_string(), ", embedded ",
              y.shape().to_string());
    b = y.shape()[0], t = y.shape()[1], c = y.shape()[2];
    PDL_CHECK(tokens.shape()[0] == b && tokens.shape()[1] == t, "tokens ", tokens.shape().to_string(), ", embedded ",
              y.shape().to_string());
  }
  void check_table(const Tensor& table, const char* name) const {
    PDL_CHECK(table.shape().rank() == 2 && table.shape()[1] == c, name, " ", table.shape().to_string(), " for width ",
              c);
  }
  void check_positions(const Tensor& wpe, const char* name) const {
    check_table(wpe, name);
    PDL_CHECK(wpe.shape()[0] >= t, name, " ", wpe.shape().to_string(), " for ", t, " positions");
  }
  std::int64_t b = 0, t = 0, c = 0;
};

// The row of the table that a token owns here, -1 when another shard of the vocabulary has it.
std::int64_t local_row(std::int32_t token, std::int64_t first_token, std::int64_t rows) {
  const std::int64_t row = token - first_token;
  return row >= 0 && row < rows ? row : -1;
}

// y = token_row + position_row; either may be null, which stands for zeros.
template <typename T>
void add_rows(T* y, const T* token_row, const T* position_row, std::int64_t count) {
  if (token_row == nullptr) std::swap(token_row, position_row);
  if (token_row == nullptr) {
    std::fill_n(y, count, T{0});
  } else if (position_row == nullptr) {
    std::copy_n(token_row, count, y);
  } else {
#pragma omp simd
    for (std::int64_t c = 0; c < count; ++c) y[c] = token_row[c] + position_row[c];
  }
}

// Drops elements of row `position` of a sample.
template <typename T>
void drop_row(T* y, const DropoutMask& mask, const DropoutKey& key, std::int64_t sample, std::int64_t position,
              std::int64_t width) {
  constexpr std::int64_t kRun = 512;
  const bool whole = key.local_width == 0;
  const std::int64_t row_start = position * (whole ? width : key.full_width) + (whole ? 0 : key.first_column);
  std::array<T, static_cast<std::size_t>(kRun)> scales;
  for (std::int64_t first = 0; first < width; first += kRun) {
    const std::int64_t count = std::min(kRun, width - first);
    mask.fill(scales.data(), key.sample_ids[sample], row_start + first, count);
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) y[first + i] *= scales[static_cast<std::size_t>(i)];
  }
}

void check_dropout(const DropoutKey& key, const EmbeddingShape& shape) {
  PDL_CHECK(key.samples == shape.b && key.sample_ids != nullptr, "dropout of ", key.samples, " samples, ", shape.b,
            " embedded");
  PDL_CHECK(key.local_width == 0 || key.local_width == shape.c, "dropout rows of ", key.local_width, ", width ",
            shape.c);
}

// dwte[row of token] += dy, for the rows that belong to `owner`: every owners-th.
template <typename T>
void add_owned_rows(T* dwte, std::int64_t rows, const T* dy, const std::int32_t* tokens, std::int64_t first_token,
                    const EmbeddingShape& shape, std::int64_t owner, std::int64_t owners) {
  for (std::int64_t m = 0; m < shape.b * shape.t; ++m) {
    const std::int64_t row = local_row(tokens[m], first_token, rows);
    if (row < 0 || row % owners != owner) continue;
    T* const to = dwte + row * shape.c;
    const T* const from = dy + m * shape.c;
#pragma omp simd
    for (std::int64_t c = 0; c < shape.c; ++c) to[c] += from[c];
  }
}

}  // namespace

void CpuBackend::embedding_forward(Tensor y, Tensor tokens, Tensor wte, Tensor wpe, std::int64_t first_token,
                                   const DropoutKey& key) {
  const EmbeddingShape shape(y, tokens);
  shape.check_table(wte, "wte");
  if (wpe.defined()) shape.check_positions(wpe, "wpe");
  const DropoutMask mask(key);
  if (mask.active()) check_dropout(key, shape);
  with_float_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const y_data = y.data<T>();
    const std::int32_t* const ids = tokens.data<std::int32_t>();
    const T* const token_table = wte.data<T>();
    const T* const position_table = wpe.defined() ? wpe.data<T>() : nullptr;
    const std::int64_t rows = wte.shape()[0];
    parallel_items(shape.b * shape.t, shape.c, [&](std::int64_t m) {
      const std::int64_t row = local_row(ids[m], first_token, rows), position = m % shape.t;
      T* const out = y_data + m * shape.c;
      add_rows(out, row < 0 ? nullptr : token_table + row * shape.c,
               position_table == nullptr ? nullptr : position_table + position * shape.c, shape.c);
      if (mask.active()) drop_row(out, mask, key, m / shape.t, position, shape.c);
    });
  });
}

void CpuBackend::embedding_backward(Tensor dwte, Tensor dwpe, Tensor dy, Tensor tokens, std::int64_t first_token,
                                    bool accumulate_wte, bool accumulate_wpe) {
  const EmbeddingShape shape(dy, tokens);
  if (dwte.defined()) shape.check_table(dwte, "dwte");
  if (dwpe.defined()) shape.check_positions(dwpe, "dwpe");
  if (dwte.defined() && !accumulate_wte) fill(dwte, 0.0);
  if (dwpe.defined() && !accumulate_wpe) fill(dwpe, 0.0);
  with_float_type(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T* const dy_data = dy.data<T>();
    const std::int32_t* const ids = tokens.data<std::int32_t>();
    T* const token_grads = dwte.defined() ? dwte.data<T>() : nullptr;
    T* const position_grads = dwpe.defined() ? dwpe.data<T>() : nullptr;
    if (token_grads != nullptr) {
      const std::int64_t owners = omp_get_max_threads();
      parallel_items(owners, shape.b * shape.t * shape.c / owners, [&](std::int64_t owner) {
        add_owned_rows(token_grads, dwte.shape()[0], dy_data, ids, first_token, shape, owner, owners);
      });
    }
    if (position_grads == nullptr) return;
    parallel_items(shape.t, shape.b * shape.c, [&](std::int64_t t) {
      T* const to = position_grads + t * shape.c;
      for (std::int64_t b = 0; b < shape.b; ++b) {
        const T* const from = dy_data + (b * shape.t + t) * shape.c;
#pragma omp simd
        for (std::int64_t c = 0; c < shape.c; ++c) to[c] += from[c];
      }
    });
  });
}

}  // namespace pdl
