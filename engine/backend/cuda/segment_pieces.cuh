#pragma once
// How a block walks over a piece of a segment: four elements at a time where all ranges are aligned, else one by one.

#include <cstdint>
#include <initializer_list>

#include "engine/backend/cuda/kernel_tools.cuh"
#include "engine/backend/cuda/segment_tables.h"

namespace pdl::cuda {

inline constexpr int kPieceThreads = 256;
inline constexpr int kQuad = 4;  ///< elements of one access: 16 bytes of fp32

/// How many elements one step takes: std::integral_constant cannot be asked in device code.
template <int kWidth>
struct Width {
  static constexpr int value = kWidth;
};

/// Place of the tensors' first elements among the quads of memory, 0 to 3: element i starts a quad where (phase + i) is
/// a multiple of 4. -1 when the defined tensors differ: then there are no quads.
inline int phase_of(std::initializer_list<Tensor> tensors) {
  int phase = -1;
  for (const Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    const auto element =
        reinterpret_cast<std::uintptr_t>(tensor.raw()) / static_cast<std::uintptr_t>(size_of(tensor.dtype()));
    const int own = static_cast<int>(element % kQuad);
    if (phase >= 0 && own != phase) return -1;
    phase = own;
  }
  return phase;
}

/// Elements that the threads of the block take one by one and four by four, in any order: work(width, i) with `width`
/// Width<4> or Width<1>, for elements i .. i + width - 1 of the flat range. `phase` is phase_of all ranges.
template <typename Work>
__device__ inline void for_each_quad(const SegmentPiece& piece, int phase, Work work) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  int head = 0, quads = 0;
  if (phase >= 0) {
    head = min((kQuad - static_cast<int>((phase + piece.first) % kQuad)) % kQuad, piece.count);
    quads = (piece.count - head) / kQuad;
  }
  for (int q = thread; q < quads; q += threads) {
    work(Width<kQuad>{}, piece.first + head + q * kQuad);
  }
  const int rest = piece.count - quads * kQuad;  // the head and the tail
  for (int r = thread; r < rest; r += threads) {
    work(Width<1>{}, piece.first + (r < head ? r : r + quads * kQuad));
  }
}

/// The same, but which thread takes which elements, and in what order, depends on the length of the piece alone: for
/// sums.
template <typename Work>
__device__ inline void for_each_quad_in_order(const SegmentPiece& piece, int phase, Work work) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const bool aligned = phase >= 0 && (phase + piece.first) % kQuad == 0;
  const int whole = piece.count / kQuad * kQuad;
  for (int i = thread * kQuad; i < whole; i += threads * kQuad) {
    if (aligned) {
      work(Width<kQuad>{}, piece.first + i);
    } else {
#pragma unroll
      for (int k = 0; k < kQuad; ++k) work(Width<1>{}, piece.first + i + k);
    }
  }
  const int tail = whole + thread;
  if (tail < piece.count) work(Width<1>{}, piece.first + tail);
}

}  // namespace pdl::cuda
