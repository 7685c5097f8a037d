// Softmax and cross entropy of logits [M, V], the first `classes` columns of a row at a time. A row comes from memory
// once and its gradient goes there once: the maximum is found while the row arrives, the exponentials are written where
// the gradient will stand, then scaled in place. Where classes are divided over ranks, each rank's row becomes four
// numbers, and those of all ranks tell each of them the whole row's maximum and sum.

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

// What one shard of a row says to the others; in memory in this order.
template <typename T>
struct ShardStats {
  T largest, sum, target_logit, first_largest;
};

template <typename T>
ShardStats<T> stats_of(const T* logits, std::int64_t first_class, std::int64_t classes, std::int64_t target) {
  constexpr T kNone = -std::numeric_limits<T>::infinity();
  const T largest = max_of(logits, classes);
  const T shift = largest == kNone ? T{0} : largest;  // all at minus infinity add up to 0
  const auto sum = static_cast<T>(long_sum<T>(classes, [=](std::int64_t v) { return exp_of(logits[v] - shift); }));
  const std::int64_t first = std::find(logits, logits + classes, largest) - logits;
  const std::int64_t own_target = target - first_class;
  return {.largest = largest,
          .sum = sum,
          .target_logit = own_target >= 0 && own_target < classes ? logits[own_target] : kNone,
          .first_largest = largest == kNone ? T{-1} : static_cast<T>(first_class + first)};
}

// The whole row, from shards that lie `pitch` apart.
template <typename T>
ShardStats<double> joined(const ShardStats<T>* shards, std::int64_t pitch, std::int64_t count) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  ShardStats<double> row = {.largest = kNone, .sum = 0.0, .target_logit = kNone, .first_largest = -1.0};
  for (std::int64_t shard = 0; shard < count; ++shard) {
    const ShardStats<T>& one = shards[shard * pitch];
    row.target_logit = std::max(row.target_logit, static_cast<double>(one.target_logit));
    if (static_cast<double>(one.largest) <= row.largest) continue;
    row.largest = static_cast<double>(one.largest);
    row.first_largest = static_cast<double>(one.first_largest);
  }
  for (std::int64_t shard = 0; shard < count; ++shard) {
    const ShardStats<T>& one = shards[shard * pitch];
    row.sum += static_cast<double>(one.sum) * std::exp(static_cast<double>(one.largest) - row.largest);
  }
  return row;
}

// scale * (softmax - onehot) of this shard's classes; `target` counts from the first of them.
template <typename T>
void shard_gradient(T* gradient, const T* logits, const ShardStats<double>& row, std::int64_t classes,
                    std::int64_t target, double scale) {
  const auto largest = static_cast<T>(row.largest), factor = static_cast<T>(scale / row.sum);
#pragma omp simd
  for (std::int64_t v = 0; v < classes; ++v) gradient[v] = factor * exp_of(logits[v] - largest);
  if (target < 0 || target >= classes) return;
  const double probability = std::exp(row.target_logit - row.largest) / row.sum;
  gradient[target] = static_cast<T>(scale * (probability - 1.0));
}

void check_shard(const Tensor& logits, const Tensor& targets, std::int64_t first_class, std::int64_t classes) {
  PDL_CHECK(logits.shape().rank() == 2 && first_class >= 0 && classes >= 0 && classes <= logits.shape()[1], "logits ",
            logits.shape().to_string(), " of ", classes, " classes from ", first_class, " on");
  PDL_CHECK(targets.elements() == logits.shape()[0], targets.elements(), " targets for ", logits.shape().to_string());
}

}  // namespace

void CpuBackend::cross_entropy_shard(Tensor stats, Tensor logits, Tensor targets, std::int64_t first_class,
                                     std::int64_t classes) {
  check_shard(logits, targets, first_class, classes);
  const std::int64_t rows = logits.shape()[0], width = logits.shape()[1];
  PDL_CHECK(stats.elements() == 4 * rows, stats.elements(), " stats of ", rows, " rows");
  const std::int32_t* const wanted = targets.data<std::int32_t>();
  with_float_type(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    auto* const to = reinterpret_cast<ShardStats<T>*>(stats.data<T>());
    const T* const data = logits.data<T>();
    parallel_items(rows, classes, [&](std::int64_t row) {
      to[row] = stats_of(data + row * width, first_class, classes, std::int64_t{wanted[row]});
    });
  });
}

void CpuBackend::cross_entropy_join(Tensor dlogits, Tensor row_loss, Tensor row_correct, Tensor logits, Tensor targets,
                                    Tensor stats, std::int64_t first_class, std::int64_t classes, double scale) {
  check_shard(logits, targets, first_class, classes);
  const std::int64_t rows = logits.shape()[0], width = logits.shape()[1];
  PDL_CHECK(
      row_loss.elements() == rows && row_correct.elements() == rows && rows > 0 && stats.elements() % (4 * rows) == 0,
      rows, " rows, ", row_loss.elements(), " losses, ", row_correct.elements(), " marks, ", stats.elements(),
      " stats");
  PDL_CHECK(!dlogits.defined() || dlogits.shape() == logits.shape(), "dlogits ", dlogits.shape().to_string());
  const std::int64_t shards = stats.elements() / (4 * rows);
  const std::int32_t* const wanted = targets.data<std::int32_t>();
  with_float_type(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto* const from = reinterpret_cast<const ShardStats<T>*>(stats.data<T>());
    T* const gradients = dlogits.defined() ? dlogits.data<T>() : nullptr;
    T *const losses = row_loss.data<T>(), *const marks = row_correct.data<T>();
    const T* const data = logits.data<T>();
    parallel_items(rows, classes, [&](std::int64_t row) {
      T* const gradient = gradients == nullptr ? nullptr : gradients + row * width;
      if (gradient != nullptr) std::fill_n(gradient + classes, width - classes, T{0});
      if (wanted[row] < 0) {
        losses[row] = marks[row] = T{0};
        if (gradient != nullptr) std::fill_n(gradient, classes, T{0});
        return;
      }
      const ShardStats<double> whole = joined(from + row, rows, shards);
      losses[row] = static_cast<T>(std::log(whole.sum) + whole.largest - whole.target_logit);
      marks[row] = whole.first_largest == static_cast<double>(wanted[row]) ? T{1} : T{0};
      if (gradient == nullptr) return;
      shard_gradient(gradient, data + row * width, whole, classes, wanted[row] - first_class, scale);
    });
  });
}

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
