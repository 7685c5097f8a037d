#pragma once
// Causal self-attention: where the vectors of a head lie, shared by the plain loops (attention.cpp) and the tiles in
// fp32.

#include <cstdint>

#include "engine/backend/backend.h"
#include "engine/backend/cpu/dropout_mask.h"
#include "engine/backend/cpu/gemm.h"

namespace pdl {

/// Extents and addresses of qkv [B, T, A, 3, D], y [B, T, A, D] and stats [B, A, T].
struct AttentionExtents {
  explicit AttentionExtents(const Shape& qkv) : b(qkv[0]), t(qkv[1]), a(qkv[2]), d(qkv[4]) {
    PDL_CHECK(qkv.rank() == 5 && qkv[3] == 3 && t > 0 && d > 0, "qkv ", qkv.to_string());
  }
  std::int64_t heads() const { return b * a; }           ///< of all samples: head i is head i % A of sample i / A
  std::int64_t qkv_stride() const { return 3 * a * d; }  ///< from token to token
  std::int64_t y_stride() const { return a * d; }
  /// Offsets of token 0; q, k and v of a token follow each other, D apart.
  std::int64_t qkv_offset(std::int64_t head) const { return head / a * t * qkv_stride() + head % a * 3 * d; }
  std::int64_t y_offset(std::int64_t head) const { return head / a * t * y_stride() + head % a * d; }

  std::int64_t b, t, a, d;
};

/// The dropout of attention's weights.
struct AttentionDropout {
  AttentionDropout(const DropoutKey& key, std::int64_t first_head_in, const AttentionExtents& e)
      : mask(key), sample_ids(key.sample_ids), first_head(first_head_in) {
    PDL_CHECK(!mask.active() || (sample_ids != nullptr && key.samples == e.b), key.samples, " sample ids for ", e.b,
              " samples");
  }
  bool active() const { return mask.active(); }
  /// scales[j] for keys j <= query of one row of weights.
  template <typename T>
  void fill(T* scales, const AttentionExtents& e, std::int64_t head, std::int64_t query) const {
    mask.fill(scales, sample_ids[head / e.a], ((first_head + head % e.a) * e.t + query) * e.t, query + 1);
  }

  DropoutMask mask;
  const std::int64_t* sample_ids;
  std::int64_t first_head;
};

namespace attention_tiles {

/// Working memory of one thread, in floats: enough for either function below.
std::int64_t floats(const AttentionExtents& e);

/// One head of one sample. `work` is the thread's own.
void forward(const AttentionExtents& e, std::int64_t head, float* y, float* stats, const float* qkv,
             const AttentionDropout& dropout, float* work);
void backward(const AttentionExtents& e, std::int64_t head, float* dqkv, const float* dy, const float* y,
              const float* stats, const float* qkv, const AttentionDropout& dropout, float* work,
              const GemmScratch& scratch);

}  // namespace attention_tiles
}  // namespace pdl
