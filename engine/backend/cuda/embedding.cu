// Token and position embeddings.
//
// Backward adds rows of dy to the rows of dwte that tokens choose, without atomics and with the same bits each time.
// Tokens are sorted on the device, which puts equal ones side by side and keeps their order:
//
//   sorted tokens    3 3 3 7 | 7 7 7 7 | 7 9 9 12       cut into windows of kWindow; a run is what equal tokens form
//   sum_windows      a run inside one window goes straight to its row of dwte; of others, each window leaves the sum of
//                    its part: as its `tail` where the run starts, as its `head` where the run comes from before
//   join_windows     the window where such a run starts adds the tail and the heads that follow to the row of dwte
//
// So a frequent token is shared out over many blocks, and each row of dwte is still written by one.

#include <cub/device/device_radix_sort.cuh>

#include "engine/backend/cuda/cuda_backend.h"
#include "engine/backend/cuda/kernel_tools.cuh"

namespace pdl {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWindow = 32;  // a warp looks at one window's tokens at a time
constexpr int kWindowThreads = 128;
constexpr int kBatch = 8;                     // rows on their way at once
constexpr std::uint32_t kNone = 0xffffffffu;  // no row of any table

// ------------------------------------------------------------------------------------------------------ device helpers
// The row of the table that a token owns here, or `rows` when another shard of the vocabulary has it.
__device__ std::uint32_t local_row(std::int32_t token, std::int64_t first_token, std::uint32_t rows) {
  const std::int64_t row = token - first_token;
  return row >= 0 && row < rows ? static_cast<std::uint32_t>(row) : rows;
}

// Adds kWidth fp32 numbers to a place of a gradient, or overwrites it. Only `vectors` promises 16-byte alignment.
template <int kWidth>
__device__ void put(float* to, const float (&values)[kWidth], bool vectors, bool accumulate) {
  if constexpr (kWidth % 4 == 0) {
    if (vectors) {
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        float4* const place = reinterpret_cast<float4*>(to + i);
        float4 sum = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
        if (accumulate) {
          const float4 old = *place;
          sum = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
        }
        *place = sum;
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) to[i] = accumulate ? to[i] + values[i] : values[i];
}

// Tokens in sorted order: their rows of the table and where in the batch they came from. Tokens of no row here are
// last.
struct SortedTokens {
  const std::uint32_t *row, *position;
  std::uint32_t count, table_rows;

  __device__ std::uint32_t row_or_none(std::int64_t i) const { return i >= 0 && i < count ? row[i] : kNone; }
};

// Sums of the parts of runs that cross windows: [windows, C] each.
struct WindowSums {
  float *head, *tail;
};

// ------------------------------------------------------------------------------------------------------------- kernels
// One vector of y [B, T, C] for each thread; counts are in vectors of kWidth.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    embed(T* y, const std::int32_t* tokens, const T* wte, const T* wpe, std::int64_t first_token,
          std::uint32_t table_rows, VectorIndex<kWidth> positions, VectorIndex<kWidth> width,
          VectorIndex<kWidth> vectors, const DropoutMask mask, bool drop) {
  using Index = VectorIndex<kWidth>;
  const std::int64_t global = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (global >= static_cast<std::int64_t>(vectors)) return;
  const Index vector = static_cast<Index>(global), m = vector / width, column = vector - m * width;
  const Index sample = m / positions, position = m - sample * positions;
  const std::uint32_t row = local_row(tokens[m], first_token, table_rows);
  float value[kWidth] = {}, other[kWidth] = {};
  if (row < table_rows) load_floats(value, wte + (row * static_cast<std::int64_t>(width) + column) * kWidth);
  if (wpe != nullptr) load_floats(other, wpe + (static_cast<std::int64_t>(position) * width + column) * kWidth);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) value[i] += other[i];
  if (drop) {
    const std::int64_t full_width = mask.local_width == 0 ? static_cast<std::int64_t>(width) * kWidth : mask.full_width;
    const std::int64_t start = mask.local_width == 0 ? 0 : mask.first_column;
    float scale[kWidth];
    mask.scales(scale, mask.sample_ids[sample],
                static_cast<std::int64_t>(position) * full_width + start + static_cast<std::int64_t>(column) * kWidth);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] *= scale[i];
  }
  store_floats(y + global * kWidth, value);
}

// dwpe[t] (+)= sum over b of dy[b, t]: one vector of [T, C] for each thread.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) sum_positions(float* dwpe, const T* dy, std::int64_t samples,
                                                          std::int64_t sample_elements, bool vectors, bool accumulate) {
  const std::int64_t first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (first >= sample_elements) return;
  float sum[kWidth] = {};
#pragma unroll 4
  for (std::int64_t b = 0; b < samples; ++b) {
    float value[kWidth];
    load_floats(value, dy + b * sample_elements + first);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] += value[i];
  }
  put(dwpe + first, sum, vectors, accumulate);
}

__global__ void __launch_bounds__(kThreads)
    number_tokens(std::uint32_t* row, std::uint32_t* position, const std::int32_t* tokens, std::uint32_t count,
                  std::int64_t first_token, std::uint32_t table_rows) {
  const std::uint32_t m = blockIdx.x * kThreads + threadIdx.x;
  if (m >= count) return;
  row[m] = local_row(tokens[m], first_token, table_rows);
  position[m] = m;
}

// One window of sorted tokens for each block; each thread takes vectors of columns through all rows of the window.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kWindowThreads)
    sum_windows(float* dwte, WindowSums sums, const T* dy, SortedTokens sorted, std::int64_t width, bool vectors) {
  __shared__ std::uint32_t rows[kWindow], positions[kWindow];
  const std::int64_t window = blockIdx.x, start = window * kWindow;
  if (threadIdx.x < kWindow) {
    const bool inside = start + threadIdx.x < sorted.count;
    rows[threadIdx.x] = inside ? sorted.row[start + threadIdx.x] : sorted.table_rows;
    positions[threadIdx.x] = inside ? sorted.position[start + threadIdx.x] : 0;
  }
  const std::uint32_t before = sorted.row_or_none(start - 1), after = sorted.row_or_none(start + kWindow);
  __syncthreads();
  // Adds a run's sum to where it belongs. `opens`: the run holds the window's first token; `closes`: its last one.
  const auto finish = [&](std::uint32_t row, const float(&sum)[kWidth], bool opens, bool closes, std::int64_t column) {
    if (opens && row == before) {
      put(sums.head + window * width + column, sum, true, false);
    } else if (closes && row == after) {
      put(sums.tail + window * width + column, sum, true, false);
    } else {
      put(dwte + row * width + column, sum, vectors, true);
    }
  };
  for (std::int64_t column = threadIdx.x * kWidth; column < width; column += kWindowThreads * kWidth) {
    float sum[kWidth] = {};
    bool opens = true;
    for (int first = 0; first < kWindow; first += kBatch) {
      if (rows[first] >= sorted.table_rows) break;  // so are all that follow
      float value[kBatch][kWidth];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {  // rows of no table are loaded too, from any place of dy, and not used
        load_floats(value[i], dy + positions[first + i] * width + column);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const std::uint32_t row = rows[first + i];
        if (row >= sorted.table_rows) break;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] += value[i][j];
        const bool last = first + i + 1 == kWindow;
        if (!last && rows[first + i + 1] == row) continue;
        finish(row, sum, opens, last, column);
        opens = false;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] = 0.0f;
      }
    }
  }
}

// A block of one warp for each window and each kWarp * kWidth columns: nearly all have nothing to do or few sums to
// add.
template <int kWidth>
__global__ void __launch_bounds__(kWarp)
    join_windows(float* dwte, WindowSums sums, SortedTokens sorted, std::int64_t width, bool vectors) {
  const std::int64_t window = blockIdx.x, start = window * kWindow;
  const std::uint32_t row = sorted.row_or_none(start + kWindow);
  // Only the window where a run starts and does not end.
  if (row >= sorted.table_rows || sorted.row_or_none(start + kWindow - 1) != row ||
      sorted.row_or_none(start - 1) == row)
    return;
  const std::int64_t column = (std::int64_t{blockIdx.y} * kWarp + threadIdx.x) * kWidth;
  const bool active = column < width;
  float sum[kWidth] = {};
  if (active) load_floats(sum, sums.tail + window * width + column);
  for (std::int64_t next = window + 1;; next += kWarp) {
    const bool follows = sorted.row_or_none((next + threadIdx.x) * kWindow) == row;
    const unsigned votes = __ballot_sync(0xffffffffu, follows);
    const int heads = votes == 0xffffffffu ? kWarp : __ffs(static_cast<int>(~votes)) - 1;
    if (active) {
#pragma unroll 8
      for (int i = 0; i < heads; ++i) {
        float head[kWidth];
        load_floats(head, sums.head + (next + i) * width + column);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] += head[j];
      }
    }
    if (heads < kWarp) break;
  }
  if (active) put(dwte + row * width + column, sum, vectors, true);
}

// ----------------------------------------------------------------------------------------------------------- launchers
// Extents of tokens [B, T] and y or dy [B, T, C], against tables [rows, C].
struct EmbeddingShape {
  EmbeddingShape(const Tensor& y, const Tensor& tokens) {
    PDL_CHECK(tokens.shape().rank() == 2 && y.shape().rank() == 3, "tokens ", tokens.shape().to_string(), ", embedded ",
              y.shape().to_string());
    b = y.shape()[0], t = y.shape()[1], c = y.shape()[2];
    PDL_CHECK(tokens.shape()[0] == b && tokens.shape()[1] == t, "tokens ", tokens.shape().to_string(), ", embedded ",
              y.shape().to_string());
    PDL_CHECK(b * t < (std::int64_t{1} << 31) - kThreads, b * t, " tokens");
  }
  void check_table(const Tensor& table, DType dtype, const char* name) const {
    PDL_CHECK(table.shape().rank() == 2 && table.shape()[1] == c, name, " ", table.shape().to_string(), " for width ",
              c);
    PDL_CHECK(table.dtype() == dtype, name, " ", name_of(table.dtype()), ", wanted ", name_of(dtype));
    PDL_CHECK(table.shape()[0] < (std::int64_t{1} << 31), name, " ", table.shape().to_string());
  }
  void check_positions(const Tensor& wpe, DType dtype, const char* name) const {
    check_table(wpe, dtype, name);
    PDL_CHECK(wpe.shape()[0] >= t, name, " ", wpe.shape().to_string(), " for ", t, " positions");
  }
  std::int64_t b = 0, t = 0, c = 0;
};

void check_dropout(const DropoutKey& key, const EmbeddingShape& shape) {
  PDL_CHECK(key.samples == shape.b && key.sample_ids != nullptr, "dropout of ", key.samples, " samples, ", shape.b,
            " embedded");
  PDL_CHECK(key.local_width == 0 || key.local_width == shape.c, "dropout rows of ", key.local_width, ", width ",
            shape.c);
}

// Whether vectors of a row start where four random words start.
bool fits_mask(const DropoutKey& key) {
  return key.rate == 0.0 || key.local_width == 0 || (key.full_width % 4 == 0 && key.first_column % 4 == 0);
}

// Everything that the backward pass of a token table keeps in scratch memory, one piece after another.
class TokenScratch {
 public:
  TokenScratch(CudaScratch& scratch, std::int64_t tokens, std::int64_t width, std::int64_t table_rows) {
    while ((std::int64_t{1} << bits_) <= table_rows) ++bits_;  // `table_rows` itself is a key too
    PDL_CUDA(cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes_, static_cast<std::uint32_t*>(nullptr),
                                             static_cast<std::uint32_t*>(nullptr), static_cast<std::uint32_t*>(nullptr),
                                             static_cast<std::uint32_t*>(nullptr), static_cast<int>(tokens), 0, bits_));
    const std::int64_t list = padded(tokens * 4), windows = (tokens + kWindow - 1) / kWindow;
    const std::int64_t sums = padded(windows * width * 4);
    char* at = static_cast<char*>(scratch.get(4 * list + 2 * sums + static_cast<std::int64_t>(sort_bytes_)));
    for (std::uint32_t** const place : {&row_, &position_, &sorted_row_, &sorted_position_}) {
      *place = reinterpret_cast<std::uint32_t*>(at);
      at += list;
    }
    sums_ = {reinterpret_cast<float*>(at), reinterpret_cast<float*>(at + sums)};
    sort_space_ = at + 2 * sums;
  }

  SortedTokens sort(const std::int32_t* tokens, std::int64_t count, std::int64_t first_token, std::int64_t table_rows,
                    cudaStream_t stream) {
    const auto keys = static_cast<std::uint32_t>(count), rows = static_cast<std::uint32_t>(table_rows);
    number_tokens<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(row_, position_, tokens, keys, first_token,
                                                                        rows);
    check_launch("number_tokens");
    PDL_CUDA(cub::DeviceRadixSort::SortPairs(sort_space_, sort_bytes_, row_, sorted_row_, position_, sorted_position_,
                                             static_cast<int>(count), 0, bits_, stream));
    return {.row = sorted_row_, .position = sorted_position_, .count = keys, .table_rows = rows};
  }
  WindowSums sums() const { return sums_; }

 private:
  static std::int64_t padded(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

  int bits_ = 1;
  std::size_t sort_bytes_ = 0;
  void* sort_space_ = nullptr;
  std::uint32_t *row_ = nullptr, *position_ = nullptr, *sorted_row_ = nullptr, *sorted_position_ = nullptr;
  WindowSums sums_ = {};
};

template <typename T>
void launch_token_gradients(float* dwte, const T* dy, const SortedTokens& sorted, const WindowSums& sums,
                            std::int64_t width, cudaStream_t stream) {
  const unsigned windows = blocks_for(sorted.count, kWindow);
  const bool vectors = width % 4 == 0 && aligned_to_vectors(dwte);
  with_vector_width<T>(width % kVectorWidth<T> == 0 && aligned_to_vectors(dy), [&](auto wide) {
    constexpr int kWidth = decltype(wide)::value;
    sum_windows<T, kWidth><<<windows, kWindowThreads, 0, stream>>>(dwte, sums, dy, sorted, width, vectors);
    check_launch("sum_windows");
  });
  with_vector_width<float>(width % kVectorWidth<float> == 0, [&](auto wide) {
    constexpr int kWidth = decltype(wide)::value;
    const dim3 grid(windows, blocks_for(width, kWarp * kWidth));
    PDL_CHECK(grid.y < 65536, "embedding of width ", width);
    join_windows<kWidth><<<grid, kWarp, 0, stream>>>(dwte, sums, sorted, width, vectors);
    check_launch("join_windows");
  });
}

}  // namespace
}  // namespace cuda

void CudaBackend::embedding_forward(Tensor y, Tensor tokens, Tensor wte, Tensor wpe, std::int64_t first_token,
                                    const DropoutKey& key) {
  using namespace cuda;
  const EmbeddingShape shape(y, tokens);
  shape.check_table(wte, y.dtype(), "wte");
  if (wpe.defined()) shape.check_positions(wpe, y.dtype(), "wpe");
  const DropoutMask mask(key);
  if (mask.active()) check_dropout(key, shape);
  const std::int32_t* const ids = tokens.data<std::int32_t>();
  with_compute_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T *const to = pointer<T>(y), *const token_table = pointer<T>(wte), *const position_table = pointer<T>(wpe);
    const bool vectors = aligned_to_vectors(to, token_table, position_table) && shape.c % kVectorWidth<T> == 0 &&
                         fits_vectors<T>(y.elements()) && fits_mask(key);
    with_vector_width<T>(vectors, [&](auto wide) {
      constexpr int kWidth = decltype(wide)::value;
      using Index = VectorIndex<kWidth>;
      const std::int64_t count = y.elements() / kWidth;
      embed<T, kWidth><<<blocks_for(count, kThreads), kThreads, 0, stream_>>>(
          to, ids, token_table, position_table, first_token, static_cast<std::uint32_t>(wte.shape()[0]),
          static_cast<Index>(shape.t), static_cast<Index>(shape.c / kWidth), static_cast<Index>(count), mask,
          mask.active());
      check_launch("embed");
    });
  });
}

void CudaBackend::embedding_backward(Tensor dwte, Tensor dwpe, Tensor dy, Tensor tokens, std::int64_t first_token,
                                     bool accumulate_wte, bool accumulate_wpe) {
  using namespace cuda;
  const EmbeddingShape shape(dy, tokens);
  if (dwte.defined()) shape.check_table(dwte, DType::fp32, "dwte");
  if (dwpe.defined()) shape.check_positions(dwpe, DType::fp32, "dwpe");
  const std::int32_t* const ids = tokens.data<std::int32_t>();
  const std::int64_t count = shape.b * shape.t, used = shape.t * shape.c;
  const auto clear = [&](const Tensor& part) {
    if (part.elements() > 0) PDL_CUDA(cudaMemsetAsync(part.raw(), 0, static_cast<std::size_t>(part.bytes()), stream_));
  };
  if (dwte.defined() && !accumulate_wte) clear(dwte);
  if (dwpe.defined() && !accumulate_wpe) clear(dwpe.range(used, dwpe.elements() - used));
  with_compute_type(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T* const dy_data = pointer<T>(dy);
    if (dwte.defined() && count > 0) {
      const std::int64_t rows = dwte.shape()[0];
      TokenScratch scratch(scratch_, count, shape.c, rows);
      const SortedTokens sorted = scratch.sort(ids, count, first_token, rows, stream_);
      launch_token_gradients<T>(pointer<float>(dwte), dy_data, sorted, scratch.sums(), shape.c, stream_);
    }
    if (!dwpe.defined()) return;
    with_vector_width<T>(used % kVectorWidth<T> == 0 && aligned_to_vectors(dy_data), [&](auto wide) {
      constexpr int kWidth = decltype(wide)::value;
      float* const to = pointer<float>(dwpe);
      sum_positions<T, kWidth><<<blocks_for(used, kThreads * kWidth), kThreads, 0, stream_>>>(
          to, dy_data, shape.b, used, aligned_to_vectors(to), accumulate_wpe);
      check_launch("sum_positions");
    });
  });
}

}  // namespace pdl
