// Convolutions of the CUDA backend against plain loops in fp64.

#include <algorithm>
#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/device_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

struct Case {
  Shape x;
  std::int64_t filters;
  Conv2dGeometry geometry;
  std::int64_t offset;  // elements that parameters and their gradients start behind a multiple of 64 bytes
};
// The first, a middle and a last layer of VGG made small; odd channels and images; 1 x 1; strides that leave a border
// unread; a wide kernel; rows padded otherwise than columns, as slices of images are.
const Case kCases[] = {
    {{4, 16, 16, 3}, 64, {3, 1, 1}, 0},    {{2, 8, 8, 64}, 128, {3, 1, 1}, 1}, {{4, 2, 2, 256}, 256, {3, 1, 1}, 3},
    {{2, 7, 5, 3}, 5, {3, 1, 1}, 1},       {{3, 9, 7, 16}, 24, {1, 1, 0}, 0},  {{2, 9, 10, 8}, 16, {3, 2, 1}, 3},
    {{2, 8, 9, 5}, 7, {1, 2, 0}, 1},       {{1, 11, 10, 6}, 4, {5, 1, 2}, 0},  {{4, 3, 16, 64}, 64, {3, 1, 1, 0}, 0},
    {{4, 1, 16, 64}, 64, {3, 1, 1, 2}, 1}, {{2, 9, 6, 3}, 5, {3, 1, 1, 0}, 0}, {{2, 7, 10, 16}, 8, {3, 2, 0, 2}, 3}};

// cuDNN may use fast transforms in fp32. Outputs are rounded twice where bias and relu are a pass of their own, and
// gradients of weights to the inputs' type before they are added to fp32.
constexpr Tolerance kConvolution = {1e-5, 2e-3, 8e-3, 1e-3};

// All tensors of one convolution but the outputs. Weights are scaled so that outputs are near 1.
struct Convolution {
  Convolution(DType type, const Case& of_in)
      : dtype(type),
        of(of_in),
        taps_in(of.geometry.kernel * of.geometry.kernel * of.x[3]),
        w_shape({of.filters, of.geometry.kernel, of.geometry.kernel, of.x[3]}),
        y_shape(
            {of.x[0], extent(of.x[1], of.geometry.padded_rows()), extent(of.x[2], of.geometry.padding), of.filters}),
        x(random_twin(dtype, of.x, 1)),
        w(random_twin(dtype, w_shape, 2, -3.0 / std::sqrt(taps_in), 3.0 / std::sqrt(taps_in), of.offset)),
        bias(random_twin(dtype, {of.filters}, 3, -1.0, 1.0, of.offset)),
        dy(random_twin(dtype, y_shape, 4)) {}

  std::int64_t extent(std::int64_t in, std::int64_t padding) const {
    return (in + 2 * padding - of.geometry.kernel) / of.geometry.stride + 1;
  }
  Room room(const Side& on) const {
    return Room(on, on->conv2d_workspace_bytes(of.x, w_shape, of.geometry, x[on].dtype()));
  }
  void forward(const Side& on, const Twin& y, const Twin& with_bias, Activation activation) const {
    const Room workspace = room(on);
    on->conv2d_forward(y[on], x[on], w[on], with_bias[on], of.geometry, activation, workspace);
    CHECK(workspace.guards_intact());
  }
  void backward_data(const Side& on, const Twin& dx) const {
    const Room workspace = room(on);
    on->conv2d_backward_data(dx[on], dy[on], w[on], of.geometry, workspace);
    CHECK(workspace.guards_intact());
  }
  void backward_weight(const Side& on, const Twin& dw, const Twin& dbias, bool accumulate) const {
    const Room workspace = room(on);
    on->conv2d_backward_weight(dw[on], dbias[on], dy[on], x[on], of.geometry, accumulate, workspace);
    CHECK(workspace.guards_intact());
  }

  DType dtype;
  Case of;
  std::int64_t taps_in;  // products in one sum
  Shape w_shape, y_shape;
  Twin x, w, bias, dy;
};

std::string text(DType dtype, const Case& of) {
  return str(name_of(dtype), ", x ", of.x.to_string(), ", K ", of.filters, ", kernel ", of.geometry.kernel, ", stride ",
             of.geometry.stride, ", padding ", of.geometry.padded_rows(), " x ", of.geometry.padding, ", offset ",
             of.offset);
}

}  // namespace

TEST_CASE("cuda: convolution forward, with or without bias and relu") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : kCases) {
      INFO(text(dtype, of));
      const Convolution conv(dtype, of);
      Twin y(dtype, conv.y_shape);
      agree(dtype, {{y, "bias, relu", kConvolution}},
            [&](const Side& on) { conv.forward(on, y, conv.bias, Activation::relu); });
      agree(dtype, {{y, "plain", kConvolution}},
            [&](const Side& on) { conv.forward(on, y, Twin(), Activation::none); });
    }
    const Convolution conv(dtype, kCases[0]);
    Twin y(dtype, conv.y_shape);
    agree(dtype, {{y, "bias", kConvolution}},
          [&](const Side& on) { conv.forward(on, y, conv.bias, Activation::none); });
    agree(dtype, {{y, "relu", kConvolution}}, [&](const Side& on) { conv.forward(on, y, Twin(), Activation::relu); });
  }
}

TEST_CASE("cuda: convolution backward to the data") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : kCases) {
      INFO(text(dtype, of));
      const Convolution conv(dtype, of);
      Twin dx(dtype, of.x);
      agree(dtype, {{dx, "dx", kConvolution}}, [&](const Side& on) { conv.backward_data(on, dx); });
    }
  }
}

TEST_CASE("cuda: convolution backward to the weights, which overwrites or accumulates") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : kCases) {
      INFO(text(dtype, of));
      const Convolution conv(dtype, of);
      Twin dw(DType::fp32, conv.w_shape, of.offset), dbias(DType::fp32, {of.filters}, of.offset);
      agree(dtype, {{dw, "dw", kConvolution}, {dbias, "dbias", kWide}},
            [&](const Side& on) { conv.backward_weight(on, dw, dbias, false); });
      dw.set(random_values(dw.elements(), 5));
      dbias.set(random_values(dbias.elements(), 6));
      agree(dtype, {{dw, "dw +=", kConvolution}, {dbias, "dbias +=", kWide}},
            [&](const Side& on) { conv.backward_weight(on, dw, dbias, true); });
      agree(dtype, {{dw, "dw += alone", kConvolution}},
            [&](const Side& on) { conv.backward_weight(on, dw, Twin(), true); });
    }
  }
}

TEST_CASE("cuda: what accumulates is fp32, so that small gradients are not lost on large sums") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    INFO(name_of(dtype));
    const Convolution conv(dtype, kCases[1]);
    Twin dw(DType::fp32, conv.w_shape);
    Values large = random_values(dw.elements(), 7, 3000.0, 5000.0);
    dw.set(large);
    large = dw.values();
    agree(dtype, {{dw, "dw", {2e-5, 2e-5, 2e-5, 2e-5}}},
          [&](const Side& on) { conv.backward_weight(on, dw, Twin(), true); });
    Values added = dw.values(), expected = dw.expected();
    for (std::size_t i = 0; i < large.size(); ++i) {
      added[i] -= large[i];
      expected[i] -= large[i];
    }
    CHECK(difference(added, expected) < 1e-2);
  }
}

TEST_CASE("cuda: NaN comes out of a convolution, relu or not") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    Convolution conv(dtype, kCases[1]);
    Values x = conv.x.values();
    x[5] = std::nan("");
    conv.x.set(x);
    Twin y(dtype, conv.y_shape);
    for (const Activation activation : {Activation::none, Activation::relu}) {
      INFO(name_of(dtype) << ", activation " << static_cast<int>(activation));
      conv.forward({gpu()->deterministic.get(), true}, y, conv.bias, activation);
      const Values values = y.values();
      // The first pixel's output of every filter reads the broken element.
      for (std::size_t k = 0; k < static_cast<std::size_t>(conv.of.filters); ++k) REQUIRE(std::isnan(values[k]));
    }
  }
}

TEST_CASE("cuda: a gradient of a convolution beyond the range of fp16 does not come out as a number") {
  if (gpu() == nullptr) return;
  for (const Mode& mode : modes_of(DType::fp16)) {
    INFO(mode.name());
    Convolution conv(DType::fp16, {{2, 8, 8, 64}, 128, {3, 1, 1}, 0});
    for (Twin* const tensor : {&conv.x, &conv.w, &conv.dy}) {
      tensor->set(Values(static_cast<std::size_t>(tensor->elements()), 300.0));
    }
    // Weight gradients pass through fp16 on their way into fp32.
    const Twin dx(DType::fp16, conv.of.x), dw(DType::fp32, conv.w_shape), dbias(DType::fp32, {conv.of.filters});
    conv.backward_data(mode.side(), dx);
    conv.backward_weight(mode.side(), dw, dbias, false);
    gpu()->wait();
    const auto is_number = [](double value) { return std::isfinite(value); };
    for (const Twin* const gradient : {&dx, &dw}) {
      const Values values = gradient->values();
      CHECK(std::none_of(values.begin(), values.end(), is_number));
    }
    CHECK(dbias.values() == Values(static_cast<std::size_t>(conv.of.filters), 2 * 8 * 8 * 300.0));
  }
}

TEST_CASE("cuda: convolutions refuse tensors that do not fit each other") {
  if (gpu() == nullptr) return;
  const Convolution conv(DType::bf16, kCases[1]);
  const Side on = {gpu()->deterministic.get(), true};
  const Room workspace = conv.room(on);
  Twin y(DType::bf16, conv.y_shape);
  const Twin other(DType::bf16, {2, 8, 8, 127}), floats(DType::fp32, conv.y_shape), wide(DType::fp64, conv.y_shape);
  for (const Twin* wrong : {&other, &floats, &wide}) {
    CHECK_THROWS_AS(on->conv2d_forward((*wrong)[on], conv.x[on], conv.w[on], conv.bias[on], conv.of.geometry,
                                       Activation::none, workspace),
                    Error);
    CHECK_THROWS_AS(on->conv2d_backward_data(conv.x[on], (*wrong)[on], conv.w[on], conv.of.geometry, workspace), Error);
  }
  CHECK_THROWS_AS(on->conv2d_forward(y[on], conv.x[on], conv.w[on], conv.bias[on], conv.of.geometry,
                                     Activation::gelu_tanh, workspace),
                  Error);
  gpu()->wait();
}
