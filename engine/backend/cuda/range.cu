// Flat ranges: what gradients, parameters and moments are to optimizers and communication.

#include <cmath>
#include <type_traits>

#include "engine/backend/cuda/cuda_backend.h"
#include "engine/backend/cuda/segment_pieces.cuh"

namespace pdl {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSumThreads = 1024;

// ------------------------------------------------------------------------------------------------------ device helpers

template <typename T>
inline constexpr bool kIsHalf = std::is_same_v<T, bf16> || std::is_same_v<T, half>;

// The value of `x` as another type. The halves are reached through fp32.
template <typename To, typename From>
__device__ To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (kIsHalf<From>) {
    return convert<To>(to_float(x));
  } else if constexpr (kIsHalf<To>) {
    return from_float<To>(static_cast<float>(x));
  } else {
    return static_cast<To>(x);
  }
}

// Elementwise work: at<kWidth>(i) does elements i .. i + kWidth - 1, by whole vectors where kWidth > 1.
template <typename T>
struct Fill {
  template <int kWidth>
  __device__ void at(std::int64_t i) const {
    Vector<T, kWidth> vector;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) vector.at[k] = convert<T>(value);
    store_vector(x + i, vector);
  }
  T* x;
  double value;
};

template <typename To, typename From>
struct Convert {
  template <int kWidth>
  __device__ void at(std::int64_t i) const {
    const auto from = load_vector<kWidth>(x + i);
    Vector<To, kWidth> to;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) to.at[k] = convert<To>(from.at[k]);
    store_vector(y + i, to);
  }
  To* y;
  const From* x;
};

template <typename T>
struct Add {
  template <int kWidth>
  __device__ void at(std::int64_t i) const {
    auto sum = load_vector<kWidth>(y + i);
    const auto term = load_vector<kWidth>(x + i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum.at[k] = from_float<T>(fmaf(factor, to_float(term.at[k]), to_float(sum.at[k])));
    store_vector(y + i, sum);
  }
  T* y;
  const T* x;
  float factor;
};

template <typename T>
struct Scale {
  template <int kWidth>
  __device__ void at(std::int64_t i) const {
    auto vector = load_vector<kWidth>(x + i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) vector.at[k] = from_float<T>(factor * to_float(vector.at[k]));
    store_vector(x + i, vector);
  }
  T* x;
  float factor;
};

// ------------------------------------------------------------------------------------------------------------- kernels

// The first `vectors` threads take a vector each, behind the `head` elements in front of the first aligned one; the
// threads behind them take an element each of the head and the tail.
template <int kWidth, typename Work>
__global__ void __launch_bounds__(kThreads)
    elementwise_kernel(Work work, std::int64_t head, std::int64_t vectors, std::int64_t count) {
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (thread < vectors) {
    work.template at<kWidth>(head + thread * kWidth);
    return;
  }
  const std::int64_t rest = thread - vectors;
  const std::int64_t i = rest < head ? rest : rest + vectors * kWidth;
  if (i < count) work.template at<1>(i);
}

// total += sum of x, by one block: fp64 sums of fp32 values of like size are all but exact, in any order.
template <typename T>
__global__ void __launch_bounds__(kSumThreads) accumulate_sum_kernel(double* total, const T* x, std::int64_t count) {
  __shared__ double shared[kSumThreads / kWarp];
  double sum = 0.0;
#pragma unroll 8
  for (std::int64_t i = threadIdx.x; i < count; i += kSumThreads) sum += static_cast<double>(to_float(x[i]));
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) *total += sum;
}

// partial[piece] = sum of squares of the piece.
template <typename T>
__global__ void __launch_bounds__(kPieceThreads)
    squares_kernel(double* partial, const T* x, const SegmentPiece* pieces, int phase) {
  __shared__ double shared[kPieceThreads / kWarp];
  const SegmentPiece piece = pieces[blockIdx.x];
  double sum = 0.0;
  for_each_quad_in_order(piece, phase, [&](auto width, std::int64_t i) {
    constexpr int kWidth = decltype(width)::value;
    const auto values = load_vector<kWidth>(x + i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const auto value = static_cast<double>(to_float(values.at[k]));
      sum = fma(value, value, sum);
    }
  });
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block per segment: totals[segment] = sum over its pieces.
__global__ void __launch_bounds__(kPieceThreads)
    add_squares_kernel(double* totals, const double* partial, const std::int64_t* first_piece) {
  __shared__ double shared[kPieceThreads / kWarp];
  const std::int64_t last = first_piece[blockIdx.x + 1];
  double sum = 0.0;
  for (std::int64_t p = first_piece[blockIdx.x] + threadIdx.x; p < last; p += kPieceThreads) sum += partial[p];
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}

// ----------------------------------------------------------------------------------------------------------- launchers

// Calls work(T{}) with T the element type, floating-point or integer.
template <typename Work>
void with_any_type(DType dtype, Work work) {
  switch (dtype) {
    case DType::fp64:
      return work(double{});
    case DType::fp32:
      return work(float{});
    case DType::bf16:
      return work(bf16{});
    case DType::fp16:
      return work(half{});
    case DType::int64:
      return work(std::int64_t{});
    case DType::int32:
      return work(std::int32_t{});
    case DType::uint8:
      return work(std::uint8_t{});
  }
}

// Elements in front of the first vector of kWidth.
template <int kWidth, typename T>
std::int64_t head_of(const T* data) {
  const auto element = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data) / sizeof(T) % kWidth);
  return (kWidth - element) % kWidth;
}

// work.at over [0, count), by vectors of kWidth when all of the ranges at `data` start them at the same element.
template <int kWidth, typename Work, typename First, typename... Others>
void launch_elementwise(const Work& work, std::int64_t count, cudaStream_t stream, const First* first,
                        const Others*... others) {
  if (count == 0) return;
  std::int64_t head = std::min(head_of<kWidth>(first), count), vectors = (count - head) / kWidth;
  if (((head_of<kWidth>(others) != head_of<kWidth>(first)) || ...)) head = vectors = 0;
  const std::int64_t threads = vectors + (count - vectors * kWidth);
  elementwise_kernel<kWidth><<<blocks_for(threads, kThreads), kThreads, 0, stream>>>(work, head, vectors, count);
  check_launch("elementwise_kernel");
}

void check_same_length(const Tensor& y, const Tensor& x) {
  PDL_CHECK(y.elements() == x.elements(), x.shape().to_string(), " for ", y.shape().to_string());
}

}  // namespace
}  // namespace cuda

void CudaBackend::fill(Tensor x, double value) {
  using namespace cuda;
  if (x.elements() == 0) return;
  if (value == 0.0 && !std::signbit(value)) {  // zero has no bits in any type
    PDL_CUDA(cudaMemsetAsync(x.raw(), 0, static_cast<std::size_t>(x.bytes()), stream_));
    return;
  }
  with_any_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    launch_elementwise<kVectorWidth<T>>(Fill<T>{pointer<T>(x), value}, x.elements(), stream_, pointer<T>(x));
  });
}

void CudaBackend::copy_block(Tensor y, std::int64_t y_pitch, Tensor x, std::int64_t x_pitch, std::int64_t rows,
                             std::int64_t columns) {
  check_block(y, y_pitch, x, x_pitch, rows, columns);
  if (rows == 0 || columns == 0) return;
  const auto bytes = [&](std::int64_t elements) { return static_cast<std::size_t>(elements * size_of(x.dtype())); };
  PDL_CUDA(cudaMemcpy2DAsync(y.raw(), bytes(y_pitch), x.raw(), bytes(x_pitch), bytes(columns),
                             static_cast<std::size_t>(rows), cudaMemcpyDeviceToDevice, stream_));
}

void CudaBackend::copy(Tensor y, Tensor x) {
  using namespace cuda;
  check_same_length(y, x);
  if (y.dtype() == x.dtype()) {
    if (y.raw() == x.raw() || y.elements() == 0) return;
    PDL_CUDA(cudaMemcpyAsync(y.raw(), x.raw(), static_cast<std::size_t>(x.bytes()), cudaMemcpyDeviceToDevice, stream_));
    return;
  }
  with_any_type(y.dtype(), [&](auto y_zero) {
    with_any_type(x.dtype(), [&](auto x_zero) {
      using To = decltype(y_zero);
      using From = decltype(x_zero);
      if constexpr (!std::is_same_v<To, From>) {  // done above
        constexpr int kWidth = std::min(kVectorWidth<To>, kVectorWidth<From>);
        launch_elementwise<kWidth>(Convert<To, From>{pointer<To>(y), pointer<From>(x)}, y.elements(), stream_,
                                   pointer<To>(y), pointer<From>(x));
      }
    });
  });
}

void CudaBackend::add(Tensor y, Tensor x, double scale) {
  using namespace cuda;
  check_same_length(y, x);
  PDL_CHECK(y.dtype() == x.dtype(), name_of(x.dtype()), " added to ", name_of(y.dtype()));
  with_compute_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    launch_elementwise<kVectorWidth<T>>(Add<T>{pointer<T>(y), pointer<T>(x), static_cast<float>(scale)}, y.elements(),
                                        stream_, pointer<T>(y), pointer<T>(x));
  });
}

void CudaBackend::scale(Tensor x, double factor) {
  using namespace cuda;
  with_compute_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    launch_elementwise<kVectorWidth<T>>(Scale<T>{pointer<T>(x), static_cast<float>(factor)}, x.elements(), stream_,
                                        pointer<T>(x));
  });
}

void CudaBackend::accumulate_sum(Tensor total, Tensor x) {
  using namespace cuda;
  PDL_CHECK(total.elements() == 1, "total ", total.shape().to_string());
  double* const sum = total.data<double>();
  with_compute_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    if (x.elements() == 0) return;
    accumulate_sum_kernel<<<1, kSumThreads, 0, stream_>>>(sum, pointer<const T>(x), x.elements());
    check_launch("accumulate_sum_kernel");
  });
}

void CudaBackend::sum_of_squares(Tensor totals, Tensor x, const UpdateSegment* segments, std::int64_t count) {
  using namespace cuda;
  PDL_CHECK(totals.elements() == count, totals.shape().to_string(), " totals for ", count, " segments");
  double* const sums = totals.data<double>();
  if (count == 0) return;
  const SegmentTable& table = segments_->get(segments, count, x.elements(), stream_);
  auto* const partial = static_cast<double*>(
      scratch_.get(std::max<std::int64_t>(table.piece_count, 1) * static_cast<std::int64_t>(sizeof(double))));
  with_compute_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    if (table.piece_count == 0) return;
    squares_kernel<<<blocks_for(table.piece_count, 1), kPieceThreads, 0, stream_>>>(partial, pointer<const T>(x),
                                                                                    table.pieces, phase_of({x}));
    check_launch("squares_kernel");
  });
  add_squares_kernel<<<blocks_for(count, 1), kPieceThreads, 0, stream_>>>(sums, partial, table.first_piece);
  check_launch("add_squares_kernel");
}

}  // namespace pdl
