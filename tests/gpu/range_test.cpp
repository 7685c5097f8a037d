// Operations of the CUDA backend on flat ranges, and the tests' own conversions that all comparisons rest on.

#include <cmath>
#include <limits>

#include "tests/support/catch.h"
#include "tests/support/device_testing.h"
#include "tests/support/element_codec.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

struct Range {
  std::int64_t elements;
  std::int64_t x_offset, y_offset;  // elements behind a multiple of 64 bytes
};
const Range kRanges[] = {{1, 0, 0}, {5, 1, 1}, {31, 3, 0}, {4096, 0, 0}, {4097, 1, 3}, {50001, 3, 3}, {1 << 20, 0, 1}};

// Everything that a rounding can do wrong: ties either way, carries, overflow, tiny numbers, NaN.
Values special_values() {
  const double infinity = std::numeric_limits<double>::infinity();
  Values values = {0.0, -0.0, 1.0, infinity, -infinity, std::nan(""), 65504.0, 65519.0, 65520.0, 3.3e38, 3.4e38, 1e-45};
  for (const double unit : {1.0 / 128.0, 1.0 / 1024.0}) {  // of the last place of bf16 and fp16
    for (const double steps : {0.5, 1.5, 2.5, 0.49999, 0.50001, 127.5, 1023.5}) {
      values.push_back(1.0 + steps * unit);
      values.push_back(-(1.0 + steps * unit));
      values.push_back((1.0 + steps * unit) * 1e-5);  // below fp16's normal numbers
      values.push_back(std::ldexp(steps, -25));
    }
  }
  return values;
}

std::string text(const Range& range) {
  return str(range.elements, " elements, offsets ", range.x_offset, " and ", range.y_offset);
}

Values sums_of_squares(const Side& on, const Tensor& x, const std::vector<UpdateSegment>& segments) {
  const auto count = static_cast<std::int64_t>(segments.size());
  const Twin totals(DType::fp64, {count});
  on->sum_of_squares(totals[on], x, segments.data(), count);
  if (on.on_gpu) gpu()->wait();
  CHECK(totals.guards_intact());
  return on.on_gpu ? totals.values() : totals.expected();
}

}  // namespace

TEST_CASE("the tests' bf16 and fp16: every number survives, and numbers between two go to the nearer or the even one") {
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    std::int64_t wrong = 0;
    const auto largest = static_cast<int>(HalfFormat(dtype).infinity());
    for (int bits = 0; bits <= largest; ++bits) {
      const auto of = [&](int pattern) { return half_value(static_cast<std::uint16_t>(pattern), dtype); };
      const auto back = [&](double value) { return static_cast<int>(half_bits(value, dtype)); };
      wrong += back(of(bits)) == bits && back(-of(bits)) == (bits | 0x8000) ? 0 : 1;
      if (bits + 1 >= largest) continue;
      const double between = 0.5 * (of(bits) + of(bits + 1));
      wrong += back(between) == (bits % 2 == 0 ? bits : bits + 1) ? 0 : 1;
      wrong += back(std::nextafter(between, 0.0)) == bits ? 0 : 1;
      wrong += back(std::nextafter(between, 1e300)) == bits + 1 ? 0 : 1;
    }
    CHECK(wrong == 0);
    CHECK(std::isnan(rounded_to(dtype, std::nan(""))));
  }
  CHECK(half_bits(1.0, DType::bf16) == 0x3F80);
  CHECK(half_bits(-2.0, DType::fp16) == 0xC000);
  CHECK(half_bits(65519.999, DType::fp16) == 0x7BFF);
  CHECK(half_bits(65520.0, DType::fp16) == 0x7C00);
}

TEST_CASE("cuda: fill sets every element of every type") {
  if (gpu() == nullptr) return;
  for (const DType dtype :
       {DType::fp64, DType::fp32, DType::bf16, DType::fp16, DType::int64, DType::int32, DType::uint8}) {
    for (const Range& range : kRanges) {
      INFO(name_of(dtype) << ", " << text(range));
      Twin x(dtype, {range.elements}, range.x_offset);
      for (const double value : {0.0, 3.0}) {
        agree(DType::fp32, {{x, "x", kExact}}, [&](const Side& on) { on->fill(x[on], value); });
      }
    }
  }
}

TEST_CASE("cuda: copy keeps bits between equal types and rounds once between others") {
  if (gpu() == nullptr) return;
  const Side on = {gpu()->deterministic.get(), true};
  for (const DType from : kComputeTypes) {
    for (const DType to : kComputeTypes) {
      for (const Range& range : kRanges) {
        INFO(name_of(from) << " to " << name_of(to) << ", " << text(range));
        Values values = random_values(range.elements, 1, -2.0, 2.0);
        const Values special = special_values();
        for (std::size_t i = 0; i < std::min(values.size(), special.size()); ++i) values[i] = special[i];
        const Twin x(from, {range.elements}, values, range.x_offset), y(to, {range.elements}, range.y_offset);
        on->copy(y[on], x[on]);
        Values expected = x.values();
        for (double& value : expected) value = rounded_to(to, value);
        CHECK(difference(y.values(), expected) == 0.0);
        CHECK(y.guards_intact());
        if (from == to) CHECK((y.bytes() == x.bytes()));
      }
    }
  }
  for (const DType dtype : {DType::fp64, DType::int64, DType::int32, DType::uint8}) {
    const Twin x = random_twin(dtype, {4099}, 2, 0.0, 200.0, 1), y(dtype, {4099}, 3);
    on->copy(y[on], x[on]);
    CHECK((y.bytes() == x.bytes()));
    CHECK(y.guards_intact());
    CHECK_THROWS_AS(on->copy(y[on], x[on].range(0, 4098)), Error);
  }
}

TEST_CASE("cuda: copy_block moves columns of one matrix into another and touches nothing else") {
  if (gpu() == nullptr) return;
  struct Block {
    std::int64_t rows, columns, x_width, x_first, y_width, y_first;
  };
  for (const DType dtype : kComputeTypes) {
    for (const Block& block : {Block{3, 2, 5, 1, 4, 2}, Block{1, 7, 7, 0, 7, 0}, Block{4, 0, 3, 1, 2, 1},
                               Block{300, 200, 501, 300, 200, 0}, Block{2, 3, 3, 0, 9, 6}}) {
      INFO(name_of(dtype) << ", " << block.rows << " x " << block.columns);
      const Twin x = random_twin(dtype, {block.rows, block.x_width}, 8);
      Twin y = random_twin(dtype, {block.rows, block.y_width}, 9);
      agree(dtype, {{y, "y", kExact}}, [&](const Side& on) {
        const auto from = [](const Tensor& matrix, std::int64_t first) {
          return matrix.range(first, matrix.elements() - first);
        };
        on->copy_block(from(y[on], block.y_first), block.y_width, from(x[on], block.x_first), block.x_width, block.rows,
                       block.columns);
      });
    }
  }
}

TEST_CASE("cuda: add and scale") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Range& range : kRanges) {
      INFO(name_of(dtype) << ", " << text(range));
      const Twin x = random_twin(dtype, {range.elements}, 3, -1.0, 1.0, range.x_offset);
      Twin y = random_twin(dtype, {range.elements}, 4, -1.0, 1.0, range.y_offset);
      agree(dtype, {{y, "y += x", kRounded}}, [&](const Side& on) { on->add(y[on], x[on], 1.0); });
      agree(dtype, {{y, "y -= 0.7 x", kRounded}}, [&](const Side& on) { on->add(y[on], x[on], -0.7); });
      agree(dtype, {{y, "y += y", kExact}}, [&](const Side& on) { on->add(y[on], y[on], 1.0); });
      agree(dtype, {{y, "y / 2", kRounded}}, [&](const Side& on) { on->scale(y[on], 0.5); });
      agree(dtype, {{y, "1.7 y", kRounded}}, [&](const Side& on) { on->scale(y[on], 1.7); });
    }
  }
  const Side on = {gpu()->deterministic.get(), true};
  const Twin y(DType::fp32, {4}), longer(DType::fp32, {5}), integers(DType::int32, {4});
  CHECK_THROWS_AS(on->add(y[on], longer[on], 1.0), Error);
  CHECK_THROWS_AS(on->scale(integers[on], 2.0), Error);
}

TEST_CASE("cuda: accumulate_sum adds to what is there") {
  if (gpu() == nullptr) return;
  constexpr Tolerance kDouble = {1e-12, 1e-12, 1e-12, 1e-12};
  for (const Range& range : kRanges) {
    INFO(text(range));
    const Twin x = random_twin(DType::fp32, {range.elements}, 5, 0.0, 3.0, range.x_offset);
    Twin total(DType::fp64, {1}, Values{0.3});
    agree(DType::fp32, {{total, "total", kDouble}}, [&](const Side& on) { on->accumulate_sum(total[on], x[on]); });
    agree(DType::fp32, {{total, "three times", kDouble}}, [&](const Side& on) {
      for (int time = 0; time < 3; ++time) on->accumulate_sum(total[on], x[on]);
    });
  }
  const Side on = {gpu()->deterministic.get(), true};
  const Twin x(DType::fp32, {3}), narrow(DType::fp32, {1}), two(DType::fp64, {2});
  CHECK_THROWS_AS(on->accumulate_sum(narrow[on], x[on]), Error);
  CHECK_THROWS_AS(on->accumulate_sum(two[on], x[on]), Error);
}

TEST_CASE("cuda: sum_of_squares gives one fp64 sum for each segment") {
  if (gpu() == nullptr) return;
  const std::vector<UpdateSegment> segments = {{0, 1},         {1, 0},         {1, 30}, {31, 16384},
                                               {16415, 16385}, {40000, 40001}, {3, 5},  {100000, 900001}};
  std::vector<UpdateSegment> many;
  for (std::int64_t i = 0; i < 1400; ++i) many.push_back({i * 50, 50});
  for (const std::int64_t offset : {0, 1, 2, 3}) {
    const Twin x = random_twin(DType::fp32, {1000001}, 6, -1.0, 1.0, offset);
    for (const std::vector<UpdateSegment>& of : {segments, many}) {
      const Values expected = sums_of_squares({gpu()->oracle.get(), false}, x[{nullptr, false}], of);
      for (const Mode& mode : modes_of(DType::fp32)) {
        const Values sums = sums_of_squares(mode.side(), x[mode.side()], of);
        for (std::size_t s = 0; s < expected.size(); ++s) {
          INFO(mode.name() << ", offset " << offset << ", segment " << s);
          CHECK(sums[s] == Approx(expected[s]).epsilon(1e-13).margin(0.0));
        }
      }
    }
  }
}

TEST_CASE("cuda: sum_of_squares of a segment depends neither on its place nor on its company") {
  if (gpu() == nullptr) return;
  const Side on = {gpu()->deterministic.get(), true};
  const Values values = random_values(70000, 7);
  const Twin x(DType::fp32, {70000}, values);
  const double alone = sums_of_squares(on, x[on], {{0, 70000}})[0];
  for (const std::int64_t shift : {1, 2, 3, 17, 4096}) {
    Values shifted(static_cast<std::size_t>(shift), 5.0);
    shifted.insert(shifted.end(), values.begin(), values.end());
    const Twin moved(DType::fp32, {70000 + shift}, shifted);
    CHECK(sums_of_squares(on, moved[on], {{0, shift}, {shift, 70000}})[1] == alone);
    CHECK(sums_of_squares(on, moved[on].range(shift, 70000), {{0, 70000}, {5, 3}})[0] == alone);
  }
}

TEST_CASE("cuda: sum_of_squares reads the segments anew, carries NaN, and refuses segments outside the range") {
  if (gpu() == nullptr) return;
  const Side on = {gpu()->deterministic.get(), true};
  Twin x(DType::fp32, {3}, {1e30, 1e30, 2.0});
  std::vector<UpdateSegment> segments = {{0, 2}};
  CHECK(sums_of_squares(on, x[on], segments)[0] == Approx(2e60));
  segments[0] = {2, 1};  // at the same address
  CHECK(sums_of_squares(on, x[on], segments)[0] == 4.0);
  x.set({1.0, std::nan(""), 2.0});
  CHECK(std::isnan(sums_of_squares(on, x[on], {{0, 3}})[0]));
  for (const UpdateSegment& segment : {UpdateSegment{0, 4}, UpdateSegment{-1, 2}, UpdateSegment{2, -1}}) {
    CHECK_THROWS_AS(sums_of_squares(on, x[on], {segment}), Error);
  }
}
