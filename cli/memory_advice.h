#pragma once
// What to change when a run does not fit into memory: found by planning the changed run, not by rules of thumb.

#include <cstdint>
#include <string>
#include <vector>

#include "cli/experiment.h"

namespace pdl {

/// Changes of the configuration under which a rank would need at most `available` bytes, each as overrides to put on
/// the command line with what they would need, cheapest first: those that only cost time before those that change what
/// is trained. Several at once only where none suffices alone. Empty when nothing that was tried helps.
std::vector<std::string> changes_that_fit(const Experiment& experiment, const std::string& config,
                                          const std::vector<std::string>& overrides, int ranks, std::int64_t available);

}  // namespace pdl
