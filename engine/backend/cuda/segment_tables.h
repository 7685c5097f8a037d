#pragma once
// The segments of a flat range as tables in device memory: what the kernels that work on all segments in one launch
// read.
//
// A segment is cut every kPieceElements from its own start, so pieces do not depend on what else lies in the range. A
// kernel gives each piece to one block; a sum over a segment is the sum of its pieces' sums in order.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/device/cuda_device.h"

namespace pdl::cuda {

/// Elements of a piece: thousands of pieces in a large model, so that the last wave of blocks is a small part, and
/// enough work in each to forget its start.
inline constexpr std::int64_t kPieceElements = 16384;

/// Elements [first, first + count) of the flat range: a part of one segment.
struct SegmentPiece {
  std::int64_t first;
  std::int32_t count;
  std::int32_t segment;
  std::int32_t decay;  ///< 1: weight decay applies
};

/// Tables in device memory.
struct SegmentTable {
  const SegmentPiece* pieces = nullptr;       ///< in the order of the segments
  const std::int64_t* first_piece = nullptr;  ///< [segments + 1]: segment s has pieces first_piece[s] .. [s + 1]
  std::int64_t piece_count = 0;
};

/// Tables made once for each list of segments that is asked for, found again by content.
class SegmentTables {
 public:
  explicit SegmentTables(Device& device);
  ~SegmentTables();
  SegmentTables(const SegmentTables&) = delete;
  SegmentTables& operator=(const SegmentTables&) = delete;

  /// The tables of `count` segments, each of which has to lie in a range of `range_elements`. The first call for a list
  /// uploads them and waits for `stream`; later ones only look them up.
  const SegmentTable& get(const UpdateSegment* segments, std::int64_t count, std::int64_t range_elements,
                          cudaStream_t stream);

 private:
  struct Entry;
  Device& device_;
  std::vector<std::unique_ptr<Entry>> entries_;
};

}  // namespace pdl::cuda
