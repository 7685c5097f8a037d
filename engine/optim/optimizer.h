#pragma once
// Update rules over flat ranges: an optimizer neither knows layers nor who holds the rest of a parameter.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/base/config_reader.h"
#include "engine/device/device.h"

namespace pdl {

/// Defaults of `read_optimizer_options` depend on the rule: PyTorch's for sgd, adam and adamw; for lamb those of You et
/// al. 2020. The values here are what code that fills the struct itself starts from.
struct OptimizerOptions {
  std::string name = "sgd";  ///< sgd, adam, adamw, lamb
  double lr = 0.01;
  double momentum = 0.0;                              ///< sgd
  bool nesterov = false;                              ///< sgd, with momentum
  double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8;  ///< adam, adamw, lamb
  double weight_decay = 0.0;  ///< sgd, adam: added to the gradient; adamw: off the weights; lamb: part of the direction
  bool decay_biases_and_norms = true;  ///< false spares parameters whose spec says so
  double clip_grad_norm = 0.0;         ///< 0: no clipping; else gradients are scaled by min(1, clip / (norm + 1e-6))
};

/// The rules that `OptimizerOptions::name` may name.
const std::vector<std::string>& optimizer_names();

/// Reads the "optimizer" block: the keys of the rule that it names. A key of another rule is a problem, as it would not
/// act.
OptimizerOptions read_optimizer_options(const ConfigReader& reader);

/// What one update needs. All ranges are of equal length and layout.
struct OptimizerStep {
  Tensor values, grads;  ///< fp32 or fp64; lamb leaves its direction in place of the gradients
  Tensor rounded = {};   ///< when defined: values of a half type, made from the new `values`
  /// When defined: the weights before the update, which stay as they are; the new ones go to `values`, which may hold
  /// anything. Else `values` are both.
  Tensor from = {};
  double lr = 0.0;
  double grad_scale = 1.0;  ///< gradients are multiplied by this first
  std::int64_t update = 1;  ///< 1 for the first
  /// Which segments are updated, `segment_count` from `first_segment` on; -1: all of them. Segments know nothing of
  /// each other, so an update in parts has the bits of one at once.
  std::int64_t first_segment = 0, segment_count = -1;
  /// lamb: sums `norms`, fp64 [segments, 2] in device memory (squared norms of weights and of direction, in the order
  /// of the segments that are updated), over the ranks that hold the other parts of the same parameters; null when each
  /// is whole here.
  std::function<void(Tensor norms)> sum_over_shards = nullptr;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Elements of state per parameter element: 0, 1 or 2.
  virtual int moments() const = 0;
  /// Takes memory for the moments, of wide_dtype(dtype), of a range of `elements`, made of `segments`. Once.
  virtual void allocate(Device& device, std::int64_t elements, DType dtype, std::vector<UpdateSegment> segments) = 0;
  /// Takes no memory. Elements outside the segments that are updated stay as they are.
  virtual void step(Backend& backend, const OptimizerStep& step) = 0;
  /// The moments, for checkpoints, in a fixed order.
  virtual std::vector<Tensor> state() const = 0;
};

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options);

/// Bytes that `allocate` takes, by the same rule: for plans.
std::int64_t optimizer_bytes(const OptimizerOptions& options, std::int64_t elements, DType dtype,
                             std::int64_t segments);

/// min(1, max_norm / (norm + 1e-6)): PyTorch's clip_grad_norm_. 1 when max_norm is 0.
double clip_scale(double norm, double max_norm);

}  // namespace pdl
