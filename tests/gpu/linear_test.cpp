// Matrix products of the CUDA backend against plain loops in fp64.

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/device_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

struct Extents {
  std::int64_t rows, in, out;
  std::int64_t offset;  // elements that parameters and their gradients start behind a multiple of 64 bytes
};
// Odd ones, ones around the sizes of tiles and vectors, long sums, wide outputs, and those of real models.
const Extents kExtents[] = {{1, 1, 1, 0},     {1, 5, 3, 1},     {3, 17, 65, 3},     {17, 33, 64, 1},
                            {7, 300, 31, 0},  {600, 19, 9, 1},  {5, 24, 4100, 3},   {64, 64, 192, 0},
                            {96, 64, 256, 1}, {200, 64, 96, 3}, {257, 768, 1024, 0}};

// A product rounded to the output's type, and once more where bias and activation are a pass of their own; tf32 rounds
// (or cuts) the inputs to 10 bits of mantissa.
constexpr Tolerance kProduct = {4e-6, 2e-3, 8e-3, 1e-3};
constexpr Tolerance kGelu = {6e-6, 2e-3, 1e-2, 2e-3};
// Sums in fp32 of products that are exact there when the inputs are bf16 or fp16.
constexpr Tolerance kWeightGradient = {4e-6, 2e-3, 3e-5, 3e-5};

// All tensors of one layer but the outputs.
struct Layer {
  Layer(DType type, const Extents& extents)
      : dtype(type),
        e(extents),
        x(random_twin(dtype, {e.rows, e.in}, 1)),
        w(random_twin(dtype, {e.out, e.in}, 2, -1.0, 1.0, e.offset)),
        bias(random_twin(dtype, {e.out}, 3, 0.25, 1.25, e.offset)),
        dy(random_twin(dtype, {e.rows, e.out}, 4)) {}
  Twin output() const { return Twin(dtype, {e.rows, e.out}); }

  DType dtype;
  Extents e;
  Twin x, w, bias, dy;
};

std::string text(DType dtype, const Extents& e) {
  return str(name_of(dtype), ", M ", e.rows, ", I ", e.in, ", O ", e.out, ", offset ", e.offset);
}

}  // namespace

TEST_CASE("cuda: linear forward, with or without bias, activation and saved pre-activation") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Extents& e : kExtents) {
      INFO(text(dtype, e));
      const Layer layer(dtype, e);
      Twin y = layer.output(), pre_activation = layer.output();
      const Twin none;
      const auto forward = [&](const Twin& saved, const Twin& bias, Activation activation) {
        return [&, activation](const Side& on) {
          on->linear_forward(y[on], saved[on], layer.x[on], layer.w[on], bias[on], activation);
        };
      };
      agree(dtype, {{y, "product", kProduct}}, forward(none, none, Activation::none));
      agree(dtype, {{y, "with bias", kProduct}}, forward(none, layer.bias, Activation::none));
      for (const Twin* bias : {&layer.bias, &none}) {
        const Twin residual = random_twin(dtype, {e.rows, e.out}, 5, -1.0, 1.0, e.offset);
        agree(dtype, {{y, "onto a residual", kProduct}}, [&](const Side& on) {
          on->linear_forward(y[on], Tensor(), layer.x[on], layer.w[on], (*bias)[on], Activation::none, residual[on]);
        });
      }
      agree(dtype, {{y, "relu", kProduct}}, forward(none, layer.bias, Activation::relu));
      agree(dtype, {{y, "gelu", kGelu}}, forward(none, layer.bias, Activation::gelu_tanh));
      agree(dtype, {{y, "gelu", kGelu}, {pre_activation, "pre-activation", kProduct}},
            forward(pre_activation, layer.bias, Activation::gelu_tanh));
    }
  }
}

TEST_CASE("cuda: linear backward") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Extents& e : kExtents) {
      INFO(text(dtype, e));
      const Layer layer(dtype, e);
      Twin dx(dtype, {e.rows, e.in}), dw(DType::fp32, {e.out, e.in}, e.offset), dbias(DType::fp32, {e.out}, e.offset);
      agree(dtype, {{dx, "dx", kProduct}},
            [&](const Side& on) { on->linear_backward_data(dx[on], layer.dy[on], layer.w[on]); });
      agree(dtype, {{dw, "dw", kWeightGradient}, {dbias, "dbias", kWide}},
            [&](const Side& on) { on->linear_backward_weight(dw[on], dbias[on], layer.dy[on], layer.x[on], false); });
      agree(dtype, {{dw, "dw alone", kWeightGradient}},
            [&](const Side& on) { on->linear_backward_weight(dw[on], Tensor(), layer.dy[on], layer.x[on], false); });
      dw.set(random_values(dw.elements(), 5));
      dbias.set(random_values(dbias.elements(), 6));
      agree(dtype, {{dw, "dw +=", kWeightGradient}, {dbias, "dbias +=", kWide}},
            [&](const Side& on) { on->linear_backward_weight(dw[on], dbias[on], layer.dy[on], layer.x[on], true); });
    }
  }
}

TEST_CASE("cuda: linear backward through the activation below, whose bias gets its gradient") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Extents& e : kExtents) {
      for (const Activation activation : {Activation::relu, Activation::gelu_tanh}) {
        INFO(text(dtype, e) << ", activation " << static_cast<int>(activation));
        const Layer layer(dtype, e);
        const Twin below = random_twin(dtype, {e.rows, e.in}, 7, -1.0, 3.0);
        Twin dx(dtype, {e.rows, e.in}), dbias(DType::fp32, {e.in}, e.offset);
        const auto backward = [&](const Twin& sums, bool accumulate) {
          return [&, accumulate](const Side& on) {
            on->linear_backward_data(dx[on], sums[on], layer.dy[on], layer.w[on], below[on], activation, accumulate);
          };
        };
        agree(dtype, {{dx, "dx", kGelu}}, backward(Twin(), false));
        agree(dtype, {{dx, "dx", kGelu}, {dbias, "dbias", kGelu}}, backward(dbias, false));
        dbias.set(random_values(e.in, 8));
        agree(dtype, {{dx, "dx", kGelu}, {dbias, "dbias +=", kGelu}}, backward(dbias, true));
      }
    }
  }
}

TEST_CASE("cuda: gradients of micro-batches add up in place") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    const Extents e = {48, 40, 24, 1};
    INFO(text(dtype, e));
    const Layer layer(dtype, e);
    Twin dw(DType::fp32, {e.out, e.in}, e.offset), dbias(DType::fp32, {e.out}, e.offset);
    agree(dtype, {{dw, "dw", kWeightGradient}, {dbias, "dbias", kWide}}, [&](const Side& on) {
      for (const std::int64_t first : {0, 16, 32}) {
        on->linear_backward_weight(dw[on], dbias[on], layer.dy[on].rows(first, 16), layer.x[on].rows(first, 16),
                                   first > 0);
      }
    });
  }
}

TEST_CASE("cuda: NaN comes out of every activation") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Extents& e : {Extents{2, 3, 20, 0}, Extents{16, 64, 64, 0}}) {
      INFO(text(dtype, e));
      Layer layer(dtype, e);
      Values x = layer.x.values();
      x[0] = std::nan("");
      layer.x.set(x);
      Twin y = layer.output(), pre_activation = layer.output();
      for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu_tanh}) {
        const bool keeps = activation == Activation::gelu_tanh;
        INFO("activation " << static_cast<int>(activation));
        agree(dtype, {{y, "y", kGelu}}, [&](const Side& on) {
          on->linear_forward(y[on], keeps ? pre_activation[on] : Tensor(), layer.x[on], layer.w[on], layer.bias[on],
                             activation);
        });
      }
    }
  }
}

TEST_CASE("cuda: a gradient beyond the range of fp16 comes out infinite: by this loss scaling finds it") {
  if (gpu() == nullptr) return;
  for (const Mode& mode : modes_of(DType::fp16)) {
    INFO(mode.name());
    const Side on = mode.side();
    Layer layer(DType::fp16, {64, 96, 32, 0});
    layer.dy.set(Values(64 * 32, 300.0));
    layer.w.set(Values(32 * 96, -300.0));
    const Twin dx(DType::fp16, {64, 96}), pre_activation(DType::fp16, {64, 96}, Values(64 * 96, 2.0));
    for (const Activation activation : {Activation::none, Activation::gelu_tanh}) {
      on->linear_backward_data(dx[on], Tensor(), layer.dy[on], layer.w[on],
                               activation == Activation::none ? Tensor() : pre_activation[on], activation, false);
      gpu()->wait();
      CHECK(dx.values() == Values(64 * 96, -INFINITY));
    }
  }
}

TEST_CASE("cuda: linear layers refuse tensors that do not fit each other") {
  if (gpu() == nullptr) return;
  const Layer layer(DType::fp32, {4, 8, 6, 0});
  Twin y = layer.output(), dw(DType::fp32, {6, 8});
  const Twin narrow(DType::fp32, {4, 7}), half(DType::bf16, {4, 8}), wide(DType::fp64, {4, 8});
  Backend& backend = *gpu()->deterministic;
  const Side on = {&backend, true};
  for (const Twin* x : {&narrow, &half, &wide}) {
    CHECK_THROWS_AS(backend.linear_forward(y[on], Tensor(), (*x)[on], layer.w[on], layer.bias[on], Activation::none),
                    Error);
  }
  CHECK_THROWS_AS(backend.linear_forward(y[on], Tensor(), layer.x[on], layer.w[on], narrow[on], Activation::none),
                  Error);
  for (const Twin* residual : {&narrow, &half}) {
    CHECK_THROWS_AS(backend.linear_forward(y[on], Tensor(), layer.x[on], layer.w[on], layer.bias[on], Activation::none,
                                           (*residual)[on]),
                    Error);
  }
  CHECK_THROWS_AS(backend.linear_backward_data(narrow[on], layer.dy[on], layer.w[on]), Error);
  CHECK_THROWS_AS(backend.linear_backward_weight(dw[on], narrow[on], layer.dy[on], layer.x[on], false), Error);
  gpu()->wait();
}
