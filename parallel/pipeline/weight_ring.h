#pragma once
// Versions of a stage's weights side by side. Version v lies in slot v mod W of a ring of W: update v reads that slot
// and writes the next one, which holds the version that nobody needs any more. No weights are ever copied.

#include <cstdint>
#include <vector>

#include "engine/optim/optimizer.h"
#include "parallel/pipeline/pipeline_executor.h"

namespace pdl {

class WeightRing {
 public:
  /// Plans only. `part` outlives the ring; its own values are the first slot.
  WeightRing(const StagePart& part, int versions, DType dtype);

  /// Bytes of MemoryKind::weight_versions that `allocate` takes: all slots but the first.
  std::int64_t predicted_bytes() const;
  /// The part's values are set: they are version 0.
  void allocate(Device& device);

  /// Versions are counted anew: the newest is version 0, older ones have negative numbers.
  void restart();
  int slots() const { return slots_; }
  int newest() const { return newest_; }                        ///< version
  int distinct() const { return std::min(1 + made_, slots_); }  ///< versions that the slots hold: few at first
  /// What layers compute with: version newest() or one of the slots() - 1 before it.
  Tensor values(int version) const;

  /// Ranges for the update from `version` to the next one, or for that of a parameter whose updates come later than
  /// those of the others, as long as the version it makes is held. In a half type the master weights are updated where
  /// they are, and rounded into the next slot.
  OptimizerStep step_from(int version) const;
  /// That update has been queued for version newest().
  void advance();

  /// The newest weights in full: what checkpoints hold. Once these are restored, and the values of `older` versions
  /// before, `restored` makes the newest values.
  Tensor weights() const;
  void restored(Backend& backend, int older);

 private:
  int slot_of(int version) const { return (first_slot_ + version % slots_ + slots_) % slots_; }
  Tensor slot(int index) const;

  const StagePart& part_;
  int slots_;
  DType dtype_;
  std::vector<Buffer> others_;
  int first_slot_ = 0;  ///< of version 0
  int newest_ = 0;
  int made_ = 0;  ///< versions after the oldest that is known
};

}  // namespace pdl
