#pragma once
// Versions of a tied copy over the end of a run of the pipeline. The stage that has the copy holds one version of its
// weights, as it uses the newest; the copy follows its owner, which is some updates behind, by taking totals late
// (tied_exchange.h). At the end of a run it takes them all, and is as new as its owner. If the next run goes on as if
// there had been no end, its first units need the versions of before: here they are.

#include <cstdint>
#include <vector>

#include "engine/device/device.h"
#include "engine/tensor/tensor.h"

namespace pdl {

class TiedHistory {
 public:
  /// Plans only. The last `length` versions; 0: none.
  explicit TiedHistory(int length) : length_(length) {}

  int length() const { return length_; }
  /// Takes `length` times the copy's bytes of MemoryKind::weight_versions.
  void allocate(Device& device, const TensorSpec& copy);
  /// The place of version v, from 0 over the whole training: that of v - length before.
  Tensor values(std::int64_t version) const;

 private:
  int length_;
  TensorSpec copy_;
  std::vector<Buffer> places_;
};

}  // namespace pdl
