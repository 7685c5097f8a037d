// Cuts segments into pieces and keeps the tables in device memory.

#include "engine/backend/cuda/segment_tables.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>
#include <utility>

namespace pdl::cuda {
namespace {

bool same(const UpdateSegment& a, const UpdateSegment& b) {
  return a.offset == b.offset && a.count == b.count && a.decay == b.decay;
}

// End of the last segment: the range must be at least as long.
std::int64_t end_of(const std::vector<UpdateSegment>& segments) {
  std::int64_t end = 0;
  for (const UpdateSegment& segment : segments) {
    PDL_CHECK(segment.offset >= 0 && segment.count >= 0, "segment ", segment.offset, "+", segment.count);
    end = std::max(end, segment.offset + segment.count);
  }
  return end;
}

// Fills `first_piece`, [segments + 1].
std::vector<SegmentPiece> cut_into_pieces(const std::vector<UpdateSegment>& segments,
                                          std::vector<std::int64_t>& first_piece) {
  PDL_CHECK(segments.size() < static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()), segments.size(),
            " segments");
  std::vector<SegmentPiece> pieces;
  std::int32_t index = 0;
  for (const UpdateSegment& segment : segments) {
    first_piece.push_back(static_cast<std::int64_t>(pieces.size()));
    for (std::int64_t done = 0; done < segment.count; done += kPieceElements) {
      const std::int64_t count = std::min(kPieceElements, segment.count - done);
      pieces.push_back({segment.offset + done, static_cast<std::int32_t>(count), index, segment.decay ? 1 : 0});
    }
    ++index;
  }
  first_piece.push_back(static_cast<std::int64_t>(pieces.size()));
  return pieces;
}

}  // namespace

struct SegmentTables::Entry {
  Entry(Device& device, const UpdateSegment* from, std::int64_t count)
      : segments(from, from + count), end(end_of(segments)), memory(device) {}

  bool holds(const UpdateSegment* others, std::int64_t count) const {
    return static_cast<std::int64_t>(segments.size()) == count &&
           std::equal(segments.begin(), segments.end(), others, same);
  }

  void upload(cudaStream_t stream) {
    std::vector<std::int64_t> first_piece;
    const std::vector<SegmentPiece> pieces = cut_into_pieces(segments, first_piece);
    const std::size_t piece_bytes = pieces.size() * sizeof(SegmentPiece);
    const std::size_t index_bytes = first_piece.size() * sizeof(std::int64_t);
    char* const data = static_cast<char*>(memory.get(static_cast<std::int64_t>(piece_bytes + index_bytes)));
    if (piece_bytes > 0) PDL_CUDA(cudaMemcpyAsync(data, pieces.data(), piece_bytes, cudaMemcpyHostToDevice, stream));
    PDL_CUDA(cudaMemcpyAsync(data + piece_bytes, first_piece.data(), index_bytes, cudaMemcpyHostToDevice, stream));
    PDL_CUDA(cudaStreamSynchronize(stream));  // the vectors end here
    table.pieces = reinterpret_cast<const SegmentPiece*>(data);
    table.first_piece = reinterpret_cast<const std::int64_t*>(data + piece_bytes);
    table.piece_count = static_cast<std::int64_t>(pieces.size());
  }

  std::vector<UpdateSegment> segments;
  std::int64_t end;
  CudaScratch memory;  // of this entry alone
  SegmentTable table;
};

SegmentTables::SegmentTables(Device& device) : device_(device) {}
SegmentTables::~SegmentTables() = default;

const SegmentTable& SegmentTables::get(const UpdateSegment* segments, std::int64_t count, std::int64_t range_elements,
                                       cudaStream_t stream) {
  auto found = std::find_if(entries_.begin(), entries_.end(),
                            [&](const std::unique_ptr<Entry>& entry) { return entry->holds(segments, count); });
  if (found == entries_.end()) {
    auto entry = std::make_unique<Entry>(device_, segments, count);
    PDL_CHECK(entry->end <= range_elements, "segments up to ", entry->end, " of ", range_elements);
    entry->upload(stream);
    entries_.push_back(std::move(entry));
    found = std::prev(entries_.end());
  }
  PDL_CHECK((*found)->end <= range_elements, "segments up to ", (*found)->end, " of ", range_elements);
  return (*found)->table;
}

}  // namespace pdl::cuda
