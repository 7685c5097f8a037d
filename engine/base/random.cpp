#include "engine/base/random.h"

#include <cmath>
#include <cstddef>
#include <numbers>
#include <numeric>
#include <utility>

#include "engine/base/error.h"

namespace pdl {

double RandomStream::normal(std::uint64_t index) const {
  // Both elements of a pair lie in one Philox block, so a pair costs one block whichever half is asked for.
  const std::array<std::uint32_t, 4> four = block(index);
  const std::size_t first = index & 2;
  const double radius = std::sqrt(-2.0 * std::log(to_unit(four[first])));
  const double angle = 2.0 * std::numbers::pi * to_unit(four[first + 1]);
  return radius * ((index & 1) == 0 ? std::cos(angle) : std::sin(angle));
}

std::vector<std::int64_t> random_permutation(std::int64_t count, std::uint64_t seed, std::uint64_t id) {
  PDL_CHECK(count >= 0 && count < (std::int64_t{1} << 32), "count ", count);
  const RandomStream stream(seed, RandomUse::shuffle, id);
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  for (std::size_t last = order.size(); last > 1; --last) {
    std::swap(order[last - 1], order[stream.below(last - 1, static_cast<std::uint32_t>(last))]);
  }
  return order;
}

}  // namespace pdl
