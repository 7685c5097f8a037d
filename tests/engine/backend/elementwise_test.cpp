// Activations against their formulas; dropout masks against their definition, element by element.

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "tests/support/catch.h"
#include "tests/support/op_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

const std::int64_t kSizes[] = {1, 7, 16, 33, 4097, 20011};

double naive_gelu(double x) {
  return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}

// The definition, one Philox call for each element.
bool is_kept(const DropoutKey& key, std::int64_t sample_id, std::int64_t element) {
  const auto words = philox4x32({static_cast<std::uint32_t>(element / 4), static_cast<std::uint32_t>(sample_id),
                                 key.site, static_cast<std::uint32_t>(*key.update)},
                                philox_key(key.seed, RandomUse::dropout));
  return to_unit(words[static_cast<std::size_t>(element % 4)]) >= key.rate;
}

// The mask of a whole tensor [N, ...] as the operation applies it to ones.
Values mask_of(Backend& backend, const DropoutKey& key, DType dtype, const Shape& shape) {
  OwnedTensor ones(dtype, shape), y(dtype, shape);
  ones.set(Values(static_cast<std::size_t>(ones.elements()), 1.0));
  backend.dropout(y, ones, key);
  CHECK(y.guards_intact());
  return y.values();
}

struct Samples {
  explicit Samples(std::vector<std::int64_t> sample_ids) : ids(std::move(sample_ids)) {}
  DropoutKey key(double rate) const {
    DropoutKey key;
    key.rate = rate;
    key.seed = 0x123456789abcdefull;
    key.update = &update;
    key.site = 42;
    key.sample_ids = ids.data();
    key.samples = static_cast<std::int64_t>(ids.size());
    return key;
  }
  std::vector<std::int64_t> ids;
  std::int64_t update = 17;
};

}  // namespace

TEST_CASE("gelu's gradient is the finite difference of its formula") {
  const CpuUnderTest cpu;
  OwnedTensor x = random_tensor(DType::fp64, {311}, 1, -6.0, 6.0);
  const OwnedTensor dy = random_tensor(DType::fp64, {311}, 2);
  OwnedTensor dx(DType::fp64, {311});
  cpu.backend->activation_backward(dx, dy, x, Activation::gelu_tanh);
  const auto loss = [&] {
    Values y = x.values();
    for (double& value : y) value = naive_gelu(value);
    return dot(dy.values(), y);
  };
  CHECK(gradient_error(x, dx.values(), loss) < 1e-7);
}

TEST_CASE("gelu's gradient in fp32 agrees with fp64 to 1e-6, and may replace dy") {
  const CpuUnderTest cpu;
  for (const std::int64_t n : kSizes) {
    CAPTURE(n);
    const OwnedTensor x = random_tensor(DType::fp64, {n}, 3, -12.0, 12.0), dy = random_tensor(DType::fp64, {n}, 4);
    const OwnedTensor x32(DType::fp32, {n}, x.values());
    OwnedTensor dx(DType::fp64, {n}), in_place(DType::fp32, {n}, dy.values()), dx32(DType::fp32, {n});
    cpu.backend->activation_backward(dx, dy, x, Activation::gelu_tanh);
    cpu.backend->activation_backward(dx32, in_place, x32, Activation::gelu_tanh);
    cpu.backend->activation_backward(in_place, in_place, x32, Activation::gelu_tanh);
    // Absolutely: far below zero the gradient vanishes, and there fp64's tanh form is the less precise of the two.
    double worst = 0.0;
    for (std::int64_t i = 0; i < n; ++i) worst = std::max(worst, std::fabs(dx32.get(i) - dx.get(i)));
    CHECK(worst < 1e-6);
    CHECK(same_bits(dx32, in_place));
    CHECK(dx32.guards_intact());
  }
}

TEST_CASE("relu's gradient passes where the output is positive") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const std::int64_t n : kSizes) {
      OwnedTensor y = random_tensor(dtype, {n}, 5);
      for (std::int64_t i = 0; i < n; ++i) y.put(i, std::max(0.0, y.get(i)));
      OwnedTensor dy = random_tensor(dtype, {n}, 6), dx(dtype, {n});
      Values expected = dy.values();
      for (std::int64_t i = 0; i < n; ++i) expected[static_cast<std::size_t>(i)] *= y.get(i) > 0.0 ? 1.0 : 0.0;
      cpu.backend->activation_backward(dx, dy, y, Activation::relu);
      CHECK((dx.values() == expected));
      cpu.backend->activation_backward(dy, dy, y, Activation::relu);
      CHECK((dy.values() == expected));
      CHECK((dx.guards_intact() && dy.guards_intact()));
    }
  }
}

TEST_CASE("no activation passes the gradient as it is") {
  const CpuUnderTest cpu;
  const OwnedTensor dy = random_tensor(DType::fp32, {77}, 7);
  OwnedTensor dx(DType::fp32, {77});
  cpu.backend->activation_backward(dx, dy, Tensor(), Activation::none);
  CHECK(same_bits(dx, dy));
}

TEST_CASE("an activation's gradient is summed down its columns on the way, for the bias") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{100, 1}, Shape{5, 6, 33}, Shape{2, 3, 37, 530}}) {
      for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu_tanh}) {
        CAPTURE(name_of(dtype), shape.to_string(), static_cast<int>(activation));
        const std::int64_t columns = shape.back();
        const OwnedTensor dy = random_tensor(dtype, shape, 11), saved = random_tensor(dtype, shape, 12, -3.0, 3.0);
        OwnedTensor alone(dtype, shape), dx(dtype, shape), dbias(dtype, {columns});
        cpu.backend->activation_backward(alone, dy, saved, activation);
        Values sums(static_cast<std::size_t>(columns), 0.0);
        for (std::int64_t i = 0; i < alone.elements(); ++i) sums[static_cast<std::size_t>(i % columns)] += alone.get(i);
        const double tolerance = dtype == DType::fp64 ? 1e-13 : 1e-6;

        cpu.backend->activation_backward(dx, dbias, dy, saved, activation, false);
        CHECK(same_bits(dx, alone));
        CHECK(worst_error(dbias.values(), sums) < tolerance);
        cpu.backend->activation_backward(dx, dbias, dy, saved, activation, true);
        for (double& sum : sums) sum *= 2.0;
        CHECK(worst_error(dbias.values(), sums) < tolerance);
        CHECK((dx.guards_intact() && dbias.guards_intact()));
      }
    }
  }
  const OwnedTensor dy = random_tensor(DType::fp32, {4, 6}, 1), dbias(DType::fp32, {5});
  CHECK_THROWS_AS(cpu.backend->activation_backward(dy, dbias, dy, dy, Activation::relu, false), Error);
}

TEST_CASE("dropout keeps exactly the elements of its definition") {
  const CpuUnderTest cpu;
  const Samples samples({5, 0, 123456789012345, 7});
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const double rate : {0.1, 0.5, 0.9}) {
      for (const Shape& shape : {Shape{4, 1}, Shape{4, 3, 7}, Shape{4, 1500}, Shape{4, 5, 129}}) {
        CAPTURE(name_of(dtype), rate, shape.to_string());
        const DropoutKey key = samples.key(rate);
        const OwnedTensor x = random_tensor(dtype, shape, 8);
        OwnedTensor y(dtype, shape);
        cpu.backend->dropout(y, x, key);
        const std::int64_t per_sample = shape.elements_per_sample();
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < y.elements(); ++i) {
          const bool kept = is_kept(key, samples.ids[static_cast<std::size_t>(i / per_sample)], i % per_sample);
          const double expected = kept ? x.get(i) / (1.0 - rate) : 0.0;
          wrong +=
              std::fabs(y.get(i) - expected) <= (dtype == DType::fp64 ? 1e-15 : 1e-6) * std::fabs(expected) ? 0 : 1;
        }
        CHECK(wrong == 0);
        CHECK(y.guards_intact());
      }
    }
  }
}

TEST_CASE("dropout keeps the promised fraction, differently for each sample, site and update") {
  const CpuUnderTest cpu;
  const Samples samples({0, 1});
  const Shape shape = {2, 50000};
  for (const double rate : {0.1, 0.3}) {
    const DropoutKey key = samples.key(rate);
    const Values mask = mask_of(*cpu.backend, key, DType::fp64, shape);
    const double mean = std::accumulate(mask.begin(), mask.end(), 0.0) / static_cast<double>(mask.size());
    CHECK((mean == Approx(1.0).margin(5.0 * std::sqrt(rate / (1.0 - rate) / static_cast<double>(mask.size())))));

    DropoutKey other_site = key, other_update = key, other_seed = key;
    other_site.site += 1;
    const std::int64_t next_update = *key.update + 1;
    other_update.update = &next_update;
    other_seed.seed += std::uint64_t{1} << 40;
    CHECK((mask != mask_of(*cpu.backend, other_site, DType::fp64, shape)));
    CHECK((mask != mask_of(*cpu.backend, other_update, DType::fp64, shape)));
    CHECK((mask != mask_of(*cpu.backend, other_seed, DType::fp64, shape)));
    CHECK((Values(mask.begin(), mask.begin() + 50000) != Values(mask.begin() + 50000, mask.end())));
  }
}

TEST_CASE("a shard's mask is the whole tensor's mask on the shard's columns") {
  const CpuUnderTest cpu;
  const Samples samples({9, 4, 6});
  const std::int64_t rows = 5, full_width = 203;
  const DropoutKey key = samples.key(0.3);
  const Values whole = mask_of(*cpu.backend, key, DType::fp32, {3, rows, full_width});
  for (const auto& [first, width] : {std::pair<std::int64_t, std::int64_t>{0, 101}, {101, 102}, {7, 1}, {0, 203}}) {
    CAPTURE(first, width);
    DropoutKey shard = key;
    shard.local_width = width;
    shard.full_width = full_width;
    shard.first_column = first;
    const Values part = mask_of(*cpu.backend, shard, DType::fp32, {3, rows, width});
    std::int64_t wrong = 0;
    for (std::int64_t row = 0; row < 3 * rows; ++row) {
      for (std::int64_t c = 0; c < width; ++c) {
        wrong += part[static_cast<std::size_t>(row * width + c)] ==
                         whole[static_cast<std::size_t>(row * full_width + first + c)]
                     ? 0
                     : 1;
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("a sample's mask depends neither on its place in the batch nor on the batch") {
  const CpuUnderTest cpu;
  const Samples batch({3, 8, 2}), reversed({2, 8, 3}), alone({8});
  const Values a = mask_of(*cpu.backend, batch.key(0.5), DType::fp32, {3, 333});
  const Values b = mask_of(*cpu.backend, reversed.key(0.5), DType::fp32, {3, 333});
  const Values c = mask_of(*cpu.backend, alone.key(0.5), DType::fp32, {1, 333});
  const auto sample = [](const Values& values, std::int64_t n) {
    return Values(values.begin() + n * 333, values.begin() + (n + 1) * 333);
  };
  CHECK((sample(a, 0) == sample(b, 2)));
  CHECK((sample(a, 1) == sample(b, 1)));
  CHECK((sample(a, 2) == sample(b, 0)));
  CHECK((sample(a, 1) == c));
}

TEST_CASE("dropout in place, at rate 0, and as its own backward") {
  const CpuUnderTest cpu;
  const Samples samples({1, 2});
  const OwnedTensor x = random_tensor(DType::fp32, {2, 901}, 9);
  OwnedTensor y(DType::fp32, {2, 901}), in_place(DType::fp32, {2, 901}, x.values());
  cpu.backend->dropout(y, x, samples.key(0.2));
  cpu.backend->dropout(in_place, in_place, samples.key(0.2));
  CHECK(same_bits(y, in_place));

  // Needs no samples when nothing is dropped.
  cpu.backend->dropout(y, x, DropoutKey());
  CHECK(same_bits(y, x));

  // d <p, y> / dx = mask * p / (1 - rate): the operation applied to p.
  const DropoutKey key = samples.key(0.4);
  OwnedTensor x64(DType::fp64, {2, 901}, x.values()), y64(DType::fp64, {2, 901}), dx(DType::fp64, {2, 901});
  const OwnedTensor dy = random_tensor(DType::fp64, {2, 901}, 10);
  cpu.backend->dropout(dx, dy, key);
  const auto loss = [&] {
    cpu.backend->dropout(y64, x64, key);
    return dot(dy.values(), y64.values());
  };
  CHECK(gradient_error(x64, dx.values(), loss) < 1e-7);
}

TEST_CASE("residual_add adds what dropout leaves, also onto either input") {
  const CpuUnderTest cpu;
  const Samples samples({11, 12, 13});
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const double rate : {0.0, 0.25}) {
      const DropoutKey key = rate == 0.0 ? DropoutKey() : samples.key(rate);
      const OwnedTensor residual = random_tensor(dtype, {3, 7, 211}, 11), x = random_tensor(dtype, {3, 7, 211}, 12);
      OwnedTensor dropped(dtype, {3, 7, 211}), y(dtype, {3, 7, 211});
      cpu.backend->dropout(dropped, x, key);
      cpu.backend->residual_add(y, residual, x, key);
      Values expected = residual.values();
      for (std::int64_t i = 0; i < y.elements(); ++i) expected[static_cast<std::size_t>(i)] += dropped.get(i);
      CHECK((worst_error(y.values(), expected) < (dtype == DType::fp64 ? 1e-15 : 1e-7)));

      OwnedTensor onto_residual(dtype, {3, 7, 211}, residual.values()), onto_x(dtype, {3, 7, 211}, x.values());
      cpu.backend->residual_add(onto_residual, onto_residual, x, key);
      cpu.backend->residual_add(onto_x, residual, onto_x, key);
      CHECK((same_bits(y, onto_residual) && same_bits(y, onto_x)));
      CHECK((y.guards_intact() && onto_x.guards_intact()));
    }
  }
}

TEST_CASE("element-wise operations give the same bits with any number of threads") {
  const CpuUnderTest cpu;
  const Samples samples({1, 2, 3});
  const Shape shape = {3, 20011};
  const OwnedTensor x = random_tensor(DType::fp32, shape, 13), dy = random_tensor(DType::fp32, shape, 14);
  const auto run = [&](int threads) {
    OwnedTensor gelu(DType::fp32, shape), dropped(DType::fp32, shape), sum(DType::fp32, shape);
    with_threads(threads, [&] {
      cpu.backend->activation_backward(gelu, dy, x, Activation::gelu_tanh);
      cpu.backend->dropout(dropped, x, samples.key(0.1));
      cpu.backend->residual_add(sum, dy, x, samples.key(0.1));
    });
    return std::vector<Values>{gelu.values(), dropped.values(), sum.values()};
  };
  CHECK((run(1) == run(2)));
}

TEST_CASE("element-wise operations refuse what does not belong together") {
  const CpuUnderTest cpu;
  const Samples samples({1, 2});
  const OwnedTensor x = random_tensor(DType::fp32, {2, 6}, 1);
  OwnedTensor y(DType::fp32, {2, 6}), longer(DType::fp32, {2, 7}), y64(DType::fp64, {2, 6});
  CHECK_THROWS_AS(cpu.backend->dropout(longer, x, samples.key(0.1)), Error);
  CHECK_THROWS_AS(cpu.backend->dropout(y64, x, samples.key(0.1)), Error);
  CHECK_THROWS_AS(cpu.backend->dropout(y, x, samples.key(1.0)), Error);
  CHECK_THROWS_AS(cpu.backend->residual_add(y, x, longer, samples.key(0.1)), Error);
  CHECK_THROWS_AS(cpu.backend->activation_backward(y, x, longer, Activation::relu), Error);
  DropoutKey no_ids = samples.key(0.1), odd_width = samples.key(0.1), outside = samples.key(0.1);
  no_ids.sample_ids = nullptr;
  odd_width.local_width = 4;
  odd_width.full_width = 8;
  outside.local_width = 3;
  outside.full_width = 6;
  outside.first_column = 4;
  for (const DropoutKey& key : {no_ids, odd_width, outside}) CHECK_THROWS_AS(cpu.backend->dropout(y, x, key), Error);
}
