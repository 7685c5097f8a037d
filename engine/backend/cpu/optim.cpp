// Optimizer updates: one pass over memory each, every gradient read once. The scalars of a rule are formed in fp64 and
// rounded to the element type once, as PyTorch does; elements are independent, so how a range is cut or sharded changes
// no bit.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "engine/backend/cpu/cpu_backend.h"
#include "engine/backend/cpu/loops.h"
#include "engine/backend/cpu/segments.h"
#include "engine/backend/cpu/square_root.h"

namespace pdl {
namespace {

void check_like_values(const Tensor& values, const Tensor& range, const char* name) {
  PDL_CHECK(range.dtype() == values.dtype() && range.elements() == values.elements(), name, " ", name_of(range.dtype()),
            " ", range.shape().to_string(), " for ", name_of(values.dtype()), " ", values.shape().to_string());
}

void check_not_rounded(const Tensor& rounded) {
  PDL_CHECK(!rounded.defined(), "the CPU computes in fp32 and fp64, not in ", name_of(rounded.dtype()));
}

void check_norms(const Tensor& norms, std::int64_t segments) {
  PDL_CHECK(norms.dtype() == DType::fp64 && norms.elements() == 2 * segments, "norms ", name_of(norms.dtype()), " ",
            norms.shape().to_string(), " for ", segments, " segments");
}

template <typename T>
struct SgdRule {
  SgdRule(const SgdScalars& scalars, bool decays)
      : lr(static_cast<T>(scalars.lr)),
        momentum(static_cast<T>(scalars.momentum)),
        decay(static_cast<T>(decays ? scalars.weight_decay : 0.0)),
        grad_scale(static_cast<T>(scalars.grad_scale)) {}

  // `w` may be `from`, here and below.
  void plain(T* w, const T* from, const T* grad, std::int64_t count) const {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) w[i] = from[i] - lr * (grad[i] * grad_scale + decay * from[i]);
  }

  template <bool kNesterov, bool kFirst>
  void with_momentum(T* w, const T* from, const T* grad, T* velocity, std::int64_t count) const {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
      const T g = grad[i] * grad_scale + decay * from[i];
      const T v = kFirst ? g : momentum * velocity[i] + g;
      velocity[i] = v;
      w[i] = from[i] - lr * (kNesterov ? g + momentum * v : v);
    }
  }

  T lr, momentum, decay, grad_scale;
};

// Adam and LAMB take a piece in runs of this many elements: square roots have a loop of their own, whose operands stay
// in the first-level cache.
constexpr std::size_t kMostRoots = 512;

// Calls work(first, count) for the runs of [0, total).
template <typename Work>
void for_each_run(std::int64_t total, Work work) {
  constexpr auto kRun = static_cast<std::int64_t>(kMostRoots);
  for (std::int64_t first = 0; first < total; first += kRun) work(first, std::min(kRun, total - first));
}

// The moments that Adam and LAMB share.
template <typename T>
struct Moments {
  explicit Moments(const AdamScalars& scalars)
      : beta1(static_cast<T>(scalars.beta1)),
        one_minus_beta1(static_cast<T>(1.0 - scalars.beta1)),
        beta2(static_cast<T>(scalars.beta2)),
        one_minus_beta2(static_cast<T>(1.0 - scalars.beta2)) {}

  T first(T m, T g) const { return beta1 * m + one_minus_beta1 * g; }
  T second(T v, T g) const { return beta2 * v + one_minus_beta2 * g * g; }

  T beta1, one_minus_beta1, beta2, one_minus_beta2;
};

struct BiasCorrection {
  explicit BiasCorrection(const AdamScalars& scalars)
      : first(1.0 - std::pow(scalars.beta1, static_cast<double>(scalars.update))),
        second(1.0 - std::pow(scalars.beta2, static_cast<double>(scalars.update))) {
    PDL_CHECK(scalars.update >= 1, "updates count from 1, got ", scalars.update);
  }
  double first, second;
};

template <typename T>
struct AdamRule {
  AdamRule(const AdamScalars& scalars, const BiasCorrection& correction, bool decays)
      : moments(scalars),
        grad_scale(static_cast<T>(scalars.grad_scale)),
        coupled(static_cast<T>(decays && !scalars.decoupled_decay ? scalars.weight_decay : 0.0)),
        kept(static_cast<T>(decays && scalars.decoupled_decay ? 1.0 - scalars.lr * scalars.weight_decay : 1.0)),
        step_size(static_cast<T>(scalars.lr / correction.first)),
        root_correction(static_cast<T>(std::sqrt(correction.second))),
        epsilon(static_cast<T>(scalars.epsilon)) {}

  void apply(T* w, const T* from, const T* grad, T* first, T* second, std::int64_t count) const {
    std::array<T, kMostRoots> buffer;
    T* const root = buffer.data();
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
      const T g = grad[i] * grad_scale + coupled * from[i];
      first[i] = moments.first(first[i], g);
      root[i] = second[i] = moments.second(second[i], g);
    }
    square_roots(root, count);
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
      w[i] = from[i] * kept - step_size * first[i] / (root[i] / root_correction + epsilon);
    }
  }

  Moments<T> moments;
  T grad_scale, coupled, kept, step_size, root_correction, epsilon;
};

template <typename T>
struct LambRule {
  LambRule(const AdamScalars& scalars, const BiasCorrection& correction, bool decays)
      : moments(scalars),
        grad_scale(static_cast<T>(scalars.grad_scale)),
        decay(static_cast<T>(decays ? scalars.weight_decay : 0.0)),
        first_correction(static_cast<T>(correction.first)),
        second_correction(static_cast<T>(correction.second)),
        epsilon(static_cast<T>(scalars.epsilon)) {}

  // `direction` may be `grad`.
  void apply(T* direction, const T* w, const T* grad, T* first, T* second, std::int64_t count) const {
    std::array<T, kMostRoots> buffer;
    T* const root = buffer.data();
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
      const T g = grad[i] * grad_scale;
      first[i] = moments.first(first[i], g);
      second[i] = moments.second(second[i], g);
      root[i] = second[i] / second_correction;
    }
    square_roots(root, count);
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
      direction[i] = (first[i] / first_correction) / (root[i] + epsilon) + decay * w[i];
    }
  }

  Moments<T> moments;
  T grad_scale, decay, first_correction, second_correction, epsilon;
};

struct SquaredNorms {
  double weights = 0.0, direction = 0.0;
};

template <typename T>
double squared_norm(const T* x, std::int64_t count) {
  return lane_sum<double>(count, [=](std::int64_t i) { return static_cast<double>(x[i]) * static_cast<double>(x[i]); });
}

}  // namespace

void CpuBackend::sgd_update(Tensor values, Tensor from, Tensor rounded, Tensor grads, Tensor momentum,
                            const UpdateSegment* segments, std::int64_t count, const SgdScalars& scalars) {
  check_not_rounded(rounded);
  check_like_values(values, from, "weights before the update");
  check_like_values(values, grads, "grads");
  PDL_CHECK(momentum.defined() || scalars.momentum == 0.0, "momentum ", scalars.momentum, " needs a buffer");
  PDL_CHECK(!scalars.nesterov || scalars.momentum > 0.0, "nesterov needs momentum");
  const bool has_momentum = scalars.momentum != 0.0;
  if (has_momentum) check_like_values(values, momentum, "momentum");
  with_float_type(values.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const w = values.data<T>();
    const T* const old = from.data<T>();
    const T* const grad = grads.data<T>();
    T* const velocity = has_momentum ? momentum.data<T>() : nullptr;
    const SgdRule<T> rules[2] = {{scalars, false}, {scalars, true}};
    for_each_piece(segments, count, values.elements(), [&](const Piece& piece) {
      const SgdRule<T>& rule = rules[piece.decay ? 1 : 0];
      const std::int64_t at = piece.first, n = piece.count;
      if (!has_momentum) return rule.plain(w + at, old + at, grad + at, n);
      if (scalars.nesterov) {
        if (scalars.first_update)
          return rule.template with_momentum<true, true>(w + at, old + at, grad + at, velocity + at, n);
        return rule.template with_momentum<true, false>(w + at, old + at, grad + at, velocity + at, n);
      }
      if (scalars.first_update)
        return rule.template with_momentum<false, true>(w + at, old + at, grad + at, velocity + at, n);
      return rule.template with_momentum<false, false>(w + at, old + at, grad + at, velocity + at, n);
    });
  });
}

void CpuBackend::adam_update(Tensor values, Tensor from, Tensor rounded, Tensor grads, Tensor first_moment,
                             Tensor second_moment, const UpdateSegment* segments, std::int64_t count,
                             const AdamScalars& scalars) {
  check_not_rounded(rounded);
  check_like_values(values, from, "weights before the update");
  check_like_values(values, grads, "grads");
  check_like_values(values, first_moment, "first moment");
  check_like_values(values, second_moment, "second moment");
  const BiasCorrection correction(scalars);
  with_float_type(values.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const w = values.data<T>();
    const T* const old = from.data<T>();
    const T* const grad = grads.data<T>();
    T* const first = first_moment.data<T>();
    T* const second = second_moment.data<T>();
    const AdamRule<T> rules[2] = {{scalars, correction, false}, {scalars, correction, true}};
    for_each_piece(segments, count, values.elements(), [&](const Piece& piece) {
      for_each_run(piece.count, [&](std::int64_t start, std::int64_t n) {
        const std::int64_t at = piece.first + start;
        rules[piece.decay ? 1 : 0].apply(w + at, old + at, grad + at, first + at, second + at, n);
      });
    });
  });
}

void CpuBackend::lamb_direction(Tensor direction, Tensor norms, Tensor values, Tensor grads, Tensor first_moment,
                                Tensor second_moment, const UpdateSegment* segments, std::int64_t count,
                                const AdamScalars& scalars) {
  check_like_values(values, direction, "direction");
  check_like_values(values, grads, "grads");
  check_like_values(values, first_moment, "first moment");
  check_like_values(values, second_moment, "second moment");
  check_norms(norms, count);
  const BiasCorrection correction(scalars);
  double* const sums = norms.data<double>();
  std::fill_n(sums, 2 * count, 0.0);
  with_float_type(values.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const out = direction.data<T>();
    const T* const w = values.data<T>();
    const T* const grad = grads.data<T>();
    T* const first = first_moment.data<T>();
    T* const second = second_moment.data<T>();
    const LambRule<T> rules[2] = {{scalars, correction, false}, {scalars, correction, true}};
    reduce_pieces<SquaredNorms>(
        segments, count, values.elements(),
        [&](const Piece& piece) {
          for_each_run(piece.count, [&](std::int64_t start, std::int64_t n) {
            const std::int64_t at = piece.first + start;
            rules[piece.decay ? 1 : 0].apply(out + at, w + at, grad + at, first + at, second + at, n);
          });
          return SquaredNorms{squared_norm(w + piece.first, piece.count), squared_norm(out + piece.first, piece.count)};
        },
        [&](const Piece& piece, const SquaredNorms& partial) {
          sums[2 * piece.segment] += partial.weights;
          sums[2 * piece.segment + 1] += partial.direction;
        });
  });
}

void CpuBackend::lamb_apply(Tensor values, Tensor from, Tensor rounded, Tensor direction, Tensor norms,
                            const UpdateSegment* segments, std::int64_t count, double lr) {
  check_not_rounded(rounded);
  check_like_values(values, from, "weights before the update");
  check_like_values(values, direction, "direction");
  check_norms(norms, count);
  const double* const sums = norms.data<double>();
  with_float_type(values.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const w = values.data<T>();
    const T* const old = from.data<T>();
    const T* const towards = direction.data<T>();
    for_each_piece(segments, count, values.elements(), [&](const Piece& piece) {
      const double weights = std::sqrt(sums[2 * piece.segment]), length = std::sqrt(sums[2 * piece.segment + 1]);
      const T step = static_cast<T>(lr * (weights == 0.0 || length == 0.0 ? 1.0 : weights / length));
      T* const to = w + piece.first;
      const T* const start = old + piece.first;
      const T* const way = towards + piece.first;
#pragma omp simd
      for (std::int64_t i = 0; i < piece.count; ++i) to[i] = start[i] - step * way[i];
    });
  });
}

}  // namespace pdl
