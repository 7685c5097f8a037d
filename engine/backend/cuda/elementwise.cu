// Activations, their gradients, dropout and residual sums, element by element: each thread moves one 16-byte vector. A
// mask is computed where it is used and never stored. Where the gradient of a bias is wanted too, threads go down the
// columns of an activation's gradient and sum up what they write.

#include "engine/backend/cuda/activation.cuh"
#include "engine/backend/cuda/column_sums.cuh"
#include "engine/backend/cuda/column_sums.h"
#include "engine/backend/cuda/cuda_backend.h"
#include "engine/backend/cuda/kernel_tools.cuh"

namespace pdl {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// ------------------------------------------------------------------------------------------------------ device helpers
// dx = dy * activation'(saved) by rows, for sum_rows. dx may be dy: a thread reads its elements before it writes them.
template <typename T, int kWidth, Activation kActivation>
struct ActivationRows {
  static constexpr int kAtOnce = 2;
  struct Loaded {
    Vector<T, kWidth> dy, saved;
  };
  __device__ Loaded load(std::int64_t row, std::int64_t column) const {
    const std::int64_t at = row * columns + column;
    return {load_vector<kWidth>(dy + at), load_vector<kWidth>(saved + at)};
  }
  __device__ void finish(float (&values)[kWidth], const Loaded& loaded, std::int64_t row, std::int64_t column) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      values[i] = activation_gradient<T, kActivation>(to_float(loaded.dy.at[i]), to_float(loaded.saved.at[i]));
    }
    store_floats(dx + row * columns + column, values);
  }

  T* dx;
  const T *dy, *saved;
  std::int64_t columns;
};

// This thread's elements of a range: [first, first + count), count <= kWidth, less than kWidth only at the end.
template <int kWidth>
struct Piece {
  __device__ explicit Piece(std::int64_t elements)
      : first((std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth),
        count(static_cast<int>(min(static_cast<std::int64_t>(kWidth), elements - first))) {}

  template <typename T>
  __device__ void load(float (&to)[kWidth], const T* from) const {
    if (count == kWidth) return load_floats(to, from + first);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = i < count ? to_float(from[first + i]) : 0.0f;
  }
  template <typename T>
  __device__ void store(T* to, const float (&from)[kWidth]) const {
    if (count == kWidth) return store_floats(to + first, from);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i < count) to[first + i] = from_float<T>(from[i]);
    }
  }

  std::int64_t first;
  int count;
};

// Where the vectors of a tensor lie in the samples that dropout counts in: rows of `per_row` vectors, parts of rows of
// full_width elements. Lengths are in vectors of kWidth elements.
template <int kWidth>
struct MaskedTensor {
  using Index = VectorIndex<kWidth>;

  __device__ void scales(float (&to)[kWidth], Index vector) const {
    const Index sample = vector / per_sample, inside = vector - sample * per_sample;
    const Index row = per_row == per_sample ? Index{0} : inside / per_row;
    const std::int64_t column = static_cast<std::int64_t>(inside - row * per_row) * kWidth;
    mask.scales(to, mask.sample_ids[sample], static_cast<std::int64_t>(row) * full_width + first_column + column);
  }

  DropoutMask mask;
  Index per_sample, per_row;
  std::int64_t full_width, first_column;
};

// ------------------------------------------------------------------------------------------------------------- kernels
// Outputs may be inputs: each thread reads its elements before it writes them, and no pointer is declared unaliased.
template <typename T, int kWidth, Activation kActivation>
__global__ void __launch_bounds__(kThreads) activations(T* y, const T* x, std::int64_t elements) {
  const Piece<kWidth> piece(elements);
  if (piece.count <= 0) return;
  float value[kWidth];
  piece.load(value, x);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) value[i] = activate<T, kActivation>(value[i]);
  piece.store(y, value);
}

template <typename T, int kWidth, Activation kActivation>
__global__ void __launch_bounds__(kThreads)
    activation_gradients(T* dx, const T* dy, const T* saved, std::int64_t elements) {
  const Piece<kWidth> piece(elements);
  if (piece.count <= 0) return;
  float gradient[kWidth], kept[kWidth];
  piece.load(gradient, dy);
  piece.load(kept, saved);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) gradient[i] = activation_gradient<T, kActivation>(gradient[i], kept[i]);
  piece.store(dx, gradient);
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) sums(T* y, const T* a, const T* b, std::int64_t elements) {
  const Piece<kWidth> piece(elements);
  if (piece.count <= 0) return;
  float sum[kWidth], other[kWidth];
  piece.load(sum, a);
  piece.load(other, b);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] += other[i];
  piece.store(y, sum);
}

// y = mask x / (1 - rate), plus residual when there is one.
template <typename T, int kWidth, bool kResidual>
__global__ void __launch_bounds__(kThreads)
    dropped(T* y, const T* residual, const T* x, MaskedTensor<kWidth> place, std::int64_t vectors) {
  const std::int64_t vector = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (vector >= vectors) return;
  float value[kWidth], base[kWidth], scale[kWidth];
  load_floats(value, x + vector * kWidth);
  if constexpr (kResidual) load_floats(base, residual + vector * kWidth);
  place.scales(scale, static_cast<VectorIndex<kWidth>>(vector));
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    value[i] *= scale[i];
    if constexpr (kResidual) value[i] += base[i];
  }
  store_floats(y + vector * kWidth, value);
}

// ----------------------------------------------------------------------------------------------------------- launchers
void check_alike(const Tensor& y, const Tensor& x, const char* what) {
  PDL_CHECK(y.dtype() == x.dtype() && y.elements() == x.elements(), what, " ", name_of(x.dtype()), " ",
            x.shape().to_string(), " for ", name_of(y.dtype()), " ", y.shape().to_string());
}

// Rows of the samples of a dropout, in elements.
struct MaskedRows {
  MaskedRows(const DropoutKey& key, std::int64_t elements) {
    PDL_CHECK(key.samples > 0 && elements % key.samples == 0, elements, " elements of ", key.samples, " samples");
    PDL_CHECK(key.sample_ids != nullptr, "dropout needs the samples' ids");
    const bool whole = key.local_width == 0;
    per_sample = elements / key.samples;
    width = whole ? per_sample : key.local_width;
    full_width = whole ? per_sample : key.full_width;
    first_column = whole ? 0 : key.first_column;
    PDL_CHECK(width > 0 && per_sample % width == 0, "rows of ", width, " in samples of ", per_sample);
    PDL_CHECK(whole || (first_column >= 0 && first_column + width <= full_width), "columns ", first_column, "+", width,
              " of ", full_width);
  }
  // Whether each vector of so many elements lies in one row and starts where four random words start. What only has one
  // row need not have rows of whole words.
  bool fits(std::int64_t vector) const {
    return width % vector == 0 && first_column % 4 == 0 && (width == per_sample || full_width % 4 == 0);
  }
  std::int64_t per_sample = 0, width = 0, full_width = 0, first_column = 0;
};

template <typename T>
void launch_dropped(T* y, const T* residual, const T* x, std::int64_t elements, const DropoutKey& key,
                    cudaStream_t stream) {
  const DropoutMask mask(key);
  const MaskedRows rows(key, elements);
  const bool vectors = aligned_to_vectors(y, residual, x) && fits_vectors<T>(elements) && rows.fits(kVectorWidth<T>);
  with_vector_width<T>(vectors, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    using Index = VectorIndex<kWidth>;
    const MaskedTensor<kWidth> place = {.mask = mask,
                                        .per_sample = static_cast<Index>(rows.per_sample / kWidth),
                                        .per_row = static_cast<Index>(rows.width / kWidth),
                                        .full_width = rows.full_width,
                                        .first_column = rows.first_column};
    const std::int64_t count = elements / kWidth;
    const unsigned blocks = blocks_for(count, kThreads);
    if (residual == nullptr) {
      dropped<T, kWidth, false><<<blocks, kThreads, 0, stream>>>(y, residual, x, place, count);
    } else {
      dropped<T, kWidth, true><<<blocks, kThreads, 0, stream>>>(y, residual, x, place, count);
    }
    check_launch("dropped");
  });
}

// Calls work(std::integral_constant<Activation, ...>{}) for an activation other than none.
template <typename Work>
void with_activation(Activation activation, Work work) {
  if (activation == Activation::relu) {
    work(std::integral_constant<Activation, Activation::relu>{});
  } else {
    work(std::integral_constant<Activation, Activation::gelu_tanh>{});
  }
}

template <typename T, Activation kActivation>
void launch_gradients(T* dx, const T* dy, const T* saved, std::int64_t elements, cudaStream_t stream) {
  with_vector_width<T>(aligned_to_vectors(dx, dy, saved), [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    activation_gradients<T, kWidth, kActivation>
        <<<blocks_for(elements, kThreads * kWidth), kThreads, 0, stream>>>(dx, dy, saved, elements);
    check_launch("activation_gradients");
  });
}

// And their column sums into dbias [columns].
template <typename T, Activation kActivation>
void launch_summed_gradients(T* dx, const Tensor& dbias, const T* dy, const T* saved, std::int64_t rows,
                             bool accumulate, CudaScratch& scratch, cudaStream_t stream) {
  const std::int64_t columns = dbias.elements();
  with_vector_width<T>(columns % kVectorWidth<T> == 0 && aligned_to_vectors(dx, dy, saved), [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    const ActivationRows<T, kWidth, kActivation> gradients = {dx, dy, saved, columns};
    sum_rows<kWidth>(dbias.data<float>(), gradients, rows, columns, accumulate, scratch, stream);
  });
}

}  // namespace
}  // namespace cuda

void CudaBackend::activation_forward(Tensor y, Tensor x, Activation activation) {
  using namespace cuda;
  check_alike(y, x, "x");
  if (activation == Activation::none) return copy(y, x);
  with_compute_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T *const to = pointer<T>(y), *const from = pointer<T>(x);
    const std::int64_t elements = y.elements();
    with_activation(activation, [&](auto kind) {
      with_vector_width<T>(aligned_to_vectors(to, from), [&](auto width) {
        constexpr int kWidth = decltype(width)::value;
        activations<T, kWidth, decltype(kind)::value>
            <<<blocks_for(elements, kThreads * kWidth), kThreads, 0, stream_>>>(to, from, elements);
        check_launch("activations");
      });
    });
  });
}

void CudaBackend::activation_backward(Tensor dx, Tensor dbias, Tensor dy, Tensor saved, Activation activation,
                                      bool accumulate) {
  using namespace cuda;
  check_alike(dx, dy, "dy");
  const std::int64_t columns = dbias.defined() ? dbias.elements() : 1;
  const std::int64_t rows = dx.elements() / std::max<std::int64_t>(columns, 1);
  PDL_CHECK(rows * columns == dx.elements() && (!dbias.defined() || dbias.dtype() == DType::fp32), "dbias ",
            name_of(dbias.dtype()), " ", dbias.shape().to_string(), " for dx ", dx.shape().to_string());
  if (activation == Activation::none) {
    copy(dx, dy);
    if (!dbias.defined()) return;
    return column_sums(dbias.data<float>(), dx.raw(), dx.dtype(), rows, columns, accumulate, scratch_, stream_);
  }
  check_alike(dx, saved, "saved");
  with_compute_type(dx.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T *const to = pointer<T>(dx), *const from = pointer<T>(dy), *const kept = pointer<T>(saved);
    with_activation(activation, [&](auto kind) {
      constexpr Activation kActivation = decltype(kind)::value;
      if (dbias.defined()) {
        launch_summed_gradients<T, kActivation>(to, dbias, from, kept, rows, accumulate, scratch_, stream_);
      } else {
        launch_gradients<T, kActivation>(to, from, kept, dx.elements(), stream_);
      }
    });
  });
}

void CudaBackend::dropout(Tensor y, Tensor x, const DropoutKey& key) {
  using namespace cuda;
  check_alike(y, x, "x");
  if (key.rate == 0.0) return copy(y, x);
  with_compute_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    launch_dropped<T>(pointer<T>(y), nullptr, pointer<T>(x), y.elements(), key, stream_);
  });
}

void CudaBackend::residual_add(Tensor y, Tensor residual, Tensor x, const DropoutKey& key) {
  using namespace cuda;
  check_alike(y, residual, "residual");
  check_alike(y, x, "x");
  with_compute_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T *const to = pointer<T>(y), *const base = pointer<T>(residual), *const from = pointer<T>(x);
    if (key.rate != 0.0) return launch_dropped<T>(to, base, from, y.elements(), key, stream_);
    with_vector_width<T>(aligned_to_vectors(to, base, from), [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const std::int64_t elements = y.elements();
      sums<T, kWidth><<<blocks_for(elements, kThreads * kWidth), kThreads, 0, stream_>>>(to, base, from, elements);
      check_launch("sums");
    });
  });
}

}  // namespace pdl
