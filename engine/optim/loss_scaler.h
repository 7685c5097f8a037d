#pragma once
// Loss scaling (Micikevicius et al., "Mixed Precision Training", ICLR 2018). fp16 ends at 65504 and has no digits left
// below 6e-8, where many gradients lie. So the gradient of the loss is multiplied by a factor where the backward pass
// begins, and all gradients are divided by it before they are used. Where a gradient overflows, the step is skipped.
//
// Everything here is host arithmetic on numbers that all ranks share, so all ranks decide alike.

#include <cstdint>
#include <string>

#include "engine/base/config_reader.h"
#include "engine/tensor/dtype.h"

namespace pdl {

/// How the factor is chosen. `dynamic` has the rule, the names and the defaults of PyTorch's torch.amp.GradScaler (and
/// of LBANN's amp), and the lower bound of DeepSpeed and Megatron-LM (min_loss_scale, --min-loss-scale). `static` is
/// what they call a constant loss_scale.
struct LossScaleOptions {
  std::string name = "none";  ///< none, static, dynamic
  double scale = 1.0;         ///< static
  // dynamic
  double init_scale = 65536.0;
  double growth_factor = 2.0;           ///< after `growth_interval` steps in a row without overflow
  double backoff_factor = 0.5;          ///< after each overflow
  std::int64_t growth_interval = 2000;  ///< steps
  double min_scale = 1.0;
};

/// Reads the "loss_scale" block: the keys of the kind that it names. A key of the other kind is a problem, as it would
/// not act. The default is dynamic for fp16, none for every type with a wider range.
LossScaleOptions read_loss_scale_options(const ConfigReader& reader, DType dtype);

/// The largest factor of which the inverse still has all digits in wide_dtype(dtype), the type of the gradients.
double largest_loss_scale(DType dtype);

/// All that a LossScaler remembers: what a checkpoint holds of it.
struct LossScaleState {
  double scale = 1.0;
  std::int64_t good_steps = 0;        ///< in a row, on the way to the next growth
  std::int64_t skipped_steps = 0;     ///< of the whole run
  std::int64_t skips_at_minimum = 0;  ///< in a row up to now, at a factor that cannot fall
  bool operator==(const LossScaleState&) const = default;
};

class LossScaler {
 public:
  /// Skips in a row at the smallest factor that are borne. One may be an accident of its samples; where DeepSpeed ends
  /// the run at once, PyTorch goes on for ever, and ten is where LBANN warns.
  static constexpr std::int64_t kMostSkipsAtMinimum = 10;

  LossScaler(const LossScaleOptions& options, DType dtype);

  /// False for `none`: nobody looks for overflow, and the factor stays 1.
  bool active() const { return options_.name != "none"; }
  /// The factor of the next step.
  double scale() const { return state_.scale; }
  /// Takes note of how the step went; only for an active scaler. The factor never outgrows largest_loss_scale().
  void step_done(bool overflow);
  /// The factor cannot fall and does not help: the run has to end.
  bool exhausted() const { return state_.skips_at_minimum >= kMostSkipsAtMinimum; }

  const LossScaleState& state() const { return state_; }
  void restore(const LossScaleState& state) { state_ = state; }

 private:
  LossScaleOptions options_;
  double largest_;
  LossScaleState state_;
};

/// What an update has to know about the gradients of a step.
struct GradientScaling {
  double norm = -1.0;     ///< L2 norm without the loss scale, before clipping; -1 when nobody asked
  double factor = 1.0;    ///< what gradients are multiplied by first: clipping, and 1 / loss scale
  bool overflow = false;  ///< a gradient is infinite or not a number
};

/// `sum_of_squares` is over all gradients, in fp64, of all ranks together where each holds a part: an infinity or a NaN
/// anywhere shows in it, so looking for overflow costs no pass beyond that of the norm. (fp64 gradients above 1e154
/// count as overflow too: their squares are infinite.) `clip_grad_norm` 0: no clipping.
GradientScaling gradient_scaling(double sum_of_squares, double loss_scale, double clip_grad_norm);

}  // namespace pdl
