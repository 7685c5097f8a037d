#pragma once
// Which global sample ids belong to which step, and which of them a data-parallel rank holds: pure functions of
// (seed, epoch, step, dp rank, dp size). The ids of a step never depend on the number of ranks.

#include <cstdint>
#include <span>
#include <vector>

namespace pdl {

/// A contiguous part of a step's samples.
struct Part {
  std::int64_t begin = 0, count = 0;
  bool operator==(const Part&) const = default;
};

/// Part `index` of `parts` of `total` items: contiguous, sizes differ by at most one, larger ones first. May be empty.
Part split_evenly(std::int64_t total, std::int64_t parts, std::int64_t index);

/// `total` items in pieces of `piece` (the last may be smaller); no pieces when `total` is 0.
std::vector<Part> split_in_pieces(std::int64_t total, std::int64_t piece);

/// The steps of one epoch over one split.
class EpochPlan {
 public:
  /// Shuffled by (seed, epoch) when `shuffle`; else in id order. The last step holds what is left unless `drop_last`.
  /// `max_steps` 0 means all. A split smaller than one batch gives a single ragged step, or none with `drop_last`.
  EpochPlan(std::int64_t samples, std::int64_t global_batch, std::uint64_t seed, std::int64_t epoch, bool shuffle,
            bool drop_last, std::int64_t max_steps);

  std::int64_t epoch() const { return epoch_; }
  std::int64_t steps() const { return steps_; }
  /// Steps of the whole epoch, before max_steps: what an extrapolated epoch time refers to.
  std::int64_t full_steps() const { return full_steps_; }
  /// Samples of all `steps()` together.
  std::int64_t samples() const;
  /// Global sample ids of step `step`, in batch order. Valid as long as the plan.
  std::span<const std::int64_t> step_ids(std::int64_t step) const;

 private:
  std::vector<std::int64_t> order_;
  std::int64_t epoch_, global_batch_, steps_, full_steps_;
};

}  // namespace pdl
