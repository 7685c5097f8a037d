#include "engine/base/random.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <set>

#include "engine/base/error.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

using Counter = std::array<std::uint32_t, 4>;

struct Moments {
  double mean = 0, variance = 0, skewness = 0, kurtosis = 0;
};

template <typename Draw>
Moments moments_of(int count, Draw draw) {
  double mean = 0;
  for (int i = 0; i < count; ++i) mean += draw(i) / count;
  double second = 0, third = 0, fourth = 0;
  for (int i = 0; i < count; ++i) {
    const double d = draw(i) - mean;
    second += d * d / count;
    third += d * d * d / count;
    fourth += d * d * d * d / count;
  }
  return {mean, second, third / std::pow(second, 1.5), fourth / (second * second)};
}

constexpr int kDraws = 200000;  // the standard error of a mean is then sd / 447

}  // namespace

TEST_CASE("Philox gives the published answers of its authors") {
  constexpr std::uint32_t kOnes = 0xffffffffu;
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == Counter{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u});
  CHECK(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}) ==
        Counter{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu});
  CHECK(philox4x32({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}) ==
        Counter{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u});
}

TEST_CASE("an element is a word of the block that its index and the stream's id name") {
  constexpr std::uint64_t kId = 0x0123456789abcdefu, kSeed = 0xfedcba9876543210u;
  const RandomStream stream(kSeed, RandomUse::dropout, kId);
  const std::uint64_t index = (std::uint64_t{5} << 34) + 4 * 7 + 2;
  CHECK(stream.bits(index) == philox4x32({7, 5, 0x89abcdefu, 0x01234567u}, philox_key(kSeed, RandomUse::dropout))[2]);
}

TEST_CASE("streams differ by seed (all 64 bits), use and id") {
  std::set<std::uint32_t> firsts;
  for (const std::uint64_t seed : {std::uint64_t{1}, std::uint64_t{2}, (std::uint64_t{1} << 32) + 1})
    for (const RandomUse use : {RandomUse::init, RandomUse::dropout, RandomUse::shuffle, RandomUse::synthetic})
      for (const std::uint64_t id : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32})
        firsts.insert(RandomStream(seed, use, id).bits(0));
  CHECK(firsts.size() == 3 * 4 * 3);
}

TEST_CASE("a unit number never reaches 0 or 1 and is symmetric") {
  CHECK(to_unit(0) > 0.0);
  CHECK(to_unit(0xffffffffu) < 1.0);
  CHECK(to_unit(0) == 1.0 - to_unit(0xffffffffu));
  CHECK(to_unit(0x7fffffffu) + to_unit(0x80000000u) == 1.0);
}

TEST_CASE("uniform numbers have the moments of the uniform distribution") {
  const RandomStream stream(1234, RandomUse::synthetic, 9);
  const Moments m = moments_of(kDraws, [&](int i) { return stream.uniform(static_cast<std::uint64_t>(i)); });
  CHECK(m.mean == Approx(0.5).margin(0.003));
  CHECK(m.variance == Approx(1.0 / 12).margin(0.001));
  CHECK(m.skewness == Approx(0.0).margin(0.02));
  CHECK(m.kurtosis == Approx(1.8).margin(0.02));
}

TEST_CASE("normal numbers have the moments of the normal distribution") {
  const RandomStream stream(1234, RandomUse::init, 3);
  const auto draw = [&](int i) { return stream.normal(static_cast<std::uint64_t>(i)); };
  const Moments m = moments_of(kDraws, draw);
  CHECK(m.mean == Approx(0.0).margin(0.009));
  CHECK(m.variance == Approx(1.0).margin(0.013));
  CHECK(m.skewness == Approx(0.0).margin(0.022));
  CHECK(m.kurtosis == Approx(3.0).margin(0.044));
  double neighbours = 0;
  for (int i = 0; i + 1 < kDraws; ++i) neighbours += draw(i) * draw(i + 1) / kDraws;
  CHECK(neighbours == Approx(0.0).margin(0.009));
}

TEST_CASE("a normal number is Box-Muller on the pair of uniform elements around it") {
  const RandomStream stream(7, RandomUse::init, 1);
  for (std::uint64_t pair = 0; pair < 8; ++pair) {
    const double radius = std::sqrt(-2 * std::log(stream.uniform(2 * pair)));
    const double angle = 2 * std::numbers::pi * stream.uniform(2 * pair + 1);
    CHECK(stream.normal(2 * pair) == Approx(radius * std::cos(angle)).epsilon(1e-14));
    CHECK(stream.normal(2 * pair + 1) == Approx(radius * std::sin(angle)).epsilon(1e-14));
  }
}

TEST_CASE("bounded integers fill their range evenly") {
  const RandomStream stream(5, RandomUse::synthetic, 0);
  std::array<int, 7> seen{};
  for (std::uint64_t i = 0; i < 70000; ++i) ++seen.at(stream.below(i, 7));
  for (const int count : seen) CHECK(count == Approx(10000).margin(400));
}

TEST_CASE("a permutation holds every number once") {
  for (const std::int64_t count : {0, 1, 2, 3, 1000}) {
    std::vector<std::int64_t> order = random_permutation(count, 1234, 0);
    REQUIRE(static_cast<std::int64_t>(order.size()) == count);
    std::sort(order.begin(), order.end());
    for (std::int64_t i = 0; i < count; ++i) REQUIRE(order[static_cast<std::size_t>(i)] == i);
  }
  CHECK_THROWS_AS(random_permutation(-1, 0, 0), Error);
}

TEST_CASE("a permutation depends on seed and id alone") {
  CHECK(random_permutation(100, 1, 2) == random_permutation(100, 1, 2));
  CHECK(random_permutation(100, 1, 2) != random_permutation(100, 1, 3));
  CHECK(random_permutation(100, 1, 2) != random_permutation(100, 2, 2));
}

TEST_CASE("every number is equally likely at every place of a permutation") {
  std::array<std::array<int, 4>, 4> seen{};  // [position][number]
  constexpr int kTrials = 20000;
  for (int trial = 0; trial < kTrials; ++trial) {
    const std::vector<std::int64_t> order = random_permutation(4, 99, static_cast<std::uint64_t>(trial));
    for (std::size_t i = 0; i < 4; ++i) ++seen[i][static_cast<std::size_t>(order[i])];
  }
  for (const auto& row : seen)
    for (const int count : row) CHECK(count == Approx(kTrials / 4).margin(250));
}
