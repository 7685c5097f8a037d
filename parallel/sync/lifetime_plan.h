#pragma once
// One piece of memory for things that live at different times: buckets that are filled and sent one after another,
// parameters that are gathered, used and let go.

#include <cstdint>
#include <vector>

namespace pdl {

/// Lives from time `first` to time `last`, both included.
struct Lifetime {
  std::int64_t first = 0, last = 0;
  std::int64_t size = 0;
  std::int64_t offset = 0;  ///< set by place_lifetimes
};

/// Gives each an offset such that no two that live at the same time overlap: the largest first, each at the lowest
/// place that is free. Returns the size of the whole.
std::int64_t place_lifetimes(std::vector<Lifetime>& lifetimes);

}  // namespace pdl
