#include "parallel/sync/lifetime_plan.h"

#include <algorithm>
#include <numeric>

namespace pdl {

std::int64_t place_lifetimes(std::vector<Lifetime>& lifetimes) {
  std::vector<std::size_t> order(lifetimes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return lifetimes[a].size > lifetimes[b].size; });
  std::int64_t total = 0;
  std::vector<const Lifetime*> placed;  // by offset
  for (std::size_t index : order) {
    Lifetime& next = lifetimes[index];
    next.offset = 0;
    for (const Lifetime* other : placed) {
      const bool together = other->first <= next.last && next.first <= other->last;
      if (!together) continue;
      if (next.offset + next.size <= other->offset) break;  // fits in front of it
      next.offset = std::max(next.offset, other->offset + other->size);
    }
    total = std::max(total, next.offset + next.size);
    placed.insert(std::upper_bound(placed.begin(), placed.end(), &next,
                                   [](const Lifetime* a, const Lifetime* b) { return a->offset < b->offset; }),
                  &next);
  }
  return total;
}

}  // namespace pdl
