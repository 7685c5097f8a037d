#include "parallel/sync/lifetime_plan.h"

#include <algorithm>

#include "engine/base/random.h"
#include "tests/support/catch.h"

using namespace pdl;

TEST_CASE("things that live at the same time do not overlap, others share") {
  std::vector<Lifetime> lifetimes = {{0, 1, 10}, {1, 2, 20}, {2, 3, 10}, {0, 3, 5}};
  CHECK(place_lifetimes(lifetimes) == 35);
  CHECK(lifetimes[0].offset == lifetimes[2].offset);
  std::vector<Lifetime> one_after_another = {{0, 0, 7}, {1, 1, 9}, {2, 5, 3}};
  CHECK(place_lifetimes(one_after_another) == 9);
  std::vector<Lifetime> none;
  CHECK(place_lifetimes(none) == 0);
}

TEST_CASE("a gap between two is filled by what fits") {
  std::vector<Lifetime> lifetimes = {{0, 9, 50}, {0, 2, 40}, {3, 9, 30}, {3, 9, 10}};
  CHECK(place_lifetimes(lifetimes) == 90);
}

TEST_CASE("random lifetimes never overlap, and the peak is not far from what lives at once") {
  const RandomStream random(7, RandomUse::init, 1);
  for (std::uint64_t round = 0; round < 50; ++round) {
    std::vector<Lifetime> lifetimes;
    for (std::uint64_t i = 0; i < 40; ++i) {
      const auto draw = [&](std::uint64_t k, double most) {
        return static_cast<std::int64_t>(most * random.uniform(round * 1000 + i * 4 + k));
      };
      const std::int64_t first = draw(0, 30.0);
      lifetimes.push_back({first, first + draw(1, 8.0), 1 + draw(2, 100.0)});
    }
    const std::int64_t total = place_lifetimes(lifetimes);
    std::int64_t most_at_once = 0;
    for (std::int64_t time = 0; time < 40; ++time) {
      std::int64_t at_once = 0;
      for (const Lifetime& a : lifetimes) at_once += a.first <= time && time <= a.last ? a.size : 0;
      most_at_once = std::max(most_at_once, at_once);
    }
    CHECK(total >= most_at_once);
    CHECK(total <= most_at_once * 3 / 2);
    for (std::size_t i = 0; i < lifetimes.size(); ++i) {
      CHECK(lifetimes[i].offset + lifetimes[i].size <= total);
      for (std::size_t j = 0; j < i; ++j) {
        const Lifetime &a = lifetimes[i], &b = lifetimes[j];
        const bool together = a.first <= b.last && b.first <= a.last;
        const bool overlap = a.offset < b.offset + b.size && b.offset < a.offset + a.size;
        CHECK_FALSE((together && overlap));
      }
    }
  }
}
