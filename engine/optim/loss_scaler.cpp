#include "engine/optim/loss_scaler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/optim/optimizer.h"

namespace pdl {
namespace {

constexpr double kSmallestScale = 1e-12;  // below, squares of small gradients would vanish

void refuse_foreign_key(const ConfigReader& reader, const char* key, const char* owner, const std::string& name) {
  if (!reader.has(key)) return;
  reader.get(key, 0.0, "");
  reader.problem(key, str("acts with name=", owner, " only; name is ", name));
}

void read_dynamic(const ConfigReader& reader, Range scales, LossScaleOptions& options) {
  options.init_scale = reader.get("init_scale", options.init_scale, "factor of the first step", scales);
  options.growth_factor =
      reader.get("growth_factor", options.growth_factor, "change after growth_interval good steps", {1, 1e6});
  options.backoff_factor = reader.get("backoff_factor", options.backoff_factor, "change after an overflow", {0, 1});
  options.growth_interval = reader.get("growth_interval", options.growth_interval,
                                       "steps in a row without overflow after which the factor grows", {1, 1e12});
  options.min_scale = reader.get("min_scale", options.min_scale, "smallest factor", scales);
  if (options.growth_factor == 1.0) reader.problem("growth_factor", "must be above 1, got 1");
  if (options.backoff_factor == 0.0 || options.backoff_factor == 1.0) {
    reader.problem("backoff_factor", str("must lie between 0 and 1, got ", options.backoff_factor));
  }
  if (options.min_scale > options.init_scale) {
    reader.problem("min_scale", str(options.min_scale, " is above init_scale, ", options.init_scale,
                                    "; at most that, or a larger init_scale"));
  }
}

}  // namespace

double largest_loss_scale(DType dtype) {
  return wide_dtype(dtype) == DType::fp64 ? 1.0 / std::numeric_limits<double>::min()
                                          : 1.0 / static_cast<double>(std::numeric_limits<float>::min());
}

LossScaleOptions read_loss_scale_options(const ConfigReader& reader, DType dtype) {
  LossScaleOptions options;
  options.name = reader.choice("name", dtype == DType::fp16 ? "dynamic" : "none", {"none", "static", "dynamic"},
                               "factor of the loss in the backward pass; by default dynamic in fp16, else none");
  const bool name_is_known = !reader.has("name") || reader.get<std::string>("name", "", "") == options.name;
  if (!name_is_known) {
    reader.leave_unjudged();
    return options;
  }
  const Range scales = {kSmallestScale, largest_loss_scale(dtype)};
  if (options.name == "static") options.scale = reader.require<double>("scale", "the factor", scales);
  if (options.name == "dynamic") read_dynamic(reader, scales, options);
  if (options.name != "static") refuse_foreign_key(reader, "scale", "static", options.name);
  if (options.name != "dynamic") {
    for (const char* key : {"init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale"}) {
      refuse_foreign_key(reader, key, "dynamic", options.name);
    }
  }
  return options;
}

LossScaler::LossScaler(const LossScaleOptions& options, DType dtype)
    : options_(options), largest_(largest_loss_scale(dtype)) {
  if (options.name == "static") state_.scale = options.scale;
  if (options.name == "dynamic") state_.scale = options.init_scale;
}

void LossScaler::step_done(bool overflow) {
  PDL_CHECK(active(), "without loss scaling no step is skipped");
  const bool dynamic = options_.name == "dynamic";
  if (overflow) {
    ++state_.skipped_steps;
    state_.good_steps = 0;
    const bool can_fall = dynamic && state_.scale > options_.min_scale;
    state_.skips_at_minimum = can_fall ? 0 : state_.skips_at_minimum + 1;
    if (can_fall) state_.scale = std::max(options_.min_scale, state_.scale * options_.backoff_factor);
    return;
  }
  state_.skips_at_minimum = 0;
  if (!dynamic || ++state_.good_steps < options_.growth_interval) return;
  state_.good_steps = 0;
  const double grown = state_.scale * options_.growth_factor;
  if (grown <= largest_) state_.scale = grown;
}

GradientScaling gradient_scaling(double sum_of_squares, double loss_scale, double clip_grad_norm) {
  const double norm = std::sqrt(sum_of_squares) / loss_scale;
  return {.norm = norm,
          .factor = clip_scale(norm, clip_grad_norm) / loss_scale,
          .overflow = !std::isfinite(sum_of_squares)};
}

}  // namespace pdl
