// Pooling against loops that follow the definition one output at a time.

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/support/catch.h"
#include "tests/support/op_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

std::size_t at(const Shape& s, std::int64_t n, std::int64_t h, std::int64_t w, std::int64_t c) {
  return static_cast<std::size_t>(((n * s[1] + h) * s[2] + w) * s[3] + c);
}

struct Pooled {
  Values y, argmax;
};

Pooled naive_max_pool(const OwnedTensor& x, std::int64_t k) {
  const Shape in = x.tensor().shape(), out = {in[0], in[1] / k, in[2] / k, in[3]};
  const Values values = x.values();
  Pooled pooled{Values(static_cast<std::size_t>(out.elements())), Values(static_cast<std::size_t>(out.elements()))};
  for (std::int64_t n = 0; n < out[0]; ++n)
    for (std::int64_t p = 0; p < out[1]; ++p)
      for (std::int64_t q = 0; q < out[2]; ++q)
        for (std::int64_t c = 0; c < out[3]; ++c) {
          std::int64_t best = 0;
          for (std::int64_t i = 0; i < k * k; ++i) {
            if (values[at(in, n, p * k + i / k, q * k + i % k, c)] >
                values[at(in, n, p * k + best / k, q * k + best % k, c)])
              best = i;
          }
          pooled.y[at(out, n, p, q, c)] = values[at(in, n, p * k + best / k, q * k + best % k, c)];
          pooled.argmax[at(out, n, p, q, c)] = static_cast<double>(best);
        }
  return pooled;
}

// Average of every window, with bounds computed in floating point as the definition writes them.
Values naive_average_pool(const OwnedTensor& x, const Shape& out) {
  const Shape in = x.tensor().shape();
  const Values values = x.values();
  Values y(static_cast<std::size_t>(out.elements()));
  const auto first = [](std::int64_t i, std::int64_t count, std::int64_t extent) {
    return static_cast<std::int64_t>(std::floor(static_cast<double>(i * extent) / static_cast<double>(count)));
  };
  const auto last = [](std::int64_t i, std::int64_t count, std::int64_t extent) {
    return static_cast<std::int64_t>(std::ceil(static_cast<double>((i + 1) * extent) / static_cast<double>(count)));
  };
  for (std::int64_t n = 0; n < out[0]; ++n)
    for (std::int64_t p = 0; p < out[1]; ++p)
      for (std::int64_t q = 0; q < out[2]; ++q)
        for (std::int64_t c = 0; c < out[3]; ++c) {
          double sum = 0.0, count = 0.0;
          for (std::int64_t h = first(p, out[1], in[1]); h < last(p, out[1], in[1]); ++h)
            for (std::int64_t w = first(q, out[2], in[2]); w < last(q, out[2], in[2]); ++w, ++count)
              sum += values[at(in, n, h, w, c)];
          y[at(out, n, p, q, c)] = sum / count;
        }
  return y;
}

struct MaxPoolCase {
  Shape x;
  std::int64_t kernel;
};
const MaxPoolCase kMaxPoolCases[] = {
    {{2, 4, 4, 3}, 2}, {{1, 5, 7, 17}, 2}, {{3, 7, 6, 5}, 3}, {{2, 6, 6, 1}, 1}, {{1, 17, 16, 2}, 16}};

Shape pooled_shape(const MaxPoolCase& pool) {
  return {pool.x[0], pool.x[1] / pool.kernel, pool.x[2] / pool.kernel, pool.x[3]};
}

struct AverageCase {
  Shape x, y;
};
// Windows that divide the image, that overlap, that repeat it, and one over the whole.
const AverageCase kAverageCases[] = {{{2, 14, 14, 5}, {2, 7, 7, 5}},
                                     {{2, 5, 8, 3}, {2, 3, 3, 3}},
                                     {{3, 2, 1, 4}, {3, 7, 7, 4}},
                                     {{2, 6, 5, 33}, {2, 1, 1, 33}},
                                     {{1, 7, 7, 8}, {1, 7, 7, 8}}};

}  // namespace

TEST_CASE("max pooling takes the first maximum of each window") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const MaxPoolCase& pool : kMaxPoolCases) {
      CAPTURE(name_of(dtype), pool.x.to_string(), pool.kernel);
      OwnedTensor x = random_tensor(dtype, pool.x, 1);
      for (std::int64_t i = 0; i < x.elements(); ++i)
        x.put(i, std::round(3.0 * x.get(i)) / 4.0);  // many ties, exact in fp32
      OwnedTensor y(dtype, pooled_shape(pool)), argmax(DType::uint8, pooled_shape(pool));
      cpu.backend->max_pool_forward(y, argmax, x, pool.kernel);
      const Pooled expected = naive_max_pool(x, pool.kernel);
      CHECK((y.values() == expected.y));
      CHECK((argmax.values() == expected.argmax));
      CHECK((y.guards_intact() && argmax.guards_intact()));
    }
  }
}

TEST_CASE("max pooling sends gradients to the maxima and zero everywhere else, dropped borders included") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const MaxPoolCase& pool : kMaxPoolCases) {
      CAPTURE(name_of(dtype), pool.x.to_string(), pool.kernel);
      const Shape out = pooled_shape(pool);
      const OwnedTensor x = random_tensor(dtype, pool.x, 2), dy = random_tensor(dtype, out, 3);
      OwnedTensor y(dtype, out), argmax(DType::uint8, out), dx(dtype, pool.x);
      cpu.backend->max_pool_forward(y, argmax, x, pool.kernel);
      cpu.backend->max_pool_backward(dx, dy, argmax, pool.kernel);

      Values expected(static_cast<std::size_t>(x.elements()), 0.0);
      const Values best = naive_max_pool(x, pool.kernel).argmax, upstream = dy.values();
      for (std::int64_t n = 0; n < out[0]; ++n)
        for (std::int64_t p = 0; p < out[1]; ++p)
          for (std::int64_t q = 0; q < out[2]; ++q)
            for (std::int64_t c = 0; c < out[3]; ++c) {
              const auto i = static_cast<std::int64_t>(best[at(out, n, p, q, c)]);
              expected[at(pool.x, n, p * pool.kernel + i / pool.kernel, q * pool.kernel + i % pool.kernel, c)] =
                  upstream[at(out, n, p, q, c)];
            }
      CHECK((dx.values() == expected));
      CHECK(dx.guards_intact());
    }
  }
}

TEST_CASE("max pooling goes back through a relu and its bias with the bits of the operations one by one") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const MaxPoolCase& pool : kMaxPoolCases) {
      for (const bool accumulate : {false, true}) {
        CAPTURE(name_of(dtype), pool.x.to_string(), pool.kernel, accumulate);
        const Shape out = pooled_shape(pool), channels = {pool.x[3]};
        OwnedTensor x = random_tensor(dtype, pool.x, 2, -1.0, 0.5);  // whole windows are cut off
        cpu.backend->activation_forward(x, x, Activation::relu);
        const OwnedTensor dy = random_tensor(dtype, out, 3), start = random_tensor(dtype, channels, 4);
        OwnedTensor y(dtype, out), argmax(DType::uint8, out), dx(dtype, pool.x), expected(dtype, pool.x);
        OwnedTensor dbias(dtype, channels, start.values()), expected_dbias(dtype, channels, start.values());
        cpu.backend->max_pool_forward(y, argmax, x, pool.kernel);
        cpu.backend->max_pool_backward(expected, dy, argmax, pool.kernel);
        cpu.backend->activation_backward(expected, expected_dbias, expected, x, Activation::relu, accumulate);

        cpu.backend->max_pool_backward(dx, dbias, dy, argmax, y, pool.kernel, accumulate);
        CHECK(same_bits(dx, expected));
        CHECK(same_bits(dbias, expected_dbias));
        dx.poison();
        cpu.backend->max_pool_backward(dx, Tensor(), dy, argmax, y, pool.kernel, accumulate);
        CHECK(same_bits(dx, expected));
        CHECK((dx.guards_intact() && dbias.guards_intact()));
      }
    }
  }
  const OwnedTensor x(DType::fp32, {1, 4, 4, 3}), y(DType::fp32, {1, 2, 2, 3}), argmax(DType::uint8, {1, 2, 2, 3}),
      narrow(DType::fp32, {1, 2, 2, 2}), few(DType::fp32, {2});
  CHECK_THROWS_AS(cpu.backend->max_pool_backward(x, Tensor(), y, argmax, narrow, 2, false), Error);
  CHECK_THROWS_AS(cpu.backend->max_pool_backward(x, few, y, argmax, y, 2, false), Error);
}

TEST_CASE("max pooling's gradient is its finite difference") {
  const CpuUnderTest cpu;
  const Shape in = {2, 5, 7, 3}, out = {2, 2, 3, 3};
  OwnedTensor x = random_tensor(DType::fp64, in, 4);
  OwnedTensor y(DType::fp64, out), argmax(DType::uint8, out), dx(DType::fp64, in);
  const OwnedTensor dy = random_tensor(DType::fp64, out, 5);
  cpu.backend->max_pool_forward(y, argmax, x, 2);
  cpu.backend->max_pool_backward(dx, dy, argmax, 2);
  const auto loss = [&] {
    cpu.backend->max_pool_forward(y, argmax, x, 2);
    return dot(dy.values(), y.values());
  };
  CHECK(gradient_error(x, dx.values(), loss, 1e-7) < 1e-7);
}

TEST_CASE("a NaN in a window is its maximum") {
  const CpuUnderTest cpu;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (std::int64_t place = 0; place < 4; ++place) {
      Values values = {1.0, 2.0, 3.0, 4.0};
      values[static_cast<std::size_t>(place)] = nan;
      const OwnedTensor x(dtype, {1, 2, 2, 1}, values);
      OwnedTensor y(dtype, {1, 1, 1, 1}), argmax(DType::uint8, {1, 1, 1, 1});
      cpu.backend->max_pool_forward(y, argmax, x, 2);
      CHECK(std::isnan(y.get(0)));
      CHECK(argmax.get(0) == static_cast<double>(place));
    }
  }
}

TEST_CASE("adaptive average pooling averages the windows of the definition") {
  const CpuUnderTest cpu;
  for (const AverageCase& pool : kAverageCases) {
    CAPTURE(pool.x.to_string(), pool.y.to_string());
    const OwnedTensor x = random_tensor(DType::fp64, pool.x, 6), x32 = random_tensor(DType::fp32, pool.x, 6);
    OwnedTensor y(DType::fp64, pool.y), y32(DType::fp32, pool.y);
    cpu.backend->adaptive_avg_pool_forward(y, x);
    cpu.backend->adaptive_avg_pool_forward(y32, x32);
    CHECK(worst_error(y.values(), naive_average_pool(x, pool.y)) < 1e-15);
    CHECK(worst_error(y32, y) < 1e-6);
    CHECK((y.guards_intact() && y32.guards_intact()));
  }
}

TEST_CASE("adaptive average pooling's gradient is its finite difference") {
  const CpuUnderTest cpu;
  for (const AverageCase& pool : kAverageCases) {
    CAPTURE(pool.x.to_string(), pool.y.to_string());
    OwnedTensor x = random_tensor(DType::fp64, pool.x, 7);
    const OwnedTensor dy = random_tensor(DType::fp64, pool.y, 8), dy32 = random_tensor(DType::fp32, pool.y, 8);
    OwnedTensor y(DType::fp64, pool.y), dx(DType::fp64, pool.x), dx32(DType::fp32, pool.x);
    cpu.backend->adaptive_avg_pool_backward(dx, dy);
    cpu.backend->adaptive_avg_pool_backward(dx32, dy32);
    const auto loss = [&] {
      cpu.backend->adaptive_avg_pool_forward(y, x);
      return dot(dy.values(), y.values());
    };
    CHECK(gradient_error(x, dx.values(), loss) < 1e-7);
    CHECK(worst_error(dx32, dx) < 1e-6);
    CHECK((dx.guards_intact() && dx32.guards_intact()));
  }
}

TEST_CASE("pooling gives the same bits with any number of threads") {
  const CpuUnderTest cpu;
  const Shape in = {5, 21, 21, 19}, out = {5, 10, 10, 19}, average = {5, 4, 4, 19};
  const OwnedTensor x = random_tensor(DType::fp32, in, 9), dy = random_tensor(DType::fp32, out, 10);
  const OwnedTensor d_average = random_tensor(DType::fp32, average, 11);
  struct Results {
    OwnedTensor y{DType::fp32, {5, 10, 10, 19}}, argmax{DType::uint8, {5, 10, 10, 19}},
        dx{DType::fp32, {5, 21, 21, 19}};
    OwnedTensor mean{DType::fp32, {5, 4, 4, 19}}, d_mean{DType::fp32, {5, 21, 21, 19}};
  };
  const auto run = [&](Results& r, int threads) {
    with_threads(threads, [&] {
      cpu.backend->max_pool_forward(r.y, r.argmax, x, 2);
      cpu.backend->max_pool_backward(r.dx, dy, r.argmax, 2);
      cpu.backend->adaptive_avg_pool_forward(r.mean, x);
      cpu.backend->adaptive_avg_pool_backward(r.d_mean, d_average);
    });
  };
  Results one, two;
  run(one, 1);
  run(two, 2);
  CHECK((same_bits(one.y, two.y) && same_bits(one.argmax, two.argmax) && same_bits(one.dx, two.dx)));
  CHECK((same_bits(one.mean, two.mean) && same_bits(one.d_mean, two.d_mean)));
}

TEST_CASE("pooling refuses shapes that do not belong together") {
  const CpuUnderTest cpu;
  const OwnedTensor x = random_tensor(DType::fp32, {1, 4, 4, 2}, 1);
  OwnedTensor y(DType::fp32, {1, 2, 2, 2}), argmax(DType::uint8, {1, 2, 2, 2});
  OwnedTensor wide(DType::fp32, {1, 2, 2, 3}), wrong_type(DType::int32, {1, 2, 2, 2}), y64(DType::fp64, {1, 2, 2, 2});
  CHECK_THROWS_AS(cpu.backend->max_pool_forward(y, argmax, x, 3), Error);
  CHECK_THROWS_AS(cpu.backend->max_pool_forward(y, argmax, x, 17), Error);
  CHECK_THROWS_AS(cpu.backend->max_pool_forward(wide, argmax, x, 2), Error);
  CHECK_THROWS_AS(cpu.backend->max_pool_forward(y, wrong_type, x, 2), Error);
  CHECK_THROWS_AS(cpu.backend->max_pool_forward(y64, argmax, x, 2), Error);
  CHECK_THROWS_AS(cpu.backend->adaptive_avg_pool_forward(wide, x), Error);
}
