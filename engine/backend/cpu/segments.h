#pragma once
// Work over the segments of a flat range, cut into pieces that threads share out.
//
// A segment is cut every kPieceElements from its own start, so pieces depend neither on the number of threads nor on
// what else lies in the range. A sum over a segment is the sum of its pieces' sums in order.

#include <algorithm>
#include <array>
#include <cstddef>

#include "engine/backend/cpu/loops.h"

namespace pdl {

/// Elements [first, first + count) of the flat range: a part of one segment.
struct Piece {
  std::int64_t segment = 0, first = 0, count = 0;
  bool decay = true;
};

inline constexpr std::int64_t kPieceElements = 16384;

/// Every segment has to lie in the range.
inline void check_segments(const UpdateSegment* segments, std::int64_t count, std::int64_t range_elements) {
  for (std::int64_t s = 0; s < count; ++s) {
    PDL_CHECK(
        segments[s].offset >= 0 && segments[s].count >= 0 && segments[s].offset + segments[s].count <= range_elements,
        "segment ", segments[s].offset, "+", segments[s].count, " of ", range_elements);
  }
}

/// combine(piece, work(piece)) for all pieces of all segments: `work` runs on all threads, `combine` on one and in
/// order. Neither may throw.
template <typename Result, typename Work, typename Combine>
void reduce_pieces(const UpdateSegment* segments, std::int64_t count, std::int64_t range_elements, Work work,
                   Combine combine) {
  check_segments(segments, count, range_elements);
  constexpr std::int64_t kBatch = 512;  // pieces between two combinations: what needs memory is bounded by it
  std::array<Piece, static_cast<std::size_t>(kBatch)> pieces;
  std::array<Result, static_cast<std::size_t>(kBatch)> results;
  std::int64_t filled = 0, elements = 0;
  const auto flush = [&] {
    const bool worthwhile = filled > 1 && elements >= kElementsWorthThreads;
    const Piece* const piece = pieces.data();
    Result* const result = results.data();
#pragma omp parallel for schedule(dynamic) if (worthwhile)
    for (std::int64_t i = 0; i < filled; ++i) result[i] = work(piece[i]);
    for (std::int64_t i = 0; i < filled; ++i) combine(piece[i], result[i]);
    filled = elements = 0;
  };
  for (std::int64_t s = 0; s < count; ++s) {
    const UpdateSegment& segment = segments[s];
    for (std::int64_t done = 0; done < segment.count; done += kPieceElements) {
      const std::int64_t piece_count = std::min(kPieceElements, segment.count - done);
      pieces[static_cast<std::size_t>(filled++)] = {s, segment.offset + done, piece_count, segment.decay};
      elements += piece_count;
      if (filled == kBatch) flush();
    }
  }
  flush();
}

/// work(piece) for all pieces of all segments, over threads.
template <typename Work>
void for_each_piece(const UpdateSegment* segments, std::int64_t count, std::int64_t range_elements, Work work) {
  struct Nothing {};
  reduce_pieces<Nothing>(
      segments, count, range_elements,
      [&](const Piece& piece) {
        work(piece);
        return Nothing{};
      },
      [](const Piece&, Nothing) {});
}

}  // namespace pdl
