// Pooling of the CUDA backend against the CPU's in fp64. Maxima are chosen, so they have to agree exactly.

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/device_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

struct MaxPoolCase {
  Shape x;
  std::int64_t kernel;
  Shape y() const { return {x[0], x[1] / kernel, x[2] / kernel, x[3]}; }
};
// VGG's, rows and columns that no window covers, windows of one and of 256 pixels, odd numbers of channels.
const MaxPoolCase kMaxPoolCases[] = {
    {{2, 4, 4, 3}, 2},    {{3, 16, 16, 64}, 2}, {{1, 5, 7, 17}, 2}, {{3, 7, 6, 5}, 3},      {{2, 6, 6, 1}, 1},
    {{1, 17, 16, 2}, 16}, {{5, 2, 2, 512}, 2},  {{2, 9, 5, 24}, 2}, {{16, 28, 28, 128}, 2}, {{2, 6, 9, 40}, 3}};

struct AverageCase {
  Shape x, y;
};
// Windows that divide the image, that overlap, that repeat it (VGG on small images), one over the whole, and none.
const AverageCase kAverageCases[] = {{{2, 14, 14, 5}, {2, 7, 7, 5}}, {{2, 5, 8, 3}, {2, 3, 3, 3}},
                                     {{3, 2, 1, 4}, {3, 7, 7, 4}},   {{4, 1, 1, 512}, {4, 7, 7, 512}},
                                     {{2, 6, 5, 33}, {2, 1, 1, 33}}, {{1, 7, 7, 8}, {1, 7, 7, 8}},
                                     {{3, 10, 9, 64}, {3, 7, 7, 64}}};

// Quarters, so that windows have many ties and every element type holds the values exactly.
Values with_ties(const Shape& shape) {
  Values values = random_values(shape.elements(), 1);
  for (double& value : values) value = std::round(3.0 * value) / 4.0;
  return values;
}

}  // namespace

TEST_CASE("cuda: max pooling takes the first maximum of each window, and sends gradients there") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const MaxPoolCase& of : kMaxPoolCases) {
      for (const bool ties : {true, false}) {
        INFO(name_of(dtype) << ", x " << of.x.to_string() << ", kernel " << of.kernel << ", ties " << ties);
        const Twin x(dtype, of.x, ties ? with_ties(of.x) : random_values(of.x.elements(), 2));
        const Twin dy = random_twin(dtype, of.y(), 3);
        Twin y(dtype, of.y()), argmax(DType::uint8, of.y()), dx(dtype, of.x);
        agree(dtype, {{y, "y", kExact}, {argmax, "argmax", kExact}, {dx, "dx", kExact}}, [&](const Side& on) {
          on->max_pool_forward(y[on], argmax[on], x[on], of.kernel);
          on->max_pool_backward(dx[on], dy[on], argmax[on], of.kernel);
        });
      }
    }
  }
}

TEST_CASE("cuda: max pooling goes back through a relu and its bias") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const MaxPoolCase& of : kMaxPoolCases) {
      for (const std::int64_t offset : {0, 1}) {
        INFO(name_of(dtype) << ", x " << of.x.to_string() << ", kernel " << of.kernel << ", offset " << offset);
        Values values = random_values(of.x.elements(), 2, -1.0, 0.5);  // whole windows are cut off
        for (double& value : values) value = std::max(value, 0.0);
        const Twin x(dtype, of.x, values, offset), dy = random_twin(dtype, of.y(), 3, 0.25, 1.25, offset);
        Twin y(dtype, of.y(), offset), argmax(DType::uint8, of.y()), dx(dtype, of.x, offset);
        Twin dbias(DType::fp32, {of.x[3]}, offset);
        const auto forward = [&](const Side& on) { on->max_pool_forward(y[on], argmax[on], x[on], of.kernel); };
        agree(dtype, {{y, "y", kExact}, {dx, "dx", kExact}, {dbias, "dbias", kWide}}, [&](const Side& on) {
          forward(on);
          on->max_pool_backward(dx[on], dbias[on], dy[on], argmax[on], y[on], of.kernel, false);
        });
        agree(dtype, {{y, "y", kExact}, {dx, "dx alone", kExact}}, [&](const Side& on) {
          forward(on);
          on->max_pool_backward(dx[on], Tensor(), dy[on], argmax[on], y[on], of.kernel, false);
        });
        dbias.set(random_values(of.x[3], 4));
        agree(dtype, {{y, "y", kExact}, {dx, "dx", kExact}, {dbias, "dbias +=", kWide}}, [&](const Side& on) {
          forward(on);
          on->max_pool_backward(dx[on], dbias[on], dy[on], argmax[on], y[on], of.kernel, true);
        });
      }
    }
  }
}

TEST_CASE("cuda: a NaN wins every window that it stands in, minus infinity none") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const std::int64_t channels : {3, 64}) {
      INFO(name_of(dtype) << ", " << channels << " channels");
      const MaxPoolCase of = {{1, 4, 4, channels}, 2};
      Values values = with_ties(of.x);
      values[0] = values[static_cast<std::size_t>(7 * channels)] = std::nan("");
      for (const std::int64_t pixel : {8, 9, 12, 13}) {
        values[static_cast<std::size_t>(pixel * channels + 1)] = -std::numeric_limits<double>::infinity();
      }
      const Twin x(dtype, of.x, values);
      Twin y(dtype, of.y()), argmax(DType::uint8, of.y());
      agree(dtype, {{y, "y", kExact}, {argmax, "argmax", kExact}},
            [&](const Side& on) { on->max_pool_forward(y[on], argmax[on], x[on], of.kernel); });
    }
  }
}

TEST_CASE("cuda: adaptive average pooling, forward and backward") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const AverageCase& of : kAverageCases) {
      INFO(name_of(dtype) << ", x " << of.x.to_string() << ", y " << of.y.to_string());
      const Twin x = random_twin(dtype, of.x, 4), dy = random_twin(dtype, of.y, 5);
      Twin y(dtype, of.y), dx(dtype, of.x);
      agree(dtype, {{y, "y", kRounded}}, [&](const Side& on) { on->adaptive_avg_pool_forward(y[on], x[on]); });
      agree(dtype, {{dx, "dx", kRounded}}, [&](const Side& on) { on->adaptive_avg_pool_backward(dx[on], dy[on]); });
    }
  }
}

TEST_CASE("cuda: pooling refuses tensors that do not fit each other") {
  if (gpu() == nullptr) return;
  const Side on = {gpu()->deterministic.get(), true};
  const Twin x(DType::bf16, {2, 8, 8, 3}), y(DType::bf16, {2, 4, 4, 3}), argmax(DType::uint8, {2, 4, 4, 3}),
      other(DType::bf16, {2, 4, 3, 3}), few(DType::uint8, {2, 4, 4, 2}), samples(DType::bf16, {1, 4, 4, 3}),
      doubles(DType::fp64, {2, 4, 4, 3}), half_doubles(DType::fp64, {2, 2, 2, 3});
  CHECK_THROWS_AS(on->max_pool_forward(other[on], argmax[on], x[on], 2), Error);
  CHECK_THROWS_AS(on->max_pool_forward(y[on], few[on], x[on], 2), Error);
  CHECK_THROWS_AS(on->max_pool_forward(y[on], argmax[on], x[on], 3), Error);
  CHECK_THROWS_AS(on->max_pool_backward(x[on], other[on], argmax[on], 2), Error);
  CHECK_THROWS_AS(on->max_pool_backward(x[on], Tensor(), y[on], argmax[on], other[on], 2, false), Error);
  CHECK_THROWS_AS(on->max_pool_backward(x[on], y[on], y[on], argmax[on], y[on], 2, false), Error);
  CHECK_THROWS_AS(on->adaptive_avg_pool_forward(samples[on], x[on]), Error);
  CHECK_THROWS_AS(on->adaptive_avg_pool_forward(half_doubles[on], doubles[on]), Error);
  CHECK_THROWS_AS(on->adaptive_avg_pool_backward(x[on], samples[on]), Error);
  gpu()->wait();
}
