// Cross entropy against its formula, its gradient against finite differences.

#include <cmath>
#include <limits>

#include "tests/support/catch.h"
#include "tests/support/op_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One call's tensors: logits [M, V].
struct Loss {
  Loss(DType dtype, std::int64_t m, std::int64_t v, double range = 4.0)
      : rows(m),
        classes(v),
        logits(random_tensor(dtype, {m, v}, 1, -range, range)),
        targets(DType::int32, {m}),
        dlogits(dtype, {m, v}),
        loss(dtype, {m}),
        correct(dtype, {m}) {
    const RandomStream stream(2, RandomUse::synthetic, 0);
    for (std::int64_t row = 0; row < m; ++row) {
      targets.put(row, stream.below(static_cast<std::uint64_t>(row), static_cast<std::uint32_t>(v)));
    }
  }
  void run(Backend& backend, double scale = 1.0) {
    backend.cross_entropy(dlogits, loss, correct, logits, targets, classes, scale);
  }
  bool guards_intact() const { return dlogits.guards_intact() && loss.guards_intact() && correct.guards_intact(); }

  std::int64_t rows, classes;
  OwnedTensor logits, targets, dlogits, loss, correct;
};

struct Expected {
  Values loss, correct, dlogits;
};

// In long double, without any trick.
Expected naive_cross_entropy(const Loss& given, double scale) {
  Expected expected;
  for (std::int64_t row = 0; row < given.rows; ++row) {
    const auto target = static_cast<std::int64_t>(given.targets.get(row));
    const auto logit = [&](std::int64_t v) {
      return static_cast<long double>(given.logits.get(row * given.classes + v));
    };
    long double sum = 0.0L;
    std::int64_t best = 0;
    for (std::int64_t v = 0; v < given.classes; ++v) {
      sum += std::exp(logit(v));
      if (logit(v) > logit(best)) best = v;
    }
    const bool ignored = target < 0;
    expected.loss.push_back(ignored ? 0.0 : static_cast<double>(std::log(sum) - logit(target)));
    expected.correct.push_back(!ignored && best == target ? 1.0 : 0.0);
    for (std::int64_t v = 0; v < given.classes; ++v) {
      const long double gradient =
          static_cast<long double>(scale) * (std::exp(logit(v)) / sum - (v == target ? 1.0L : 0.0L));
      expected.dlogits.push_back(ignored ? 0.0 : static_cast<double>(gradient));
    }
  }
  return expected;
}

struct Size {
  std::int64_t rows, classes;
};
const Size kSizes[] = {{5, 2}, {9, 10}, {7, 33}, {3, 1000}, {6, 1057}, {2, 50257}};

}  // namespace

TEST_CASE("cross entropy follows its formula") {
  const CpuUnderTest cpu;
  for (const Size& size : kSizes) {
    CAPTURE(size.rows, size.classes);
    Loss given(DType::fp64, size.rows, size.classes);
    given.targets.put(size.rows / 2, -1.0);
    given.run(*cpu.backend, 0.125);
    const Expected expected = naive_cross_entropy(given, 0.125);
    CHECK(worst_error(given.loss.values(), expected.loss) < 1e-13);
    CHECK(worst_error(given.dlogits.values(), expected.dlogits) < 1e-13);
    CHECK((given.correct.values() == expected.correct));
    CHECK(given.guards_intact());
  }
}

TEST_CASE("cross entropy in fp32 agrees with fp64 to 2e-6") {
  const CpuUnderTest cpu;
  for (const double range : {4.0, 60.0}) {
    for (const Size& size : kSizes) {
      CAPTURE(range, size.rows, size.classes);
      Loss given(DType::fp32, size.rows, size.classes, range);
      given.targets.put(0, -1.0);
      given.run(*cpu.backend, 3.0);
      const Expected expected = naive_cross_entropy(given, 3.0);
      CHECK(worst_error(given.loss.values(), expected.loss) < 2e-6);
      CHECK(worst_error(given.dlogits.values(), expected.dlogits) < 2e-6);
      CHECK((given.correct.values() == expected.correct));
      CHECK(given.guards_intact());
    }
  }
}

TEST_CASE("cross entropy's gradient is its finite difference") {
  const CpuUnderTest cpu;
  Loss given(DType::fp64, 6, 37);
  given.targets.put(3, -1.0);
  given.run(*cpu.backend);
  const Values gradient = given.dlogits.values();
  const auto loss = [&] {
    cpu.backend->cross_entropy(Tensor(), given.loss, given.correct, given.logits, given.targets, given.classes, 1.0);
    double sum = 0.0;
    for (const double row : given.loss.values()) sum += row;
    return sum;
  };
  CHECK(gradient_error(given.logits, gradient, loss) < 1e-7);
}

TEST_CASE("cross entropy's gradient may take the logits' place, or be left out") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    Loss apart(dtype, 11, 203), in_place(dtype, 11, 203), without(dtype, 11, 203);
    for (Loss* given : {&apart, &in_place, &without}) given->targets.put(5, -1.0);
    apart.run(*cpu.backend, 0.5);
    cpu.backend->cross_entropy(in_place.logits, in_place.loss, in_place.correct, in_place.logits, in_place.targets,
                               in_place.classes, 0.5);
    cpu.backend->cross_entropy(Tensor(), without.loss, without.correct, without.logits, without.targets,
                               without.classes, 0.5);
    CHECK(same_bits(apart.dlogits, in_place.logits));
    for (const Loss* given : {&in_place, &without}) {
      CHECK(same_bits(apart.loss, given->loss));
      CHECK(same_bits(apart.correct, given->correct));
    }
  }
}

TEST_CASE("of equal maxima the first one is the prediction") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    Loss given(dtype, 3, 40);
    Values logits(120, -1.0);
    for (const std::size_t row : {0u, 1u, 2u}) logits[row * 40 + 7] = logits[row * 40 + 33] = 2.0;
    given.logits.set(logits);
    given.targets.set({7.0, 33.0, 8.0});
    given.run(*cpu.backend);
    CHECK(given.correct.values() == Values{1.0, 0.0, 0.0});
  }
}

TEST_CASE("a single class leaves nothing to learn") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    Loss given(dtype, 4, 1);
    given.run(*cpu.backend);
    CHECK((given.loss.values() == Values(4, 0.0)));
    CHECK((given.dlogits.values() == Values(4, 0.0)));
    CHECK((given.correct.values() == Values(4, 1.0)));
  }
}

TEST_CASE("classes at minus infinity count for nothing") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    Loss plain(dtype, 4, 50), padded(dtype, 4, 64);
    padded.targets.set(plain.targets.values());
    for (std::int64_t i = 0; i < padded.logits.elements(); ++i) {
      padded.logits.put(i, i % 64 < 50 ? plain.logits.get(i / 64 * 50 + i % 64) : -kInfinity);
    }
    plain.run(*cpu.backend);
    padded.run(*cpu.backend);
    CHECK(worst_error(padded.loss, plain.loss) < (dtype == DType::fp64 ? 1e-15 : 2e-7));
    CHECK((padded.correct.values() == plain.correct.values()));
    for (std::int64_t row = 0; row < 4; ++row) {
      for (std::int64_t v = 50; v < 64; ++v) REQUIRE(padded.dlogits.get(row * 64 + v) == 0.0);
    }
  }
}

TEST_CASE("cross entropy survives huge logits and reports broken ones") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    Loss given(dtype, 3, 4);
    given.logits.set({1e30, 0.0, 0.0, -1e30, 1000.0, 1001.0, 999.0, 0.0, -1e4, -1e4, -1e4, -1e4});
    given.targets.set({0.0, 1.0, 2.0});
    given.run(*cpu.backend);
    CHECK(given.loss.get(0) == 0.0);
    CHECK(given.loss.get(1) == Approx(std::log(1.0 + std::exp(-1.0) + std::exp(-2.0))).epsilon(1e-6));
    CHECK(given.loss.get(2) == Approx(std::log(4.0)).epsilon(1e-6));
    CHECK(given.dlogits.get(8) == Approx(0.25).epsilon(1e-6));
    CHECK(given.correct.values() == Values{1.0, 1.0, 0.0});

    for (const double broken : {std::numeric_limits<double>::quiet_NaN(), kInfinity}) {
      for (const std::int64_t place : {0, 1, 3}) {
        Loss bad(dtype, 1, 4);
        bad.targets.set({1.0});
        bad.logits.put(place, broken);
        bad.run(*cpu.backend);
        CHECK(std::isnan(bad.loss.get(0)));
        CHECK(std::isnan(bad.dlogits.get(2)));
      }
    }
  }
}

TEST_CASE("cross entropy's gradient keeps its precision where the model is sure") {
  const CpuUnderTest cpu;
  Loss given(DType::fp32, 1, 3);
  given.logits.set({12.0, 0.0, 0.0});
  given.targets.set({0.0});
  given.run(*cpu.backend);
  const Expected expected = naive_cross_entropy(given, 1.0);
  CHECK(given.dlogits.get(0) ==
        Approx(expected.dlogits[0]).epsilon(1e-2));  // 1 - p = 1.2e-5: fp32 sums know it to 1e-7 / 1.2e-5
  CHECK(given.dlogits.get(1) == Approx(expected.dlogits[1]).epsilon(1e-6));
}

TEST_CASE("cross entropy gives the same bits with any number of threads") {
  const CpuUnderTest cpu;
  const auto run = [&](int threads) {
    Loss given(DType::fp32, 23, 1003);
    with_threads(threads, [&] { given.run(*cpu.backend, 0.25); });
    return std::vector<Values>{given.loss.values(), given.correct.values(), given.dlogits.values()};
  };
  const auto one = run(1);
  CHECK((one == run(2)));
  CHECK((one == run(3)));
}

TEST_CASE("cross entropy refuses impossible targets and shapes") {
  const CpuUnderTest cpu;
  for (const double target : {-2.0, 5.0, 1000.0}) {
    Loss given(DType::fp32, 2, 5);
    given.targets.put(1, target);
    CHECK_THROWS_AS(given.run(*cpu.backend), Error);
  }
  Loss given(DType::fp32, 2, 5), longer(DType::fp32, 3, 5);
  CHECK_THROWS_AS(cpu.backend->cross_entropy(longer.dlogits, given.loss, given.correct, given.logits, given.targets,
                                             given.classes, 1.0),
                  Error);
  CHECK_THROWS_AS(
      cpu.backend->cross_entropy(Tensor(), longer.loss, given.correct, given.logits, given.targets, given.classes, 1.0),
      Error);
  CHECK_THROWS_AS(
      cpu.backend->cross_entropy(Tensor(), given.loss, given.correct, given.logits, given.loss, given.classes, 1.0),
      Error);
}

namespace {

// The same rows from shards of the classes that end at `ends`, the last of which has all rest of the width.
struct Shards {
  Shards(const Loss& whole, const std::vector<std::int64_t>& ends, std::int64_t padding) {
    std::int64_t first = 0;
    for (const std::int64_t end : ends) {
      const std::int64_t width = end - first + (end == ends.back() ? padding : 0);
      OwnedTensor logits(whole.logits.tensor().dtype(), {whole.rows, width});
      for (std::int64_t i = 0; i < logits.elements(); ++i) {
        const std::int64_t row = i / width, column = i % width;
        // Padding would be the largest of all.
        logits.put(i, column < end - first ? whole.logits.get(row * whole.classes + first + column) : 1000.0);
      }
      parts.push_back({first, end - first, std::move(logits)});
      first = end;
    }
  }
  struct Part {
    std::int64_t first, classes;
    OwnedTensor logits;
  };
  std::vector<Part> parts;
};

}  // namespace

TEST_CASE("shards of the classes give the loss, the marks and the gradient of the whole") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    const double tolerance = dtype == DType::fp64 ? 1e-13 : 2e-6;
    for (const std::vector<std::int64_t>& ends :
         {std::vector<std::int64_t>{37}, {20, 37}, {13, 25, 37}, {1, 2, 36, 37}, {20, 37, 37}}) {
      for (const std::int64_t padding : {0, 3}) {
        CAPTURE(name_of(dtype), ends.size(), ends.front(), padding);
        Loss whole(dtype, 12, 37);
        whole.targets.put(3, -1.0);
        for (std::int64_t row = 4; row < 8; ++row) {  // targets that are the largest; every other one not the first
          const auto target = static_cast<std::int64_t>(whole.targets.get(row));
          whole.logits.put(row * 37 + target, 5.0);
          if (row % 2 == 0 && target > 0) whole.logits.put(row * 37 + target - 1, 5.0);
        }
        const Shards shards(whole, ends, padding);
        whole.run(*cpu.backend, 0.25);
        const auto count = static_cast<std::int64_t>(ends.size());
        OwnedTensor stats(dtype, {count, 12, 4});
        for (std::int64_t s = 0; s < count; ++s) {
          const Shards::Part& part = shards.parts[static_cast<std::size_t>(s)];
          cpu.backend->cross_entropy_shard(stats.tensor().rows(s, 1), part.logits, whole.targets, part.first,
                                           part.classes);
        }
        for (const Shards::Part& part : shards.parts) {
          OwnedTensor loss(dtype, {12}), correct(dtype, {12});
          cpu.backend->cross_entropy_join(part.logits, loss, correct, part.logits, whole.targets, stats, part.first,
                                          part.classes, 0.25);
          CHECK(worst_error(loss.values(), whole.loss.values()) < tolerance);
          CHECK((correct.values() == whole.correct.values()));
          Values expected;
          for (std::int64_t row = 0; row < 12; ++row) {
            for (std::int64_t v = 0; v < part.logits.tensor().shape()[1]; ++v) {
              expected.push_back(v < part.classes ? whole.dlogits.get(row * 37 + part.first + v) : 0.0);
            }
          }
          CHECK(worst_error(part.logits.values(), expected) < tolerance);
          CHECK((part.logits.guards_intact() && loss.guards_intact() && correct.guards_intact()));
        }
        CHECK(stats.guards_intact());
      }
    }
  }
}

TEST_CASE("shards at minus infinity count for nothing, and a broken logit in any shard is seen by all") {
  const CpuUnderTest cpu;
  OwnedTensor logits(DType::fp64, {1, 2}), targets(DType::int32, {1}, {2.0}), stats(DType::fp64, {2, 1, 4});
  OwnedTensor loss(DType::fp64, {1}), correct(DType::fp64, {1});
  const auto run = [&](const Values& first, const Values& second) {
    for (const bool is_first : {true, false}) {
      logits.set(is_first ? first : second);
      cpu.backend->cross_entropy_shard(stats.tensor().rows(is_first ? 0 : 1, 1), logits, targets, is_first ? 0 : 2, 2);
    }
    cpu.backend->cross_entropy_join(logits, loss, correct, logits, targets, stats, 2, 2, 1.0);
    return loss.get(0);
  };
  CHECK(run({-kInfinity, -kInfinity}, {1.0, 1.0}) == Approx(std::log(2.0)));
  CHECK(logits.get(0) == Approx(-0.5));
  CHECK(correct.get(0) == 1.0);
  CHECK(std::isnan(run({std::nan(""), 0.0}, {1.0, 1.0})));
  CHECK(std::isnan(logits.get(1)));
  CHECK(std::isnan(run({0.0, 0.0}, {kInfinity, 1.0})));
  targets.set({7.0});  // no shard has it
  CHECK(run({0.0, 0.0}, {0.0, 0.0}) == kInfinity);
}
