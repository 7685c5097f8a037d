// One head at a time, a tile of kTileRows queries at a time: scores, weights and the products with them stay in the
// first-level cache, and keys behind a tile's last query are never touched.

#include "engine/backend/cpu/attention_tiles.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/backend/cpu/fast_math.h"
#include "engine/backend/cpu/loops.h"

namespace pdl::attention_tiles {
namespace {

// Queries whose weights backward keeps: the keys' and values' gradients are sums over queries, this many at a time.
constexpr std::int64_t kQueries = 8 * kTileRows;
// Rows of scores are as long as both a panel of columns and a step of the loops over a row ask for.
std::int64_t row_floats(const AttentionExtents& e) { return round_up(e.t, std::max(kTileColumns, kLanes<float>)); }

// Offsets, in floats, of the pieces of a thread's working memory.
class Pieces {
 public:
  std::int64_t take(std::int64_t floats) {
    const std::int64_t offset = taken_;
    taken_ += round_up(floats, 16);  // 64 bytes
    return offset;
  }
  std::int64_t taken() const { return taken_; }

 private:
  std::int64_t taken_ = 0;
};

struct ForwardWork {
  explicit ForwardWork(const AttentionExtents& e) {
    Pieces pieces;
    keys = pieces.take(PackedB::floats(e.d, e.t));
    values = pieces.take(PackedB::floats(e.t, e.d));
    scores = pieces.take(kTileRows * row_floats(e));
    scales = pieces.take(row_floats(e));
    floats = pieces.taken();
  }
  std::int64_t keys, values;    // packed: k^T [D, T], v [T, D]
  std::int64_t scores, scales;  // [kTileRows, row], of dropout [row]
  std::int64_t floats;
};

struct BackwardWork {
  explicit BackwardWork(const AttentionExtents& e) {
    Pieces pieces;
    keys_transposed = pieces.take(PackedB::floats(e.d, e.t));
    values_transposed = pieces.take(PackedB::floats(e.d, e.t));
    keys = pieces.take(PackedB::floats(e.t, e.d));
    block = pieces.take(PackedB::floats(kQueries, e.d));
    weights = pieces.take(kQueries * row_floats(e));
    dscores = pieces.take(kQueries * row_floats(e));
    scales = pieces.take(row_floats(e));
    floats = pieces.taken();
  }
  std::int64_t keys_transposed, values_transposed, keys;  // packed: k^T [D, T], v^T [D, T], k [T, D]
  std::int64_t block;                                     // packed: q or dy of a block of queries [kQueries, D]
  std::int64_t weights, dscores, scales;                  // [kQueries, row] twice, of dropout [row]
  std::int64_t floats;
};

// scores[0, count) to exp(scale (score - max)); zeros up to `padded`, a multiple of kLanes. Returns log(sum of
// exp(scale score)).
struct RowSums {
  float inverse_sum, log_sum_exp;
};
RowSums exponentials(float* scores, std::int64_t count, std::int64_t padded, float scale) {
  constexpr std::int64_t kWide = kLanes<float>;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  std::fill(scores + count, scores + padded, kNone);
  alignas(64) float lanes[kWide];
  std::copy_n(scores, kWide, lanes);
  for (std::int64_t j = kWide; j < padded; j += kWide) {
#pragma omp simd
    for (std::int64_t lane = 0; lane < kWide; ++lane)
      lanes[lane] = scores[j + lane] > lanes[lane] ? scores[j + lane] : lanes[lane];
  }
  const float largest = combine_lanes<kWide>(lanes, [](float a, float b) { return b > a ? b : a; });
  const float sum =
      lane_sum<float>(padded, [=](std::int64_t j) { return scores[j] = fast_exp((scores[j] - largest) * scale); });
  return {1.0f / sum, largest * scale + std::log(sum)};
}

// From scores and the gradients of weights, both of one row of `count` keys, to what the sums over queries multiply by:
// weights after dropout, and gradients of the scores. Zeros up to `padded`.
struct RowGradient {
  float log_sum_exp, dot_dy_y, scale;
};
void row_gradient(float* weights, float* dscores, const float* scales, std::int64_t count, std::int64_t padded,
                  const RowGradient& row) {
#pragma omp simd
  for (std::int64_t j = 0; j < count; ++j) {
    const float weight = fast_exp(weights[j] * row.scale - row.log_sum_exp);
    dscores[j] = weight * (scales[j] * dscores[j] - row.dot_dy_y) * row.scale;
    weights[j] = weight * scales[j];
  }
  std::fill(weights + count, weights + padded, 0.0f);
  std::fill(dscores + count, dscores + padded, 0.0f);
}

// Backward of one head: gradients of queries tile by tile, of keys and values block of queries by block of queries.
class HeadBackward {
 public:
  HeadBackward(const AttentionExtents& e, std::int64_t head, float* dqkv, const float* dy, const float* y,
               const float* stats, const float* qkv, const AttentionDropout& dropout, float* memory)
      : e_(e),
        head_(head),
        dq_(dqkv + e.qkv_offset(head)),
        q_(qkv + e.qkv_offset(head)),
        dy_(dy + e.y_offset(head)),
        y_(y + e.y_offset(head)),
        stats_(stats + head * e.t),
        dropout_(dropout),
        memory_(memory) {}

  void run(const GemmScratch& scratch) {
    const auto part = [this](std::int64_t p) {
      return [this, p](std::int64_t j) { return q_ + p * e_.d + j * e_.qkv_stride(); };
    };
    keys_transposed_ = pack_transposed(memory_ + work_.keys_transposed, e_.d, e_.t, part(1));
    values_transposed_ = pack_transposed(memory_ + work_.values_transposed, e_.d, e_.t, part(2));
    keys_ = pack_rows(memory_ + work_.keys, e_.t, e_.d, part(1));
    if (!dropout_.active()) std::fill_n(scales(), e_.t, 1.0f);
    for (std::int64_t first = 0; first < e_.t; first += kQueries) {
      const std::int64_t queries = std::min(kQueries, e_.t - first);
      for (std::int64_t i = 0; i < queries; i += kTileRows) tile(first, queries, i);
      float* const block = memory_ + work_.block;
      sum_over_queries(1, first, pack_rows(block, queries, e_.d, [&](std::int64_t r) { return query(first + r); }),
                       dscores(0), scratch);
      sum_over_queries(2, first, pack_rows(block, queries, e_.d, [&](std::int64_t r) { return gradient(first + r); }),
                       weights(0), scratch);
    }
  }

 private:
  const float* query(std::int64_t i) const { return q_ + i * e_.qkv_stride(); }
  const float* gradient(std::int64_t i) const { return dy_ + i * e_.y_stride(); }
  float* weights(std::int64_t r) const { return memory_ + work_.weights + r * row_; }
  float* dscores(std::int64_t r) const { return memory_ + work_.dscores + r * row_; }
  float* scales() const { return memory_ + work_.scales; }

  // Rows [i, i + kTileRows) of the block of queries that starts at `first`: weights, gradients of scores, gradients of
  // queries.
  void tile(std::int64_t first, std::int64_t queries, std::int64_t i) {
    const std::int64_t rows = std::min(kTileRows, queries - i), seen = first + i + rows,
                       columns = round_up(seen, kVectorFloats);
    multiply(
        rows, e_.d, keys_transposed_, columns, false, [&](std::int64_t r) { return weights(i + r); },
        [&](std::int64_t r) { return query(first + i + r); });
    multiply(
        rows, e_.d, values_transposed_, columns, false, [&](std::int64_t r) { return dscores(i + r); },
        [&](std::int64_t r) { return gradient(first + i + r); });
    for (std::int64_t r = i; r < i + rows; ++r) {
      const float *const dy_row = gradient(first + r), *const y_row = y_ + (first + r) * e_.y_stride();
      const float product = lane_sum<float>(e_.d, [=](std::int64_t c) { return dy_row[c] * y_row[c]; });
      if (dropout_.active()) dropout_.fill(scales(), e_, head_, first + r);
      row_gradient(weights(r), dscores(r), scales(), first + r + 1, first + queries,
                   {stats_[first + r], product, scale_});
    }
    multiply(
        rows, seen, keys_, e_.d, false, [&](std::int64_t r) { return dq_ + (first + i + r) * e_.qkv_stride(); },
        [&](std::int64_t r) { return dscores(i + r); });
  }

  // Gradients of keys (part 1) or values (part 2) from one block of queries: the sum of coefficient [query, key] times
  // a row of b.
  void sum_over_queries(std::int64_t part, std::int64_t first, PackedB b, const float* coefficients,
                        const GemmScratch& scratch) {
    const auto add_to = [&](std::int64_t first_key, std::int64_t keys, bool add) {
      multiply_transposed(
          keys, b.depth, b, e_.d, add, scratch.copied(),
          [&](std::int64_t j) { return dq_ + part * e_.d + (first_key + j) * e_.qkv_stride(); },
          [&](std::int64_t r) { return coefficients + r * row_ + first_key; });
    };
    add_to(0, first, true);         // keys that earlier blocks have added to
    add_to(first, b.depth, false);  // the block's own keys, which no earlier query sees
  }

  const AttentionExtents& e_;
  std::int64_t head_;
  float* dq_;
  const float *q_, *dy_, *y_, *stats_;
  const AttentionDropout& dropout_;
  float* memory_;
  const BackwardWork work_{e_};
  const std::int64_t row_ = row_floats(e_);
  const float scale_ = 1.0f / std::sqrt(static_cast<float>(e_.d));
  PackedB keys_transposed_{}, values_transposed_{}, keys_{};
};

}  // namespace

std::int64_t floats(const AttentionExtents& e) { return std::max(ForwardWork(e).floats, BackwardWork(e).floats); }

void forward(const AttentionExtents& e, std::int64_t head, float* y, float* stats, const float* qkv,
             const AttentionDropout& dropout, float* memory) {
  const ForwardWork work(e);
  const float* const q = qkv + e.qkv_offset(head);
  float* const y_head = y + e.y_offset(head);
  const std::int64_t stride = e.qkv_stride(), row = row_floats(e);
  const auto part = [&](std::int64_t p) { return [=, &e](std::int64_t j) { return q + p * e.d + j * stride; }; };
  const PackedB keys = pack_transposed(memory + work.keys, e.d, e.t, part(1));
  const PackedB values = pack_rows(memory + work.values, e.t, e.d, part(2));
  const float scale = 1.0f / std::sqrt(static_cast<float>(e.d));

  for (std::int64_t i = 0; i < e.t; i += kTileRows) {
    const std::int64_t rows = std::min(kTileRows, e.t - i), seen = i + rows;  // keys that some query of the tile sees
    const auto scores = [&](std::int64_t r) { return memory + work.scores + r * row; };
    const auto y_row = [&](std::int64_t r) { return y_head + (i + r) * e.y_stride(); };
    multiply(rows, e.d, keys, round_up(seen, kVectorFloats), false, scores,
             [&](std::int64_t r) { return q + (i + r) * stride; });
    float inverse_sums[kTileRows];
    for (std::int64_t r = 0; r < rows; ++r) {
      const RowSums sums = exponentials(scores(r), i + r + 1, round_up(seen, kLanes<float>), scale);
      inverse_sums[r] = sums.inverse_sum;
      stats[head * e.t + i + r] = sums.log_sum_exp;
      if (!dropout.active()) continue;
      float* const scales = memory + work.scales;
      dropout.fill(scales, e, head, i + r);
      for (std::int64_t j = 0; j <= i + r; ++j) scores(r)[j] *= scales[j];
    }
    multiply(rows, seen, values, e.d, false, y_row, scores);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < e.d; ++c) y_row(r)[c] *= inverse_sums[r];
    }
  }
}

void backward(const AttentionExtents& e, std::int64_t head, float* dqkv, const float* dy, const float* y,
              const float* stats, const float* qkv, const AttentionDropout& dropout, float* memory,
              const GemmScratch& scratch) {
  HeadBackward(e, head, dqkv, dy, y, stats, qkv, dropout, memory).run(scratch);
}

}  // namespace pdl::attention_tiles
