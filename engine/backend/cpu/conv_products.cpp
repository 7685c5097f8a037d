#include "engine/backend/cpu/conv_products.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <cstddef>

namespace pdl::conv_products {
namespace {

// The weights of a product over pairs of pixels: for each tap a matrix [inner, columns], packed in blocks of kDepth
// rows.
struct TapWeights {
  std::int64_t taps, inner, columns;

  std::int64_t floats() const { return taps * PackedB::floats(inner, columns); }
  std::int64_t depth(std::int64_t first_inner) const { return std::min(kDepth, inner - first_inner); }
  /// Floats before the block that starts at row `first_inner` of a tap.
  std::int64_t offset(std::int64_t tap, std::int64_t first_inner) const {
    return PackedB::floats(tap * inner + first_inner, columns);
  }
  /// Columns of one block, from `first_column` on, a multiple of kTileColumns.
  PackedB block(const float* packed, std::int64_t tap, std::int64_t first_inner, std::int64_t first_column) const {
    const PackedB whole = {packed + offset(tap, first_inner), depth(first_inner)};
    return {whole.panel(first_column), whole.depth};
  }

  /// Calls pack(to, tap, first_inner, depth, first_column, columns) for every panel, on all threads.
  template <typename Pack>
  void pack_all(float* packed, bool threads, Pack pack) const {
    const std::int64_t blocks = divide_up(inner, kDepth);
#pragma omp parallel for collapse(2) schedule(static) if (threads)
    for (std::int64_t block = 0; block < taps * blocks; ++block) {
      for (std::int64_t column = 0; column < columns; column += kTileColumns) {
        const std::int64_t tap = block / blocks, first_inner = block % blocks * kDepth, rows = depth(first_inner);
        pack(packed + offset(tap, first_inner) + column * rows, tap, first_inner, rows, column,
             std::min(kTileColumns, columns - column));
      }
    }
  }
};

// With so few channels a row of one pixel is too short to multiply, and all rows of a patch fit one block of kDepth.
bool copies_patches(const ConvExtents& e) { return e.c <= 16 && e.taps() * e.c <= kDepth; }

TapWeights forward_weights(const ConvExtents& e) {
  return copies_patches(e) ? TapWeights{1, e.taps() * e.c, e.k} : TapWeights{e.taps(), e.c, e.k};
}
TapWeights backward_data_weights(const ConvExtents& e) { return {e.taps(), e.k, e.c}; }

// The input pixels under the kernel at one output pixel, side by side: [R, S, C], zeros where the kernel leaves the
// image.
void copy_patch(float* patch, const ConvExtents& e, const float* x, std::int64_t line, std::int64_t q) {
  const std::int64_t row = line % e.p * e.stride - e.row_padding, column = q * e.stride - e.padding;
  const std::int64_t first = std::max<std::int64_t>(0, -column),
                     last = std::min(e.kernel, e.w - column);  // taps S inside
  for (std::int64_t r = 0; r < e.kernel; ++r) {
    float* const to = patch + r * e.kernel * e.c;
    const bool inside = row + r >= 0 && row + r < e.h && first < last;
    if (!inside || last - first < e.kernel) std::fill_n(to, e.kernel * e.c, 0.0f);
    if (!inside) continue;
    const float* const from = x + ((line / e.p * e.h + row + r) * e.w + column) * e.c;
    std::copy(from + first * e.c, from + last * e.c, to + first * e.c);
  }
}

// Collects pairs of rows and hands them on, `capacity` at a time, as flush(first rows, second rows, count).
template <typename First, std::int64_t capacity, typename Flush>
class PairList {
 public:
  explicit PairList(Flush flush) : flush_(flush) {}
  void add(First* first, const float* second) {
    first_[static_cast<std::size_t>(count_)] = first;
    second_[static_cast<std::size_t>(count_)] = second;
    if (++count_ == capacity) finish();
  }
  void finish() {
    if (count_ > 0) flush_(first_.data(), second_.data(), count_);
    count_ = 0;
  }
  std::int64_t count() const { return count_; }

 private:
  std::array<First*, static_cast<std::size_t>(capacity)> first_;
  std::array<const float*, static_cast<std::size_t>(capacity)> second_;
  std::int64_t count_ = 0;
  Flush flush_;
};

// Pixels that are multiplied at once: few enough for the cache, enough to be worth a pass over the weights.
constexpr std::int64_t kPixels = 85 * kTileRows;

template <typename Flush>
PairList<float, kPixels, Flush> pairs_to_results(Flush flush) {
  return PairList<float, kPixels, Flush>(flush);
}
template <typename Flush>
PairList<const float, kDepth, Flush> pairs_to_sum(Flush flush) {
  return PairList<const float, kDepth, Flush>(flush);
}

// Lines of pixels by channels: one task of a product whose rows are pixels.
struct LineBlock {
  std::int64_t line, lines, column, columns;
};

// Calls work(block) for blocks that cover lines of `width` pixels with `channels` channels, on all threads.
template <typename Work>
void for_each_line_block(const ConvExtents& e, std::int64_t lines, std::int64_t width, std::int64_t channels,
                         Work work) {
  const std::int64_t height = std::max<std::int64_t>(1, kPixels / width);
  // Channels are split for want of pixels: the weights are packed already, so that costs little.
  const std::int64_t parts =
      std::max(divide_up(channels, kBlockColumns), divide_up(omp_get_max_threads(), divide_up(lines, height)));
  const std::int64_t columns = round_up(divide_up(channels, parts), kTileColumns);
#pragma omp parallel for collapse(2) schedule(dynamic) if (e.worth_threads())
  for (std::int64_t line = 0; line < lines; line += height) {
    for (std::int64_t column = 0; column < channels; column += columns) {
      work(LineBlock{line, std::min(height, lines - line), column, std::min(columns, channels - column)});
    }
  }
}

// to[i][column] += from[i] times the weights of one tap, for the columns of a block.
void add_tap(float* const* to, const float* const* from, std::int64_t count, const TapWeights& weights,
             const float* packed, std::int64_t tap, const LineBlock& block) {
  for (std::int64_t k = 0; k < weights.inner; k += kDepth) {
    multiply(
        count, weights.depth(k), weights.block(packed, tap, k, block.column), block.columns, true,
        [&](std::int64_t i) { return to[i] + block.column; }, [&](std::int64_t i) { return from[i] + k; });
  }
}

// dw [rows, columns] with rows `stride` apart (+)= sum over pixels of (row of dy)^T (row of x). The sum is cut every
// kDepth pairs.
class WeightGradient {
 public:
  WeightGradient(float* dw, std::int64_t stride, std::int64_t rows, std::int64_t columns, bool accumulate,
                 GemmScratch& scratch)
      : dw_(dw), stride_(stride), rows_(rows), columns_(columns), add_(accumulate), scratch_(scratch) {}

  void add(const float* const* dy, const float* const* x, std::int64_t count) {
    const PackedB b = pack_rows(scratch_.packed(), count, columns_, [&](std::int64_t i) { return x[i]; });
    multiply_transposed(
        rows_, count, b, columns_, add_, scratch_.copied(), [&](std::int64_t row) { return dw_ + row * stride_; },
        [&](std::int64_t i) { return dy[i]; });
    add_ = true;
  }
  /// A tap that meets no pixel has gradient zero.
  void finish() {
    for (std::int64_t row = 0; row < rows_ && !add_; ++row) std::fill_n(dw_ + row * stride_, columns_, 0.0f);
  }

 private:
  float* dw_;
  std::int64_t stride_, rows_, columns_;
  bool add_;
  GemmScratch& scratch_;
};

void backward_weight_of_patches(const ConvExtents& e, float* dw, const float* dy, const float* x, bool accumulate,
                                GemmScratch& scratch) {
  const std::int64_t width = e.taps() * e.c, rows = round_up(divide_up(e.k, omp_get_max_threads()), kTileRows);
#pragma omp parallel for schedule(dynamic) if (e.worth_threads())
  for (std::int64_t k = 0; k < e.k; k += rows) {
    WeightGradient gradient(dw + k * width, width, std::min(rows, e.k - k), width, accumulate, scratch);
    auto pairs = pairs_to_sum([&](const float* const* outputs, const float* const* patches, std::int64_t count) {
      gradient.add(outputs, patches, count);
    });
    // At most kDepth columns are packed here: the other half of that room holds the patches.
    static_assert(kBlockColumns >= 2 * kDepth && kDepth % kTileColumns == 0);
    float* const patches = scratch.packed() + kDepth * kDepth;
    for (std::int64_t output = 0; output < e.n * e.p * e.q; ++output) {
      float* const patch = patches + pairs.count() * width;
      copy_patch(patch, e, x, output / e.q, output % e.q);
      pairs.add(dy + output * e.k + k, patch);
    }
    pairs.finish();
    gradient.finish();
  }
}

// One block of dw for some taps: columns [c, c + columns) of rows [k, k + rows).
struct GradientBlock {
  std::int64_t first_tap, last_tap, k, rows, c, columns;
};

void backward_weight_of_block(const ConvExtents& e, const GradientBlock& block, float* dw, const float* dy,
                              const float* x, bool accumulate, GemmScratch& scratch) {
  // All taps pass over some lines before any passes over the next: pixels then come from memory once.
  constexpr std::int64_t kPixelsOfPass = 4 * kDepth;
  const std::int64_t lines = e.n * e.p, pass = std::max<std::int64_t>(1, kPixelsOfPass / e.q);
  for (std::int64_t first = 0; first < lines; first += pass) {
    for (std::int64_t tap = block.first_tap; tap < block.last_tap; ++tap) {
      WeightGradient gradient(dw + (block.k * e.taps() + tap) * e.c + block.c, e.taps() * e.c, block.rows,
                              block.columns, accumulate || first > 0, scratch);
      auto pairs = pairs_to_sum([&](const float* const* outputs, const float* const* inputs, std::int64_t count) {
        gradient.add(outputs, inputs, count);
      });
      for (std::int64_t line = first; line < std::min(first + pass, lines); ++line) {
        e.pairs_of_output_line(line, tap, [&](std::int64_t output, std::int64_t input) {
          pairs.add(dy + output * e.k + block.k, x + input * e.c + block.c);
        });
      }
      pairs.finish();
      gradient.finish();
    }
  }
}

void backward_weight_of_taps(const ConvExtents& e, float* dw, const float* dy, const float* x, bool accumulate,
                             GemmScratch& scratch) {
  const std::int64_t threads = omp_get_max_threads();
  // Rows are split first, as long as they are worth it, then taps.
  const std::int64_t columns = std::min(kBlockColumns, e.c);
  const std::int64_t rows = std::max(round_up(divide_up(e.k, threads), kTileRows), std::min(e.k, kBlockRows / 2));
  const std::int64_t tap_groups =
      std::min(e.taps(), divide_up(threads, divide_up(e.c, columns) * divide_up(e.k, rows)));
#pragma omp parallel for collapse(3) schedule(dynamic) if (e.worth_threads())
  for (std::int64_t group = 0; group < tap_groups; ++group) {
    for (std::int64_t c = 0; c < e.c; c += columns) {
      for (std::int64_t k = 0; k < e.k; k += rows) {
        const GradientBlock block = {
            group * e.taps() / tap_groups, (group + 1) * e.taps() / tap_groups, k, std::min(rows, e.k - k), c,
            std::min(columns, e.c - c)};
        backward_weight_of_block(e, block, dw, dy, x, accumulate, scratch);
      }
    }
  }
}

}  // namespace

std::int64_t packed_floats(const ConvExtents& e) {
  return std::max(forward_weights(e).floats(), backward_data_weights(e).floats());
}

void forward(const ConvExtents& e, float* y, const float* x, const float* w, const float* bias, bool relu,
             float* packed, GemmScratch& scratch) {
  scratch.reserve();
  const TapWeights weights = forward_weights(e);
  weights.pack_all(packed, e.worth_threads(),
                   [&](float* to, std::int64_t tap, std::int64_t inner, std::int64_t depth, std::int64_t column,
                       std::int64_t columns) {
                     pack_transposed(to, depth, columns, [&](std::int64_t j) {
                       return w + ((column + j) * weights.taps + tap) * weights.inner + inner;
                     });
                   });
  for_each_line_block(e, e.n * e.p, e.q, e.k, [&](const LineBlock& block) {
    const std::int64_t first = block.line * e.q, last = first + block.lines * e.q;
    const auto of_block = [&](std::int64_t output) { return y + output * e.k + block.column; };
    for (std::int64_t output = first; output < last; ++output) {
      for (std::int64_t j = 0; j < block.columns; ++j)
        of_block(output)[j] = bias == nullptr ? 0.0f : bias[block.column + j];
    }
    std::int64_t tap = 0;
    auto pairs = pairs_to_results([&](float* const* to, const float* const* from, std::int64_t count) {
      add_tap(to, from, count, weights, packed, tap, block);
    });
    static_assert(kPixels * kDepth <= kDepth * kBlockColumns, "patches of a block fit the scratch");
    for (std::int64_t output = first; output < last && copies_patches(e); ++output) {
      float* const patch = scratch.packed() + pairs.count() * weights.inner;
      copy_patch(patch, e, x, output / e.q, output % e.q);
      pairs.add(y + output * e.k, patch);
    }
    for (; tap < e.taps() && !copies_patches(e); ++tap) {
      for (std::int64_t line = block.line; line < block.line + block.lines; ++line) {
        e.pairs_of_output_line(
            line, tap, [&](std::int64_t output, std::int64_t input) { pairs.add(y + output * e.k, x + input * e.c); });
      }
      pairs.finish();
    }
    pairs.finish();
    for (std::int64_t output = first; output < last && relu; ++output) {
      for (std::int64_t j = 0; j < block.columns; ++j)
        of_block(output)[j] = of_block(output)[j] < 0.0f ? 0.0f : of_block(output)[j];
    }
  });
}

void backward_data(const ConvExtents& e, float* dx, const float* dy, const float* w, float* packed,
                   GemmScratch& scratch) {
  scratch.reserve();
  const TapWeights weights = backward_data_weights(e);
  weights.pack_all(packed, e.worth_threads(),
                   [&](float* to, std::int64_t tap, std::int64_t inner, std::int64_t depth, std::int64_t column,
                       std::int64_t columns) {
                     pack_rows(to, depth, columns,
                               [&](std::int64_t k) { return w + ((inner + k) * e.taps() + tap) * e.c + column; });
                   });
  for_each_line_block(e, e.n * e.h, e.w, e.c, [&](const LineBlock& block) {
    const std::int64_t first = block.line * e.w, last = first + block.lines * e.w;
    for (std::int64_t input = first; input < last; ++input)
      std::fill_n(dx + input * e.c + block.column, block.columns, 0.0f);
    std::int64_t tap = 0;
    auto pairs = pairs_to_results([&](float* const* to, const float* const* from, std::int64_t count) {
      add_tap(to, from, count, weights, packed, tap, block);
    });
    for (; tap < e.taps(); ++tap) {
      for (std::int64_t line = block.line; line < block.line + block.lines; ++line) {
        e.pairs_of_input_line(line, tap, [&](std::int64_t output, std::int64_t input) {
          pairs.add(dx + input * e.c, dy + output * e.k);
        });
      }
      pairs.finish();
    }
  });
}

void backward_weight(const ConvExtents& e, float* dw, const float* dy, const float* x, bool accumulate,
                     GemmScratch& scratch) {
  scratch.reserve();
  if (copies_patches(e)) {
    backward_weight_of_patches(e, dw, dy, x, accumulate, scratch);
  } else {
    backward_weight_of_taps(e, dw, dy, x, accumulate, scratch);
  }
}

}  // namespace pdl::conv_products
