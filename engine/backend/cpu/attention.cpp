// Causal self-attention, head by head:
//
//   s_ij = q_i k_j / sqrt(D),  L_i = log sum_j exp(s_ij),  p_ij = exp(s_ij - L_i),  y_i = sum_j m_ij p_ij v_j        (j
//   <= i) dv_j = sum_i m_ij p_ij dy_i,  ds_ij = p_ij (m_ij dy_i v_j - dy_i y_i),  dq_i = sum_j ds_ij k_j / sqrt(D),
//   dk_j likewise
//
// m is dropout's 0 or 1 / (1 - rate). L is all that forward saves: backward computes p from it again.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "engine/backend/cpu/attention_tiles.h"
#include "engine/backend/cpu/cpu_backend.h"
#include "engine/backend/cpu/loops.h"

namespace pdl {
namespace {

// --- fp64: plain loops; `work` holds two rows of T
// ---------------------------------------------------------------------------

double dot(const double* a, const double* b, std::int64_t count) {
  return lane_sum<double>(count, [=](std::int64_t i) { return a[i] * b[i]; });
}

void add_scaled(double* y, double factor, const double* x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) y[i] += factor * x[i];
}

// scales[j] for j <= query: all ones without dropout.
void fill_scales(double* scales, const AttentionDropout& dropout, const AttentionExtents& e, std::int64_t head,
                 std::int64_t query) {
  if (dropout.active()) {
    dropout.fill(scales, e, head, query);
  } else {
    std::fill_n(scales, query + 1, 1.0);
  }
}

void head_forward(const AttentionExtents& e, std::int64_t head, double* y, double* stats, const double* qkv,
                  const AttentionDropout& dropout, double* work) {
  const double* const q = qkv + e.qkv_offset(head);
  const double *const k = q + e.d, *const v = k + e.d;
  const double scale = 1.0 / std::sqrt(static_cast<double>(e.d));
  double *const scores = work, *const scales = work + e.t;
  for (std::int64_t i = 0; i < e.t; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) scores[j] = scale * dot(q + i * e.qkv_stride(), k + j * e.qkv_stride(), e.d);
    const double largest = *std::max_element(scores, scores + i + 1);
    double sum = 0.0;
    for (std::int64_t j = 0; j <= i; ++j) sum += std::exp(scores[j] - largest);
    const double log_sum_exp = largest + std::log(sum);
    stats[head * e.t + i] = log_sum_exp;

    fill_scales(scales, dropout, e, head, i);
    double* const y_row = y + e.y_offset(head) + i * e.y_stride();
    std::fill_n(y_row, e.d, 0.0);
    for (std::int64_t j = 0; j <= i; ++j) {
      add_scaled(y_row, scales[j] * std::exp(scores[j] - log_sum_exp), v + j * e.qkv_stride(), e.d);
    }
  }
}

void head_backward(const AttentionExtents& e, std::int64_t head, double* dqkv, const double* dy, const double* y,
                   const double* stats, const double* qkv, const AttentionDropout& dropout, double* work) {
  const double* const q = qkv + e.qkv_offset(head);
  const double *const k = q + e.d, *const v = k + e.d;
  double* const dq = dqkv + e.qkv_offset(head);
  double *const dk = dq + e.d, *const dv = dk + e.d;
  const std::int64_t stride = e.qkv_stride();
  const double scale = 1.0 / std::sqrt(static_cast<double>(e.d));
  double* const scales = work;
  for (std::int64_t i = 0; i < e.t; ++i) std::fill_n(dq + i * stride, 3 * e.d, 0.0);
  for (std::int64_t i = 0; i < e.t; ++i) {
    const double *const dy_row = dy + e.y_offset(head) + i * e.y_stride(), *const y_row =
                                                                               y + e.y_offset(head) + i * e.y_stride();
    const double dy_y = dot(dy_row, y_row, e.d);
    fill_scales(scales, dropout, e, head, i);
    for (std::int64_t j = 0; j <= i; ++j) {
      const double weight = std::exp(scale * dot(q + i * stride, k + j * stride, e.d) - stats[head * e.t + i]);
      const double dscore = weight * (scales[j] * dot(dy_row, v + j * stride, e.d) - dy_y);
      add_scaled(dv + j * stride, scales[j] * weight, dy_row, e.d);
      add_scaled(dq + i * stride, scale * dscore, k + j * stride, e.d);
      add_scaled(dk + j * stride, scale * dscore, q + i * stride, e.d);
    }
  }
}

// --- both types
// ------------------------------------------------------------------------------------------------------------

std::int64_t bytes_of_thread(const AttentionExtents& e, DType dtype) {
  return size_of(dtype) * (dtype == DType::fp64 ? 2 * e.t : attention_tiles::floats(e));
}

// Calls work(head, memory) for each head of each sample, on as many threads as the workspace has room for.
template <typename T, typename Work>
void for_each_head(const AttentionExtents& e, const Tensor& workspace, Work work) {
  const std::int64_t bytes = bytes_of_thread(e, DTypeOf<T>::value);
  const std::int64_t room = workspace.defined() ? workspace.bytes() / bytes : 0;
  PDL_CHECK(room > 0, "workspace of ", workspace.bytes(), " bytes; one thread takes ", bytes);
  const std::int64_t wanted = e.heads() * e.t * e.t * e.d < kProductsWorthThreads ? 1 : omp_get_max_threads();
  const auto threads = static_cast<int>(std::min({room, wanted, e.heads()}));
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (std::int64_t head = 0; head < e.heads(); ++head) {
    work(head, reinterpret_cast<T*>(static_cast<char*>(workspace.raw()) + omp_get_thread_num() * bytes));
  }
}

AttentionExtents checked_extents(const Tensor& qkv, const Tensor& y, const Tensor& stats) {
  const AttentionExtents e(qkv.shape());
  PDL_CHECK(y.shape() == Shape({e.b, e.t, e.a, e.d}), "y ", y.shape().to_string(), " for qkv ",
            qkv.shape().to_string());
  PDL_CHECK(stats.elements() == e.heads() * e.t, "stats ", stats.shape().to_string(), " for qkv ",
            qkv.shape().to_string());
  return e;
}

}  // namespace

void CpuBackend::attention_forward(Tensor y, Tensor stats, Tensor qkv, const DropoutKey& key, std::int64_t first_head,
                                   Tensor workspace) {
  const AttentionExtents e = checked_extents(qkv, y, stats);
  const AttentionDropout dropout(key, first_head, e);
  with_float_type(qkv.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T *const y_data = y.data<T>(), *const stats_data = stats.data<T>();
    const T* const qkv_data = qkv.data<T>();
    for_each_head<T>(e, workspace, [&](std::int64_t head, T* memory) {
      if constexpr (std::is_same_v<T, double>) {
        head_forward(e, head, y_data, stats_data, qkv_data, dropout, memory);
      } else {
        attention_tiles::forward(e, head, y_data, stats_data, qkv_data, dropout, memory);
      }
    });
  });
}

void CpuBackend::attention_backward(Tensor dqkv, Tensor dy, Tensor y, Tensor stats, Tensor qkv, const DropoutKey& key,
                                    std::int64_t first_head, Tensor workspace) {
  const AttentionExtents e = checked_extents(qkv, y, stats);
  PDL_CHECK(dqkv.shape() == qkv.shape() && dy.shape() == y.shape(), "dqkv ", dqkv.shape().to_string(), ", dy ",
            dy.shape().to_string());
  const AttentionDropout dropout(key, first_head, e);
  scratch_->reserve();
  with_float_type(qkv.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const dqkv_data = dqkv.data<T>();
    const T *const dy_data = dy.data<T>(), *const y_data = y.data<T>(), *const stats_data = stats.data<T>(),
                   *const qkv_data = qkv.data<T>();
    for_each_head<T>(e, workspace, [&](std::int64_t head, T* memory) {
      if constexpr (std::is_same_v<T, double>) {
        head_backward(e, head, dqkv_data, dy_data, y_data, stats_data, qkv_data, dropout, memory);
      } else {
        attention_tiles::backward(e, head, dqkv_data, dy_data, y_data, stats_data, qkv_data, dropout, memory,
                                  *scratch_);
      }
    });
  });
}

std::int64_t CpuBackend::attention_workspace_bytes(const Shape& qkv, DType dtype) const {
  const AttentionExtents e(qkv);
  return bytes_of_thread(e, dtype) * std::min<std::int64_t>(omp_get_max_threads(), e.heads());
}

}  // namespace pdl
