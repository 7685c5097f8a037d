#pragma once
// Progress on stderr: a line that redraws itself on a terminal, else a line every few seconds.

#include <cstdint>
#include <string>

#include "engine/record/observer.h"

namespace pdl {

class Progress final : public Observer {
 public:
  /// `speaks` is true on rank 0 only.
  Progress(bool speaks, std::int64_t epochs);

  void epoch_begin(std::int64_t epoch) {
    epoch_ = epoch;
    skipped_ = 0;
  }
  void epoch_end();
  void step_end(const StepReport& report) override;

 private:
  bool speaks_, redraws_;
  std::int64_t epochs_, epoch_ = 0;
  std::int64_t skipped_ = 0;  ///< steps of this epoch
  double last_s_ = 0.0;
  bool drawn_ = false;
};

}  // namespace pdl
