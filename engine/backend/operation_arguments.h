#pragma once
// What operations are told besides tensors: which dropout mask, which window, which rule.

#include <cstdint>

namespace pdl {

enum class Activation { none, relu, gelu_tanh };

/// Identifies one dropout mask: element `e` of global sample `s` is kept iff Philox(seed; update, layer, s, e) >= rate.
/// A tensor [N, ...] that is a part of a wider one maps its local columns into the unsharded sample:
/// local element (row r of `local_width` columns, column c) of a sample is element r * full_width + first_column + c.
struct DropoutKey {
  double rate = 0.0;  ///< 0 switches dropout off
  std::uint64_t seed = 0;
  /// [1] optimizer update (PipeDream: mini-batch) that the samples belong to. In device memory, as the ids are: work
  /// that was recorded once then serves every update. Read when rate > 0 only.
  const std::int64_t* update = nullptr;
  std::uint32_t site = 0;                    ///< which dropout of the model: layer index * 8 + place inside the layer
  const std::int64_t* sample_ids = nullptr;  ///< [N] global sample ids, device memory
  std::int64_t samples = 0;                  ///< N
  std::int64_t local_width = 0;              ///< 0: the tensor is whole
  std::int64_t full_width = 0;
  std::int64_t first_column = 0;
};

struct Conv2dGeometry {
  static constexpr std::int64_t kAsPadding = -1;
  std::int64_t kernel = 3, stride = 1, padding = 1;  ///< square kernels; zeros on all four sides of the image
  std::int64_t row_padding = kAsPadding;             ///< zero rows above and below, where they differ from `padding`
  std::int64_t padded_rows() const { return row_padding == kAsPadding ? padding : row_padding; }
};

/// One contiguous piece of a parameter inside a flat range: what an optimizer update works on.
struct UpdateSegment {
  std::int64_t offset = 0, count = 0;  ///< elements, into the flat range
  bool decay = true;                   ///< weight decay applies
};

struct AdamScalars {
  double lr, beta1, beta2, epsilon, weight_decay;
  bool decoupled_decay;  ///< AdamW: w -= lr * decay * w; else (Adam) g += decay * w
  std::int64_t update;   ///< 1 for the first update: bias correction
  double grad_scale;     ///< gradients are multiplied by this first (clipping, loss scaling)
};

struct SgdScalars {
  double lr, momentum, weight_decay, grad_scale;
  bool nesterov;
  bool first_update;  ///< the momentum buffer starts as the gradient itself (PyTorch's rule)
};

}  // namespace pdl
