// Causal self-attention, in two ways. cuDNN's, where it serves the shape and nothing is dropped: it never writes the
// scores. Else the general way, with the formulas of engine/backend/cpu/attention.cpp and the scores in the workspace:
//
//   gather q k v;  S = q k^T / sqrt(D);  W = m exp(S - L), causal, over S;  y = W v;  scatter y
//   gather q k v dy;  S and dW = dy v^T;  W over S, dS over dW;  dv = W^T dy, dq = dS k / sqrt(D), dk = dS^T q /
//   sqrt(D); scatter
//
// It works on as many heads at once as the workspace has room for.

#include <algorithm>
#include <cmath>

#include "engine/backend/cuda/attention_kernels.h"
#include "engine/backend/cuda/cublaslt.h"
#include "engine/backend/cuda/cuda_backend.h"
#include "engine/backend/cuda/sdpa.h"

namespace pdl {
namespace {

using cuda::HeadRange;

// The general way asks for room for so many bytes of heads, but for one head at least.
constexpr std::int64_t kChunkBytes = std::int64_t{128} << 20;

/// Extents of qkv [B, T, A, 3, D], y [B, T, A, D] and stats [B, A, T].
struct Extents {
  explicit Extents(const Shape& qkv) : b(qkv[0]), t(qkv[1]), a(qkv[2]), d(qkv[4]) {
    PDL_CHECK(qkv.rank() == 5 && qkv[3] == 3 && t > 0 && d > 0, "qkv ", qkv.to_string());
  }
  std::int64_t heads() const { return b * a; }
  HeadRange range(std::int64_t first, std::int64_t count) const { return {first, count, t, a, d}; }
  float scale() const { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(d))); }

  std::int64_t b, t, a, d;
};

Extents checked_extents(const Tensor& qkv, const Tensor& y, const Tensor& stats, const DropoutKey& key) {
  const Extents e(qkv.shape());
  PDL_CHECK(y.shape() == Shape({e.b, e.t, e.a, e.d}), "y ", y.shape().to_string(), " for qkv ",
            qkv.shape().to_string());
  PDL_CHECK(stats.elements() == e.heads() * e.t, "stats ", stats.shape().to_string(), " for qkv ",
            qkv.shape().to_string());
  PDL_CHECK(y.dtype() == qkv.dtype() && stats.dtype() == DType::fp32, "mixed element types");
  PDL_CHECK(key.rate == 0.0 || (key.sample_ids != nullptr && key.samples == e.b), key.samples, " sample ids for ", e.b,
            " samples");
  return e;
}

// Two matrices of scores in fp32 and four of vectors: q, k, v and dy.
std::int64_t bytes_of_head(const HeadRange& heads, DType dtype) {
  return 2 * heads.score_elements() * size_of(DType::fp32) + 4 * heads.matrix_elements() * size_of(dtype);
}

/// The workspace of a range of heads: everything in it is aligned to 16 bytes and lies without gaps, head after head.
class HeadWork {
 public:
  HeadWork(const HeadRange& heads, DType dtype, const Tensor& workspace) : heads_(heads), dtype_(dtype) {
    PDL_CHECK(reinterpret_cast<std::uintptr_t>(workspace.raw()) % 16 == 0, "an unaligned workspace");
    auto* const base = static_cast<char*>(workspace.raw());
    const std::int64_t score_bytes = heads.count * heads.score_elements() * size_of(DType::fp32);
    const std::int64_t matrix_bytes = heads.count * heads.matrix_elements() * size_of(dtype);
    scores = reinterpret_cast<float*>(base);
    dweights = reinterpret_cast<float*>(base + score_bytes);
    char* const matrices = base + 2 * score_bytes;
    q = matrices;
    k = matrices + matrix_bytes;
    v = matrices + 2 * matrix_bytes;
    dy = matrices + 3 * matrix_bytes;
  }

  /// [T, T] = alpha x z^T, in fp32.
  cuda::Product scores_product(float alpha) const {
    cuda::Product product = matrices_product(alpha);
    product.output = DType::fp32;
    product.n = heads_.t;
    product.k = heads_.d_pitch();  // what pads a vector is zero
    product.transpose_b = true;
    product.a_pitch = heads_.d_pitch();
    product.a_stride = heads_.matrix_elements();
    product.d_pitch = heads_.t_pitch();
    product.d_stride = heads_.score_elements();
    return product;
  }
  /// [T, D] = alpha op(weights [T, T]) x: weights of the compute type in rows of scores, see causal_softmax.
  cuda::Product weights_product(float alpha, bool transpose) const {
    const std::int64_t per_score = size_of(DType::fp32) / size_of(dtype_);
    cuda::Product product = matrices_product(alpha);
    product.output = dtype_;
    product.n = heads_.d_pitch();
    product.k = heads_.t;
    product.transpose_a = transpose;
    product.a_pitch = heads_.t_pitch() * per_score;
    product.a_stride = heads_.score_elements() * per_score;
    product.d_pitch = heads_.d_pitch();
    product.d_stride = heads_.matrix_elements();
    return product;
  }

  float *scores, *dweights;
  void *q, *k, *v, *dy;  ///< [T, d_pitch] each

 private:
  // What the two have in common: b is a head's matrix of vectors.
  cuda::Product matrices_product(float alpha) const {
    cuda::Product product;
    product.input = dtype_;
    product.m = heads_.t;
    product.b_pitch = heads_.d_pitch();
    product.b_stride = heads_.matrix_elements();
    product.batch = heads_.count;
    product.alpha = alpha;
    return product;
  }

  HeadRange heads_;
  DType dtype_;
};

// Calls work(heads, memory) for ranges that cover all heads, of equal length but for the last.
template <typename Work>
void for_each_range(const Extents& e, DType dtype, const Tensor& workspace, Work work) {
  if (e.heads() == 0) return;
  const std::int64_t bytes = bytes_of_head(e.range(0, 1), dtype);
  const std::int64_t room = workspace.defined() ? workspace.bytes() / bytes : 0;
  PDL_CHECK(room > 0, "workspace of ", workspace.bytes(), " bytes; one head takes ", bytes);
  const std::int64_t ranges = (e.heads() + room - 1) / room;
  const std::int64_t length = (e.heads() + ranges - 1) / ranges;
  for (std::int64_t first = 0; first < e.heads(); first += length) {
    const HeadRange heads = e.range(first, std::min(length, e.heads() - first));
    work(heads, HeadWork(heads, dtype, workspace));
  }
}

}  // namespace

void CudaBackend::attention_forward(Tensor y, Tensor stats, Tensor qkv, const DropoutKey& key, std::int64_t first_head,
                                    Tensor workspace) {
  const Extents e = checked_extents(qkv, y, stats, key);
  const DType dtype = qkv.dtype();
  auto* const stats_data = static_cast<float*>(stats.raw());
  if (e.heads() == 0) return;
  if (key.rate == 0.0 && sdpa_->supported(qkv.shape(), dtype)) {
    const std::int64_t bytes = sdpa_->workspace_bytes(qkv.shape(), dtype);
    PDL_CHECK(workspace.bytes() >= bytes, "workspace of ", workspace.bytes(), " bytes; cuDNN takes ", bytes);
    sdpa_->forward(y.raw(), stats_data, qkv.raw(), qkv.shape(), dtype, workspace.raw(), stream_);
    return;
  }
  for_each_range(e, dtype, workspace, [&](const HeadRange& heads, const HeadWork& work) {
    cuda::gather_heads({work.q, work.k, work.v}, qkv.raw(), 3, heads, dtype, stream_);
    gemm_->multiply(work.scores_product(e.scale()), {.d = work.scores, .a = work.q, .b = work.k}, stream_);
    cuda::causal_softmax(work.scores, stats_data, heads, key, first_head, dtype, stream_);
    // q has served: its place takes y.
    gemm_->multiply(work.weights_product(1.0f, false), {.d = work.q, .a = work.scores, .b = work.v}, stream_);
    cuda::scatter_heads(y.raw(), {work.q}, 1, heads, dtype, stream_);
  });
}

void CudaBackend::attention_backward(Tensor dqkv, Tensor dy, Tensor y, Tensor stats, Tensor qkv, const DropoutKey& key,
                                     std::int64_t first_head, Tensor workspace) {
  const Extents e = checked_extents(qkv, y, stats, key);
  PDL_CHECK(dqkv.shape() == qkv.shape() && dy.shape() == y.shape(), "dqkv ", dqkv.shape().to_string(), ", dy ",
            dy.shape().to_string());
  const DType dtype = qkv.dtype();
  PDL_CHECK(dqkv.dtype() == dtype && dy.dtype() == dtype, "mixed element types");
  const auto* const stats_data = static_cast<const float*>(stats.raw());
  if (e.heads() == 0) return;
  if (key.rate == 0.0 && sdpa_->supported(qkv.shape(), dtype)) {
    const std::int64_t bytes = sdpa_->workspace_bytes(qkv.shape(), dtype);
    PDL_CHECK(workspace.bytes() >= bytes, "workspace of ", workspace.bytes(), " bytes; cuDNN takes ", bytes);
    sdpa_->backward(dqkv.raw(), dy.raw(), y.raw(), stats_data, qkv.raw(), qkv.shape(), dtype, workspace.raw(), stream_);
    return;
  }
  const float scale = e.scale();
  for_each_range(e, dtype, workspace, [&](const HeadRange& heads, const HeadWork& work) {
    cuda::gather_heads({work.q, work.k, work.v}, qkv.raw(), 3, heads, dtype, stream_);
    cuda::gather_heads({work.dy}, dy.raw(), 1, heads, dtype, stream_);
    gemm_->multiply(work.scores_product(scale), {.d = work.scores, .a = work.q, .b = work.k}, stream_);
    gemm_->multiply(work.scores_product(1.0f), {.d = work.dweights, .a = work.dy, .b = work.v}, stream_);
    cuda::causal_softmax_backward(work.scores, work.dweights, dy.raw(), y.raw(), stats_data, heads, key, first_head,
                                  dtype, stream_);
    // Each gradient takes the place of what has served: v, then dy, then k.
    gemm_->multiply(work.weights_product(1.0f, true), {.d = work.v, .a = work.scores, .b = work.dy}, stream_);
    gemm_->multiply(work.weights_product(scale, false), {.d = work.dy, .a = work.dweights, .b = work.k}, stream_);
    gemm_->multiply(work.weights_product(scale, true), {.d = work.k, .a = work.dweights, .b = work.q}, stream_);
    cuda::scatter_heads(dqkv.raw(), {work.dy, work.k, work.v}, 3, heads, dtype, stream_);
  });
}

std::int64_t CudaBackend::attention_workspace_bytes(const Shape& qkv, DType dtype) const {
  const Extents e(qkv);
  if (e.heads() == 0) return 0;
  const std::int64_t bytes = bytes_of_head(e.range(0, 1), dtype);
  const std::int64_t general = std::clamp<std::int64_t>(kChunkBytes / bytes, 1, e.heads()) * bytes;
  return sdpa_->supported(qkv, dtype) ? std::max(general, sdpa_->workspace_bytes(qkv, dtype)) : general;
}

}  // namespace pdl
