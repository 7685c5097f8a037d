// Softmax and cross entropy of logits [M, V], the first `classes` columns of a row at a time. A row comes from memory
// once and its gradient goes there once: the maximum is found while the row arrives, the exponentials are written where
// the gradient will stand, then scaled in place.

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/backend/cpu/cpu_backend.h"
#include "engine/backend/cpu/fast_math.h"
#include "engine/backend/cpu/loops.h"

namespace pdl {
namespace {

// Largest element; NaNs do not count (they come out in the sum).
template <typename T>
T max_of(const T* x, std::int64_t count) {
  const auto larger = [](T a, T b) { return b > a ? b : a; };
  alignas(64) T lanes[kLanes<T>];
  std::fill_n(lanes, kLanes<T>, -std::numeric_limits<T>::infinity());
  std::int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) {
#pragma omp simd
    for (std::int64_t lane = 0; lane < kLanes<T>; ++lane)
      lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  }
  for (std::int64_t lane = 0; i < count; ++i, ++lane) lanes[lane] = larger(lanes[lane], x[i]);
  return combine_lanes<kLanes<T>>(lanes, larger);
}

struct RowLoss {
  double loss = 0.0;
  bool correct = false;
};

// `gradient` is null when nobody wants it, and may be the logits.
template <typename T>
RowLoss cross_entropy_row(T* gradient, const T* logits, std::int64_t classes, std::int64_t target, double scale) {
  const T largest = max_of(logits, classes);
  const T target_logit = logits[target];  // read before the gradient takes its place
  RowLoss row;
  row.correct = target_logit == largest && std::find(logits, logits + target, largest) == logits + target;
  double sum = 0.0;
  if (gradient == nullptr) {
    sum = long_sum<T>(classes, [=](std::int64_t v) { return exp_of(logits[v] - largest); });
  } else {
    sum = long_sum<T>(classes, [=](std::int64_t v) { return gradient[v] = exp_of(logits[v] - largest); });
    const T factor = static_cast<T>(scale / sum);
    const double target_probability = static_cast<double>(gradient[target]) / sum;
#pragma omp simd
    for (std::int64_t v = 0; v < classes; ++v) gradient[v] *= factor;
    gradient[target] = static_cast<T>(scale * (target_probability - 1.0));
  }
  row.loss = std::log(sum) + static_cast<double>(largest) - static_cast<double>(target_logit);
  return row;
}

}  // namespace

void CpuBackend::cross_entropy(Tensor dlogits, Tensor row_loss, Tensor row_correct, Tensor logits, Tensor targets,
                               std::int64_t classes, double scale) {
  PDL_CHECK(logits.shape().rank() == 2 && classes > 0 && classes <= logits.shape()[1], "logits ",
            logits.shape().to_string(), " of ", classes, " classes");
  const std::int64_t rows = logits.shape()[0], width = logits.shape()[1];
  PDL_CHECK(row_loss.elements() == rows && row_correct.elements() == rows && targets.elements() == rows, rows,
            " rows, ", row_loss.elements(), " losses, ", row_correct.elements(), " marks, ", targets.elements(),
            " targets");
  PDL_CHECK(!dlogits.defined() || dlogits.shape() == logits.shape(), "dlogits ", dlogits.shape().to_string());
  const std::int32_t* const wanted = targets.data<std::int32_t>();
  for (std::int64_t row = 0; row < rows; ++row) {
    PDL_CHECK(wanted[row] >= -1 && wanted[row] < classes, "target ", wanted[row], " of ", classes, " classes");
  }
  with_float_type(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const gradients = dlogits.defined() ? dlogits.data<T>() : nullptr;
    T* const losses = row_loss.data<T>();
    T* const marks = row_correct.data<T>();
    const T* const data = logits.data<T>();
    parallel_items(rows, classes, [&](std::int64_t row) {
      T* const gradient = gradients == nullptr ? nullptr : gradients + row * width;
      RowLoss result;
      if (wanted[row] >= 0) {
        result = cross_entropy_row(gradient, data + row * width, classes, wanted[row], scale);
      } else if (gradient != nullptr) {
        std::fill_n(gradient, classes, T{0});
      }
      if (gradient != nullptr) std::fill_n(gradient + classes, width - classes, T{0});
      losses[row] = static_cast<T>(result.loss);
      marks[row] = result.correct ? T{1} : T{0};
    });
  });
}

}  // namespace pdl
