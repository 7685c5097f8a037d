// Operations on flat ranges.

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/op_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

const std::int64_t kSizes[] = {1, 5, 31, 4096, 4097, 50001};

Values sums_of_squares(Backend& backend, const Tensor& x, const std::vector<UpdateSegment>& segments) {
  const auto count = static_cast<std::int64_t>(segments.size());
  OwnedTensor totals(DType::fp64, {count});
  backend.sum_of_squares(totals, x, segments.data(), count);
  CHECK(totals.guards_intact());
  return totals.values();
}

double naive_sum_of_squares(const OwnedTensor& x, const UpdateSegment& segment) {
  long double sum = 0.0L;
  for (std::int64_t i = segment.offset; i < segment.offset + segment.count; ++i) {
    sum += static_cast<long double>(x.get(i)) * static_cast<long double>(x.get(i));
  }
  return static_cast<double>(sum);
}

}  // namespace

TEST_CASE("fill sets every element, of every type") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32, DType::int64, DType::int32, DType::uint8}) {
    for (const std::int64_t n : kSizes) {
      OwnedTensor x(dtype, {n});
      cpu.backend->fill(x, 3.0);
      CHECK((x.values() == Values(static_cast<std::size_t>(n), 3.0)));
      CHECK(x.guards_intact());
    }
  }
  OwnedTensor x(DType::fp64, {3});
  cpu.backend->fill(x, -0.1);
  CHECK((x.values() == Values(3, -0.1)));
}

TEST_CASE("copy keeps bits between equal types and rounds once between others") {
  const CpuUnderTest cpu;
  for (const std::int64_t n : kSizes) {
    const OwnedTensor x = random_tensor(DType::fp64, {n}, 1);
    OwnedTensor same(DType::fp64, {n}), narrow(DType::fp32, {n}), back(DType::fp64, {n});
    cpu.backend->copy(same, x);
    CHECK(same_bits(same, x));
    cpu.backend->copy(narrow, x);
    cpu.backend->copy(back, narrow);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const bool rounded_once =
          narrow.get(i) == static_cast<double>(static_cast<float>(x.get(i))) && back.get(i) == narrow.get(i);
      wrong += rounded_once ? 0 : 1;
    }
    CHECK(wrong == 0);
    CHECK((same.guards_intact() && narrow.guards_intact() && back.guards_intact()));
  }
  const OwnedTensor integers(DType::int32, {4}, {-7.0, 0.0, 3.0, 2000000000.0});
  OwnedTensor as_float(DType::fp32, {2, 2}), wide(DType::int64, {4});
  cpu.backend->copy(as_float, integers);
  cpu.backend->copy(wide, integers);
  CHECK((as_float.values() == integers.values()));
  CHECK((wide.values() == integers.values()));

  OwnedTensor x(DType::fp32, {5});  // onto itself, NaN and all
  const OwnedTensor untouched(DType::fp32, {5});
  cpu.backend->copy(x, x);
  CHECK(same_bits(x, untouched));
  CHECK_THROWS_AS(cpu.backend->copy(x, integers), Error);
}

TEST_CASE("copy_block moves columns of one matrix into another and touches nothing else") {
  const CpuUnderTest cpu;
  struct Block {
    std::int64_t rows, columns, x_width, x_first, y_width, y_first;
  };
  for (const Block& block : {Block{3, 2, 5, 1, 4, 2}, Block{1, 7, 7, 0, 7, 0}, Block{4, 0, 3, 1, 2, 1},
                             Block{300, 200, 501, 300, 200, 0}, Block{2, 3, 3, 0, 9, 6}}) {
    INFO(block.rows << " x " << block.columns);
    const OwnedTensor x = random_tensor(DType::fp32, {block.rows, block.x_width}, 1);
    OwnedTensor y = random_tensor(DType::fp32, {block.rows, block.y_width}, 2);
    Values expected = y.values();
    for (std::int64_t r = 0; r < block.rows; ++r) {
      for (std::int64_t c = 0; c < block.columns; ++c) {
        expected[static_cast<std::size_t>(r * block.y_width + block.y_first + c)] =
            x.get(r * block.x_width + block.x_first + c);
      }
    }
    const auto from = [](const Tensor& matrix, std::int64_t first) {
      return matrix.range(first, matrix.elements() - first);
    };
    cpu.backend->copy_block(from(y, block.y_first), block.y_width, from(x, block.x_first), block.x_width, block.rows,
                            block.columns);
    CHECK((y.values() == expected));
    CHECK(y.guards_intact());
  }
  OwnedTensor y(DType::fp32, {4, 3});
  const OwnedTensor x = random_tensor(DType::fp32, {4, 3}, 1), wide = random_tensor(DType::fp64, {4, 3}, 1);
  CHECK_THROWS_AS(cpu.backend->copy_block(y, 3, wide, 3, 4, 3), Error);
  CHECK_THROWS_AS(cpu.backend->copy_block(y, 2, x, 3, 4, 3), Error);
  CHECK_THROWS_AS(cpu.backend->copy_block(y, 3, x, 4, 4, 3), Error);
  CHECK_THROWS_AS(cpu.backend->copy_block(y, 3, x, 3, 5, 3), Error);
}

TEST_CASE("add and scale") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const std::int64_t n : kSizes) {
      const OwnedTensor x = random_tensor(dtype, {n}, 2);
      OwnedTensor y = random_tensor(dtype, {n}, 3);
      Values expected = y.values();
      for (std::int64_t i = 0; i < n; ++i) expected[static_cast<std::size_t>(i)] += -0.75 * x.get(i);
      cpu.backend->add(y, x, -0.75);
      CHECK((worst_error(y.values(), expected) < (dtype == DType::fp64 ? 1e-15 : 1e-6)));
      expected = y.values();
      for (double& value : expected) value *= 0.5;
      cpu.backend->scale(y, 0.5);
      CHECK((y.values() == expected));
      cpu.backend->add(y, y, 1.0);  // y may be x
      for (double& value : expected) value *= 2.0;
      CHECK((y.values() == expected));
      CHECK(y.guards_intact());
    }
  }
  OwnedTensor y(DType::fp32, {4});
  CHECK_THROWS_AS(cpu.backend->add(y, random_tensor(DType::fp64, {4}, 1), 1.0), Error);
  CHECK_THROWS_AS(cpu.backend->add(y, random_tensor(DType::fp32, {5}, 1), 1.0), Error);
  OwnedTensor integers(DType::int32, {4});
  CHECK_THROWS_AS(cpu.backend->scale(integers, 2.0), Error);
}

TEST_CASE("accumulate_sum is one running sum in index order: calls may be cut anywhere") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    OwnedTensor x = random_tensor(dtype, {1001}, 4);
    for (std::int64_t i = 0; i < 1001; ++i) x.put(i, x.get(i) / 3.0 + 1e5 * x.get(i % 7));  // sums that have to round
    double expected = 0.3;
    for (const double value : x.values()) expected += value;
    const Tensor& all = x;
    OwnedTensor whole(DType::fp64, {1}, {0.3}), parts(DType::fp64, {1}, {0.3});
    cpu.backend->accumulate_sum(whole, x);
    for (std::int64_t first = 0; first < 1001; first += 143) cpu.backend->accumulate_sum(parts, all.range(first, 143));
    CHECK(whole.get(0) == expected);
    CHECK(parts.get(0) == expected);
  }
  OwnedTensor narrow(DType::fp32, {1}), two(DType::fp64, {2});
  CHECK_THROWS_AS(cpu.backend->accumulate_sum(narrow, random_tensor(DType::fp32, {3}, 1)), Error);
  CHECK_THROWS_AS(cpu.backend->accumulate_sum(two, random_tensor(DType::fp32, {3}, 1)), Error);
}

TEST_CASE("sum_of_squares gives one fp64 sum for each segment") {
  const CpuUnderTest cpu;
  const std::vector<UpdateSegment> segments = {{0, 1},         {1, 0},         {1, 30}, {31, 16384},
                                               {16415, 16385}, {40000, 40001}, {3, 5}};
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    const OwnedTensor x = random_tensor(dtype, {80001}, 5);
    const Values totals = sums_of_squares(*cpu.backend, x, segments);
    for (std::size_t s = 0; s < segments.size(); ++s) {
      CAPTURE(name_of(dtype), s);
      CHECK(totals[s] == Approx(naive_sum_of_squares(x, segments[s])).epsilon(1e-14).margin(0.0));
    }
  }
}

TEST_CASE("sum_of_squares of a segment depends neither on its place, nor its company, nor the number of threads") {
  const CpuUnderTest cpu;
  const OwnedTensor x = random_tensor(DType::fp32, {70001}, 6);
  OwnedTensor shifted(DType::fp32, {70001});
  shifted.put(0, 5.0);
  for (std::int64_t i = 1; i < 70001; ++i) shifted.put(i, x.get(i - 1));
  const double alone = sums_of_squares(*cpu.backend, x, {{0, 70000}})[0];
  CHECK(sums_of_squares(*cpu.backend, shifted, {{0, 1}, {1, 70000}})[1] == alone);
  for (const int threads : {1, 2, 3}) {
    with_threads(threads, [&] { CHECK(sums_of_squares(*cpu.backend, x, {{0, 70000}})[0] == alone); });
  }

  // More segments than are worked on at a time.
  std::vector<UpdateSegment> many;
  for (std::int64_t i = 0; i < 1400; ++i) many.push_back({i * 50, 50});
  const Values totals = sums_of_squares(*cpu.backend, x, many);
  for (const std::size_t s : {0u, 511u, 512u, 1399u})
    CHECK(totals[s] == sums_of_squares(*cpu.backend, x, {many[s]})[0]);
}

TEST_CASE("sum_of_squares carries overflow of fp32 and NaN, and refuses segments outside the range") {
  const CpuUnderTest cpu;
  OwnedTensor x(DType::fp32, {3}, {1e30, 1e30, 2.0});
  CHECK(sums_of_squares(*cpu.backend, x, {{0, 2}})[0] == Approx(2e60));
  x.poison();
  CHECK(std::isnan(sums_of_squares(*cpu.backend, x, {{0, 3}})[0]));
  for (const UpdateSegment& segment : {UpdateSegment{0, 4}, UpdateSegment{-1, 2}, UpdateSegment{2, -1}}) {
    CHECK_THROWS_AS(sums_of_squares(*cpu.backend, x, {segment}), Error);
  }
}

TEST_CASE("flat ranges come out the same with any number of threads") {
  const CpuUnderTest cpu;
  const OwnedTensor x = random_tensor(DType::fp32, {50001}, 7);
  const auto run = [&](int threads) {
    OwnedTensor y = random_tensor(DType::fp32, {50001}, 8), wide(DType::fp64, {50001});
    with_threads(threads, [&] {
      cpu.backend->add(y, x, 0.3);
      cpu.backend->scale(y, 1.7);
      cpu.backend->copy(wide, y);
    });
    return wide.values();
  };
  CHECK((run(1) == run(2)));
}
