// Optimizer updates: one pass over memory each, one block for each piece of a segment. The scalars of a rule are formed
// in fp64 and rounded to fp32 once, as PyTorch does. Every product that an addition follows is spelled as fmaf or kept
// out of one, so that an element gets the same bits whether it is updated alone or in a quad.

#include <cmath>
#include <type_traits>

#include "engine/backend/cuda/cuda_backend.h"
#include "engine/backend/cuda/segment_pieces.cuh"

namespace pdl {
namespace cuda {
namespace {

// ------------------------------------------------------------------------------------------------------ device helpers

// The new values of a quad or an element, rounded too when `rounded` is given.
template <int kWidth, typename R>
__device__ void store_values(float* values, R* rounded, std::int64_t i, const Vector<float, kWidth>& w) {
  store_vector(values + i, w);
  if (rounded == nullptr) return;
  Vector<R, kWidth> narrow;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) narrow.at[k] = from_float<R>(w.at[k]);
  store_vector(rounded + i, narrow);
}

// The moments that Adam and LAMB share.
struct Moments {
  explicit Moments(const AdamScalars& scalars)
      : beta1(static_cast<float>(scalars.beta1)),
        one_minus_beta1(static_cast<float>(1.0 - scalars.beta1)),
        beta2(static_cast<float>(scalars.beta2)),
        one_minus_beta2(static_cast<float>(1.0 - scalars.beta2)) {}

  __device__ float first(float m, float g) const { return fmaf(beta1, m, one_minus_beta1 * g); }
  __device__ float second(float v, float g) const { return fmaf(beta2, v, one_minus_beta2 * g * g); }

  float beta1, one_minus_beta1, beta2, one_minus_beta2;
};

struct BiasCorrection {
  explicit BiasCorrection(const AdamScalars& scalars)
      : first(1.0 - std::pow(scalars.beta1, static_cast<double>(scalars.update))),
        second(1.0 - std::pow(scalars.beta2, static_cast<double>(scalars.update))) {
    PDL_CHECK(scalars.update >= 1, "updates count from 1, got ", scalars.update);
  }
  double first, second;
};

// A rule has its ranges and scalars; update<kWidth>(i, decays) works on elements i .. i + kWidth - 1.
template <typename R>
struct SgdRule {
  template <int kWidth>
  __device__ void update(std::int64_t i, bool decays) const {
    const float of_decay = decays ? decay : 0.0f;
    auto w = load_vector<kWidth>(from + i);
    const auto grad = load_vector<kWidth>(grads + i);
    Vector<float, kWidth> v{};
    const bool reads_velocity = velocity != nullptr && !first_update;
    if (reads_velocity) v = load_vector<kWidth>(velocity + i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const float g = fmaf(of_decay, w.at[k], grad.at[k] * grad_scale);
      v.at[k] = reads_velocity ? fmaf(momentum, v.at[k], g) : g;
      w.at[k] = fmaf(-lr, nesterov ? fmaf(momentum, v.at[k], g) : v.at[k], w.at[k]);
    }
    if (velocity != nullptr) store_vector(velocity + i, v);
    store_values(values, rounded, i, w);
  }

  float* values;
  const float* from;  // may be values
  R* rounded;
  const float* grads;
  float* velocity;  // null without momentum
  float lr, momentum, decay, grad_scale;
  bool nesterov, first_update;
};

template <typename R>
struct AdamRule {
  template <int kWidth>
  __device__ void update(std::int64_t i, bool decays) const {
    const float coupled = decays ? coupled_decay : 0.0f, kept = decays ? kept_by_decay : 1.0f;
    auto w = load_vector<kWidth>(from + i);
    const auto grad = load_vector<kWidth>(grads + i);
    auto m = load_vector<kWidth>(first + i), v = load_vector<kWidth>(second + i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const float g = fmaf(coupled, w.at[k], grad.at[k] * grad_scale);
      m.at[k] = moments.first(m.at[k], g);
      v.at[k] = moments.second(v.at[k], g);
      const float step = step_size * m.at[k] / (sqrtf(v.at[k]) / root_correction + epsilon);
      w.at[k] = fmaf(w.at[k], kept, -step);
    }
    store_vector(first + i, m);
    store_vector(second + i, v);
    store_values(values, rounded, i, w);
  }

  float* values;
  const float* from;  // may be values
  R* rounded;
  const float* grads;
  float *first, *second;
  Moments moments;
  float grad_scale, coupled_decay, kept_by_decay, step_size, root_correction, epsilon;
};

struct SquaredNorms {
  double weights = 0.0, direction = 0.0;
};

struct LambRule {
  // `direction` may be `grads`.
  template <int kWidth>
  __device__ void update(std::int64_t i, bool decays, SquaredNorms& norms) const {
    const float of_decay = decays ? decay : 0.0f;
    const auto w = load_vector<kWidth>(values + i), grad = load_vector<kWidth>(grads + i);
    auto m = load_vector<kWidth>(first + i), v = load_vector<kWidth>(second + i);
    Vector<float, kWidth> d;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const float g = grad.at[k] * grad_scale;
      m.at[k] = moments.first(m.at[k], g);
      v.at[k] = moments.second(v.at[k], g);
      const float adam = (m.at[k] / first_correction) / (sqrtf(v.at[k] / second_correction) + epsilon);
      d.at[k] = fmaf(of_decay, w.at[k], adam);
      norms.weights = fma(static_cast<double>(w.at[k]), static_cast<double>(w.at[k]), norms.weights);
      norms.direction = fma(static_cast<double>(d.at[k]), static_cast<double>(d.at[k]), norms.direction);
    }
    store_vector(first + i, m);
    store_vector(second + i, v);
    store_vector(direction + i, d);
  }

  float* direction;
  const float *values, *grads;
  float *first, *second;
  Moments moments;
  float grad_scale, decay, first_correction, second_correction, epsilon;
};

// ------------------------------------------------------------------------------------------------------------- kernels

template <typename Rule>
__global__ void __launch_bounds__(kPieceThreads) update_kernel(Rule rule, const SegmentPiece* pieces, int phase) {
  const SegmentPiece piece = pieces[blockIdx.x];
  const bool decays = piece.decay != 0;
  for_each_quad(piece, phase,
                [&](auto width, std::int64_t i) { rule.template update<decltype(width)::value>(i, decays); });
}

// partial[piece] = squared norms of the weights and of the direction.
__global__ void __launch_bounds__(kPieceThreads)
    lamb_direction_kernel(LambRule rule, SquaredNorms* partial, const SegmentPiece* pieces, int phase) {
  __shared__ double shared[2][kPieceThreads / kWarp];
  const SegmentPiece piece = pieces[blockIdx.x];
  const bool decays = piece.decay != 0;
  SquaredNorms norms;
  for_each_quad_in_order(piece, phase, [&](auto width, std::int64_t i) {
    rule.template update<decltype(width)::value>(i, decays, norms);
  });
  const double weights = block_sum(norms.weights, shared[0]), direction = block_sum(norms.direction, shared[1]);
  if (threadIdx.x != 0) return;
  partial[blockIdx.x].weights = weights;
  partial[blockIdx.x].direction = direction;
}

// One block per segment: norms[segment] = sum over its pieces.
__global__ void __launch_bounds__(kPieceThreads)
    add_norms_kernel(double* norms, const SquaredNorms* partial, const std::int64_t* first_piece) {
  __shared__ double shared[2][kPieceThreads / kWarp];
  const std::int64_t last = first_piece[blockIdx.x + 1];
  SquaredNorms sum;
  for (std::int64_t p = first_piece[blockIdx.x] + threadIdx.x; p < last; p += kPieceThreads) {
    sum.weights += partial[p].weights;
    sum.direction += partial[p].direction;
  }
  const double weights = block_sum(sum.weights, shared[0]), direction = block_sum(sum.direction, shared[1]);
  if (threadIdx.x != 0) return;
  norms[2 * static_cast<std::int64_t>(blockIdx.x)] = weights;
  norms[2 * static_cast<std::int64_t>(blockIdx.x) + 1] = direction;
}

template <typename R>
__global__ void __launch_bounds__(kPieceThreads)
    lamb_apply_kernel(float* values, const float* from, R* rounded, const float* direction, const double* norms,
                      double lr, const SegmentPiece* pieces, int phase) {
  const SegmentPiece piece = pieces[blockIdx.x];
  const double weights = sqrt(norms[2 * static_cast<std::int64_t>(piece.segment)]);
  const double length = sqrt(norms[2 * static_cast<std::int64_t>(piece.segment) + 1]);
  const auto step = static_cast<float>(lr * (weights == 0.0 || length == 0.0 ? 1.0 : weights / length));
  for_each_quad(piece, phase, [&](auto width, std::int64_t i) {
    auto w = load_vector<decltype(width)::value>(from + i);
    const auto d = load_vector<decltype(width)::value>(direction + i);
#pragma unroll
    for (int k = 0; k < decltype(width)::value; ++k) w.at[k] = fmaf(-step, d.at[k], w.at[k]);
    store_values(values, rounded, i, w);
  });
}

// ----------------------------------------------------------------------------------------------------------- launchers

void check_values(const Tensor& values, const Tensor& rounded) {
  PDL_CHECK(values.dtype() == DType::fp32, "the GPU updates fp32, not ", name_of(values.dtype()));
  PDL_CHECK(!rounded.defined() || (is_half(rounded.dtype()) && rounded.elements() == values.elements()), "rounded ",
            name_of(rounded.dtype()), " ", rounded.shape().to_string(), " for ", values.shape().to_string());
}

void check_like_values(const Tensor& values, const Tensor& range, const char* name) {
  PDL_CHECK(range.dtype() == values.dtype() && range.elements() == values.elements(), name, " ", name_of(range.dtype()),
            " ", range.shape().to_string(), " for ", name_of(values.dtype()), " ", values.shape().to_string());
}

void check_norms(const Tensor& norms, std::int64_t segments) {
  PDL_CHECK(norms.dtype() == DType::fp64 && norms.elements() == 2 * segments, "norms ", name_of(norms.dtype()), " ",
            norms.shape().to_string(), " for ", segments, " segments");
}

// work(R*): the rounded values with their type, bf16 and null when there are none.
template <typename Work>
void with_rounded(const Tensor& rounded, Work work) {
  if (rounded.defined() && rounded.dtype() == DType::fp16) {
    work(pointer<half>(rounded));
  } else {
    work(pointer<bf16>(rounded));
  }
}

template <typename Rule>
void launch_update(const Rule& rule, const SegmentTable& table, int phase, cudaStream_t stream) {
  if (table.piece_count == 0) return;
  update_kernel<<<blocks_for(table.piece_count, 1), kPieceThreads, 0, stream>>>(rule, table.pieces, phase);
  check_launch("update_kernel");
}

}  // namespace
}  // namespace cuda

void CudaBackend::sgd_update(Tensor values, Tensor from, Tensor rounded, Tensor grads, Tensor momentum,
                             const UpdateSegment* segments, std::int64_t count, const SgdScalars& scalars) {
  using namespace cuda;
  check_values(values, rounded);
  check_like_values(values, from, "weights before the update");
  check_like_values(values, grads, "grads");
  PDL_CHECK(momentum.defined() || scalars.momentum == 0.0, "momentum ", scalars.momentum, " needs a buffer");
  PDL_CHECK(!scalars.nesterov || scalars.momentum > 0.0, "nesterov needs momentum");
  const Tensor velocity = scalars.momentum != 0.0 ? momentum : Tensor();
  if (velocity.defined()) check_like_values(values, velocity, "momentum");
  const SegmentTable& table = segments_->get(segments, count, values.elements(), stream_);
  const int phase = phase_of({values, from, rounded, grads, velocity});
  with_rounded(rounded, [&](auto* narrow) {
    using R = std::remove_pointer_t<decltype(narrow)>;
    const SgdRule<R> rule = {.values = pointer<float>(values),
                             .from = pointer<float>(from),
                             .rounded = narrow,
                             .grads = pointer<float>(grads),
                             .velocity = pointer<float>(velocity),
                             .lr = static_cast<float>(scalars.lr),
                             .momentum = static_cast<float>(scalars.momentum),
                             .decay = static_cast<float>(scalars.weight_decay),
                             .grad_scale = static_cast<float>(scalars.grad_scale),
                             .nesterov = scalars.nesterov,
                             .first_update = scalars.first_update};
    launch_update(rule, table, phase, stream_);
  });
}

void CudaBackend::adam_update(Tensor values, Tensor from, Tensor rounded, Tensor grads, Tensor first_moment,
                              Tensor second_moment, const UpdateSegment* segments, std::int64_t count,
                              const AdamScalars& scalars) {
  using namespace cuda;
  check_values(values, rounded);
  check_like_values(values, from, "weights before the update");
  check_like_values(values, grads, "grads");
  check_like_values(values, first_moment, "first moment");
  check_like_values(values, second_moment, "second moment");
  const BiasCorrection correction(scalars);
  const SegmentTable& table = segments_->get(segments, count, values.elements(), stream_);
  const int phase = phase_of({values, from, rounded, grads, first_moment, second_moment});
  const double kept = scalars.decoupled_decay ? 1.0 - scalars.lr * scalars.weight_decay : 1.0;
  with_rounded(rounded, [&](auto* narrow) {
    using R = std::remove_pointer_t<decltype(narrow)>;
    const AdamRule<R> rule = {.values = pointer<float>(values),
                              .from = pointer<float>(from),
                              .rounded = narrow,
                              .grads = pointer<float>(grads),
                              .first = pointer<float>(first_moment),
                              .second = pointer<float>(second_moment),
                              .moments = Moments(scalars),
                              .grad_scale = static_cast<float>(scalars.grad_scale),
                              .coupled_decay = static_cast<float>(scalars.decoupled_decay ? 0.0 : scalars.weight_decay),
                              .kept_by_decay = static_cast<float>(kept),
                              .step_size = static_cast<float>(scalars.lr / correction.first),
                              .root_correction = static_cast<float>(std::sqrt(correction.second)),
                              .epsilon = static_cast<float>(scalars.epsilon)};
    launch_update(rule, table, phase, stream_);
  });
}

void CudaBackend::lamb_direction(Tensor direction, Tensor norms, Tensor values, Tensor grads, Tensor first_moment,
                                 Tensor second_moment, const UpdateSegment* segments, std::int64_t count,
                                 const AdamScalars& scalars) {
  using namespace cuda;
  check_values(values, Tensor());
  check_like_values(values, direction, "direction");
  check_like_values(values, grads, "grads");
  check_like_values(values, first_moment, "first moment");
  check_like_values(values, second_moment, "second moment");
  check_norms(norms, count);
  if (count == 0) return;
  const BiasCorrection correction(scalars);
  const SegmentTable& table = segments_->get(segments, count, values.elements(), stream_);
  const LambRule rule = {.direction = pointer<float>(direction),
                         .values = pointer<float>(values),
                         .grads = pointer<float>(grads),
                         .first = pointer<float>(first_moment),
                         .second = pointer<float>(second_moment),
                         .moments = Moments(scalars),
                         .grad_scale = static_cast<float>(scalars.grad_scale),
                         .decay = static_cast<float>(scalars.weight_decay),
                         .first_correction = static_cast<float>(correction.first),
                         .second_correction = static_cast<float>(correction.second),
                         .epsilon = static_cast<float>(scalars.epsilon)};
  auto* const partial = static_cast<SquaredNorms*>(
      scratch_.get(std::max<std::int64_t>(table.piece_count, 1) * static_cast<std::int64_t>(sizeof(SquaredNorms))));
  if (table.piece_count > 0) {
    lamb_direction_kernel<<<blocks_for(table.piece_count, 1), kPieceThreads, 0, stream_>>>(
        rule, partial, table.pieces, phase_of({direction, values, grads, first_moment, second_moment}));
    check_launch("lamb_direction_kernel");
  }
  add_norms_kernel<<<blocks_for(count, 1), kPieceThreads, 0, stream_>>>(pointer<double>(norms), partial,
                                                                        table.first_piece);
  check_launch("add_norms_kernel");
}

void CudaBackend::lamb_apply(Tensor values, Tensor from, Tensor rounded, Tensor direction, Tensor norms,
                             const UpdateSegment* segments, std::int64_t count, double lr) {
  using namespace cuda;
  check_values(values, rounded);
  check_like_values(values, from, "weights before the update");
  check_like_values(values, direction, "direction");
  check_norms(norms, count);
  const SegmentTable& table = segments_->get(segments, count, values.elements(), stream_);
  if (table.piece_count == 0) return;
  with_rounded(rounded, [&](auto* narrow) {
    lamb_apply_kernel<<<blocks_for(table.piece_count, 1), kPieceThreads, 0, stream_>>>(
        pointer<float>(values), pointer<float>(from), narrow, pointer<float>(direction), pointer<double>(norms), lr,
        table.pieces, phase_of({values, from, rounded, direction}));
    check_launch("lamb_apply_kernel");
  });
}

}  // namespace pdl
