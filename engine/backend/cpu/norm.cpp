// Layer norm over the last axis of x [M, C]:
//
//   xhat = (x - mean) rstd,  rstd = 1 / sqrt(var + 1e-5),  y = xhat gamma + beta
//   dx   = rstd (g - mean_c(g) - xhat mean_c(g xhat)) + dresidual,  g = dy gamma
//   dgamma (+)= sum_m dy xhat,  dbeta (+)= sum_m dy
//
// A row is read several times but comes from memory once: it stays in the first-level cache.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "engine/backend/cpu/cpu_backend.h"
#include "engine/backend/cpu/loops.h"

namespace pdl {
namespace {

constexpr double kEpsilon = 1e-5;

struct Rows {
  Rows(const Tensor& x, const Tensor& mean, const Tensor& rstd) : count(x.shape()[0]), width(x.shape()[1]) {
    PDL_CHECK(x.shape().rank() == 2 && width > 0, "x ", x.shape().to_string());
    PDL_CHECK(mean.elements() == count && rstd.elements() == count, mean.shape().to_string(), " means and ",
              rstd.shape().to_string(), " deviations for ", count, " rows");
  }
  std::int64_t count, width;
};

void check_vector(const Tensor& vector, std::int64_t width, const char* name) {
  PDL_CHECK(vector.elements() == width, name, " ", vector.shape().to_string(), " for rows of ", width);
}

template <typename T>
void normalise_row(T* y, T& mean_out, T& rstd_out, const T* x, const T* gamma, const T* beta, std::int64_t width) {
  const T mean = lane_sum<T>(width, [=](std::int64_t c) { return x[c]; }) / static_cast<T>(width);
  const T squares = lane_sum<T>(width, [=](std::int64_t c) {
    const T centred = x[c] - mean;
    return centred * centred;
  });
  const T rstd = static_cast<T>(1.0 / std::sqrt(static_cast<double>(squares) / static_cast<double>(width) + kEpsilon));
#pragma omp simd
  for (std::int64_t c = 0; c < width; ++c) y[c] = (x[c] - mean) * rstd * gamma[c] + beta[c];
  mean_out = mean;
  rstd_out = rstd;
}

template <typename T>
struct Gradients {
  T* dx;
  const T *dy, *dresidual, *x, *gamma, *mean, *rstd;  // dresidual is null when there is none
  std::int64_t width;
};

// The two means over a row that its dx needs.
template <typename T>
struct RowMeans {
  T g, g_xhat;
};

template <typename T>
RowMeans<T> row_means(const T* dy, const T* x, const T* gamma, T mean, T rstd, std::int64_t width) {
  constexpr std::int64_t kWide = kLanes<T>;
  alignas(64) T plain[kWide] = {}, projected[kWide] = {};
  const auto take = [&](std::int64_t c, std::int64_t lane) {
    const T g = dy[c] * gamma[c];
    plain[lane] += g;
    projected[lane] += g * ((x[c] - mean) * rstd);
  };
  std::int64_t done = 0;
  for (; done + kWide <= width; done += kWide) {
#pragma omp simd
    for (std::int64_t lane = 0; lane < kWide; ++lane) take(done + lane, lane);
  }
  for (std::int64_t lane = 0; done < width; ++done, ++lane) take(done, lane);
  const auto plus = [](T a, T b) { return a + b; };
  return {combine_lanes<kWide>(plain, plus) / static_cast<T>(width),
          combine_lanes<kWide>(projected, plus) / static_cast<T>(width)};
}

// dx of one row; its parts of the sums over rows are added to dgamma and dbeta.
template <bool kResidual, typename T>
void row_backward(const Gradients<T>& io, std::int64_t row, T* dgamma, T* dbeta) {
  const std::int64_t at = row * io.width;
  T* const dx = io.dx + at;
  const T *const dy = io.dy + at, *const x = io.x + at, *const gamma = io.gamma;
  const T* const dresidual = kResidual ? io.dresidual + at : nullptr;
  const T mean = io.mean[row], rstd = io.rstd[row];
  const RowMeans<T> means = row_means(dy, x, gamma, mean, rstd, io.width);
#pragma omp simd
  for (std::int64_t c = 0; c < io.width; ++c) {
    const T upstream = dy[c], xhat = (x[c] - mean) * rstd;
    dgamma[c] += upstream * xhat;
    dbeta[c] += upstream;
    const T gradient = rstd * (upstream * gamma[c] - means.g - xhat * means.g_xhat);
    dx[c] = kResidual ? gradient + dresidual[c] : gradient;
  }
}

// Sums over rows are formed by groups of rows, so that threads can share them out. How many groups there are follows
// from the width alone: their sums have to fit a fixed piece of the stack.
template <typename T>
class GroupSums {
 public:
  explicit GroupSums(std::int64_t width) : width_(width), groups_(std::min(kMaxGroups, kElements / (2 * width))) {
    PDL_CHECK(groups_ > 0, "layer norm of ", width, " elements; the CPU takes up to ", kElements / 2);
  }
  std::int64_t groups() const { return groups_; }
  T* dgamma(std::int64_t group) { return sums_.data() + 2 * group * width_; }
  T* dbeta(std::int64_t group) { return dgamma(group) + width_; }

  /// to[c] (+)= the groups' sums in order; `first` is dgamma(0) or dbeta(0).
  void combine(T* to, const T* first, bool accumulate) const {
    constexpr std::int64_t kStrip = 64;
    for (std::int64_t start = 0; start < width_; start += kStrip) {
      const std::int64_t count = std::min(kStrip, width_ - start);
      std::array<double, static_cast<std::size_t>(kStrip)> totals{};
      double* const total = totals.data();
      for (std::int64_t group = 0; group < groups_; ++group) {
        const T* const sum = first + 2 * group * width_ + start;
        for (std::int64_t c = 0; c < count; ++c) total[c] += static_cast<double>(sum[c]);
      }
      for (std::int64_t c = 0; c < count; ++c) {
        to[start + c] = static_cast<T>(accumulate ? static_cast<double>(to[start + c]) + total[c] : total[c]);
      }
    }
  }

 private:
  static constexpr std::int64_t kElements = 65536, kMaxGroups = 16;
  std::array<T, static_cast<std::size_t>(kElements)> sums_;  // [groups, 2, C]
  std::int64_t width_, groups_;
};

template <typename T>
void backward(const Gradients<T>& io, std::int64_t rows, T* dgamma, T* dbeta, bool accumulate) {
  GroupSums<T> sums(io.width);
  const std::int64_t groups = sums.groups();
  parallel_items(groups, rows * io.width / groups, [&](std::int64_t group) {
    T *const group_dgamma = sums.dgamma(group), *const group_dbeta = sums.dbeta(group);
    std::fill_n(group_dgamma, io.width, T{0});
    std::fill_n(group_dbeta, io.width, T{0});
    const auto row_backward_of = io.dresidual == nullptr ? row_backward<false, T> : row_backward<true, T>;
    for (std::int64_t row = group * rows / groups; row < (group + 1) * rows / groups; ++row) {
      row_backward_of(io, row, group_dgamma, group_dbeta);
    }
  });
  sums.combine(dgamma, sums.dgamma(0), accumulate);
  sums.combine(dbeta, sums.dbeta(0), accumulate);
}

}  // namespace

void CpuBackend::layernorm_forward(Tensor y, Tensor mean, Tensor rstd, Tensor x, Tensor gamma, Tensor beta) {
  const Rows rows(x, mean, rstd);
  PDL_CHECK(y.shape() == x.shape(), "y ", y.shape().to_string(), ", x ", x.shape().to_string());
  check_vector(gamma, rows.width, "gamma");
  check_vector(beta, rows.width, "beta");
  with_float_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const y_data = y.data<T>();
    T* const means = mean.data<T>();
    T* const rstds = rstd.data<T>();
    const T* const x_data = x.data<T>();
    const T* const scales = gamma.data<T>();
    const T* const shifts = beta.data<T>();
    parallel_items(rows.count, rows.width, [&](std::int64_t row) {
      const std::int64_t at = row * rows.width;
      normalise_row(y_data + at, means[row], rstds[row], x_data + at, scales, shifts, rows.width);
    });
  });
}

void CpuBackend::layernorm_backward(Tensor dx, Tensor dgamma, Tensor dbeta, Tensor dy, Tensor dresidual, Tensor x,
                                    Tensor gamma, Tensor mean, Tensor rstd, bool accumulate) {
  const Rows rows(x, mean, rstd);
  PDL_CHECK(dx.shape() == x.shape() && dy.shape() == x.shape(), "dx ", dx.shape().to_string(), ", dy ",
            dy.shape().to_string(), ", x ", x.shape().to_string());
  PDL_CHECK(!dresidual.defined() || dresidual.elements() == x.elements(), "dresidual ", dresidual.shape().to_string());
  check_vector(gamma, rows.width, "gamma");
  check_vector(dgamma, rows.width, "dgamma");
  check_vector(dbeta, rows.width, "dbeta");
  with_float_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Gradients<T> io = {.dx = dx.data<T>(),
                             .dy = dy.data<T>(),
                             .dresidual = dresidual.defined() ? dresidual.data<T>() : nullptr,
                             .x = x.data<T>(),
                             .gamma = gamma.data<T>(),
                             .mean = mean.data<T>(),
                             .rstd = rstd.data<T>(),
                             .width = rows.width};
    backward(io, rows.count, dgamma.data<T>(), dbeta.data<T>(), accumulate);
  });
}

}  // namespace pdl
