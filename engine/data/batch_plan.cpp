#include "engine/data/batch_plan.h"

#include <algorithm>
#include <numeric>

#include "engine/base/error.h"
#include "engine/base/random.h"

namespace pdl {

Part split_evenly(std::int64_t total, std::int64_t parts, std::int64_t index) {
  PDL_CHECK(total >= 0 && parts >= 1 && index >= 0 && index < parts, "part ", index, " of ", parts, " of ", total);
  const std::int64_t each = total / parts;
  const std::int64_t larger = total % parts;
  return {index * each + std::min(index, larger), each + (index < larger ? 1 : 0)};
}

std::vector<Part> split_in_pieces(std::int64_t total, std::int64_t piece) {
  PDL_CHECK(total >= 0 && piece >= 1, total, " items in pieces of ", piece);
  std::vector<Part> pieces;
  for (std::int64_t begin = 0; begin < total; begin += piece) pieces.push_back({begin, std::min(piece, total - begin)});
  return pieces;
}

EpochPlan::EpochPlan(std::int64_t samples, std::int64_t global_batch, std::uint64_t seed, std::int64_t epoch,
                     bool shuffle, bool drop_last, std::int64_t max_steps)
    : epoch_(epoch), global_batch_(global_batch) {
  PDL_CHECK(samples >= 0 && global_batch >= 1 && epoch >= 0 && max_steps >= 0, samples, " samples, global batch ",
            global_batch, ", epoch ", epoch, ", max_steps ", max_steps);
  full_steps_ = samples / global_batch + (!drop_last && samples % global_batch != 0 ? 1 : 0);
  steps_ = max_steps == 0 ? full_steps_ : std::min(full_steps_, max_steps);
  if (shuffle) {
    order_ = random_permutation(samples, seed, static_cast<std::uint64_t>(epoch));
  } else {
    order_.resize(static_cast<std::size_t>(samples));
    std::iota(order_.begin(), order_.end(), std::int64_t{0});
  }
  // Only now cut to what the steps use: the order must not depend on max_steps.
  order_.resize(static_cast<std::size_t>(std::min(samples, steps_ * global_batch)));
}

std::int64_t EpochPlan::samples() const { return static_cast<std::int64_t>(order_.size()); }

std::span<const std::int64_t> EpochPlan::step_ids(std::int64_t step) const {
  PDL_CHECK(step >= 0 && step < steps_, "step ", step, " of ", steps_);
  const std::int64_t begin = step * global_batch_;
  const std::int64_t count = std::min(global_batch_, samples() - begin);
  return std::span(order_).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
}

}  // namespace pdl
