#pragma once
// What a data set is told whose samples have to be brought here before they can be read.

#include <cstdint>

#include "engine/data/batch_plan.h"

namespace pdl {

/// Brings the samples of coming steps to this rank. Whoever reads the data set calls these from one thread, on every
/// rank, in the same order; `Dataset::read` may meanwhile run on any thread, for samples that are at hand.
class SampleStaging {
 public:
  virtual ~SampleStaging() = default;
  /// This rank will read part `part` of the `parts` parts of each step's samples (split_evenly), or none when `parts`
  /// is 0. Samples are on their way `steps_ahead` steps before the one that reads them: at least one, and no fewer than
  /// the steps that one rank can be ahead of another. Collective over all ranks, before the first plan.
  virtual void join(int part, int parts, int steps_ahead) = 0;
  /// Starts on a plan, which stays valid until the next one; what was brought for an abandoned plan is dropped.
  virtual void begin(const EpochPlan& plan) = 0;
  /// This rank has read all samples of the steps before `step`, which comes next.
  virtual void begin_step(std::int64_t step) = 0;
  /// Whether the samples of a step are here; never waits.
  virtual bool at_hand(std::int64_t step) = 0;
  /// Waits until they are. The step is at most `steps_ahead` steps ahead.
  virtual void wait(std::int64_t step) = 0;
  /// Host memory that samples take on this rank, those on their way included.
  virtual std::int64_t held_bytes() const = 0;
};

}  // namespace pdl
