// Convolutions against the seven loops of their definition, their gradients against finite differences, fp32 against
// fp64.

#include <algorithm>
#include <cmath>
#include <optional>

#include "tests/support/catch.h"
#include "tests/support/op_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

struct Case {
  std::int64_t n, h, w, c, k;
  Conv2dGeometry geometry = {};
};
// Few channels and many, maps down to one pixel, strides, kernels of 1, 2 and 5, padding beyond the kernel's half, sums
// over more pixels and channels than one block takes, and rows padded otherwise than columns.
const Case kCases[] = {
    {2, 5, 7, 3, 5},
    {1, 1, 1, 1, 1},
    {3, 1, 1, 20, 7},
    {2, 2, 2, 33, 70},
    {3, 4, 4, 16, 17},
    {2, 6, 5, 17, 6, {1, 1, 0}},
    {2, 9, 8, 5, 9, {3, 2, 1}},
    {2, 9, 8, 30, 9, {3, 2, 1}},
    {1, 8, 8, 24, 10, {2, 2, 0}},
    {1, 7, 7, 20, 4, {5, 3, 2}},
    {2, 3, 3, 18, 5, {3, 1, 3}},
    {2, 3, 3, 4, 5, {3, 1, 3}},
    {5, 6, 6, 64, 64},
    {3, 4, 4, 32, 48},
    {2, 8, 8, 32, 48, {3, 2, 1}},
    {1, 20, 40, 20, 12},
    {1, 20, 60, 4, 8},
    {1, 3, 600, 3, 4},
    {1, 2, 2, 300, 520},
    {2, 7, 5, 3, 5, {3, 1, 1, 0}},
    {2, 3, 6, 20, 7, {3, 1, 1, 0}},
    {2, 1, 6, 18, 9, {3, 1, 1, 2}},
    {3, 8, 8, 32, 16, {3, 1, 1, 2}},
    {2, 6, 7, 4, 5, {3, 2, 0, 3}},
    {1, 5, 7, 20, 4, {5, 1, 2, 4}},
};
// Relative to the largest value: sums of up to 2700 products of numbers up to 1.
constexpr double kFloatError = 3e-6;

// oneDNN may split the sums of its fp32 convolutions differently for other threads or batches. All else is bit-equal.
bool same_up_to_split(const OwnedTensor& a, const OwnedTensor& b) {
  if (PDL_WITH_ONEDNN && a.tensor().dtype() == DType::fp32) return worst_error(a, b) < kFloatError;
  return same_bits(a, b);
}

/// All tensors of one convolution. Equal seeds give equal values in both types, up to rounding.
struct Convolution {
  Convolution(Backend& backend, DType dtype, const Case& of)
      : geometry(of.geometry),
        x(random_tensor(dtype, {of.n, of.h, of.w, of.c}, 1)),
        w(random_tensor(dtype, {of.k, geometry.kernel, geometry.kernel, of.c}, 2)),
        bias(random_tensor(dtype, {of.k}, 3)),
        y(dtype, output_shape(of)),
        dy(random_tensor(dtype, output_shape(of), 4)),
        dx(dtype, x.tensor().shape()),
        dw(dtype, w.tensor().shape()),
        dbias(dtype, {of.k}),
        workspace(DType::uint8,
                  {std::max<std::int64_t>(
                      1, backend.conv2d_workspace_bytes(x.tensor().shape(), w.tensor().shape(), geometry, dtype))}) {}

  static Shape output_shape(const Case& of) {
    const auto extent = [&](std::int64_t in, std::int64_t padding) {
      return (in + 2 * padding - of.geometry.kernel) / of.geometry.stride + 1;
    };
    return {of.n, extent(of.h, of.geometry.padded_rows()), extent(of.w, of.geometry.padding), of.k};
  }
  void forward(Backend& backend, Activation activation = Activation::none, bool with_bias = true) {
    y.poison();
    workspace.poison();
    backend.conv2d_forward(y, x, w, with_bias ? bias.tensor() : Tensor(), geometry, activation, workspace);
  }
  void backward(Backend& backend) {
    workspace.poison();
    backend.conv2d_backward_data(dx, dy, w, geometry, workspace);
    workspace.poison();
    backend.conv2d_backward_weight(dw, dbias, dy, x, geometry, false, workspace);
  }
  bool guards_intact() const {
    return y.guards_intact() && dx.guards_intact() && dw.guards_intact() && dbias.guards_intact() &&
           workspace.guards_intact();
  }

  Conv2dGeometry geometry;
  OwnedTensor x, w, bias, y, dy, dx, dw, dbias, workspace;
};

// The definition, for output element (n, p, q, k).
double naive_output(const Convolution& conv, std::int64_t n, std::int64_t p, std::int64_t q, std::int64_t k) {
  const Shape& x = conv.x.tensor().shape();
  const std::int64_t size = conv.geometry.kernel;
  double sum = 0.0;
  for (std::int64_t r = 0; r < size; ++r) {
    for (std::int64_t s = 0; s < size; ++s) {
      const std::int64_t row = p * conv.geometry.stride + r - conv.geometry.padded_rows();
      const std::int64_t column = q * conv.geometry.stride + s - conv.geometry.padding;
      if (row < 0 || row >= x[1] || column < 0 || column >= x[2]) continue;
      for (std::int64_t c = 0; c < x[3]; ++c) {
        sum += conv.x.get(((n * x[1] + row) * x[2] + column) * x[3] + c) *
               conv.w.get(((k * size + r) * size + s) * x[3] + c);
      }
    }
  }
  return sum;
}

Values naive_forward(const Convolution& conv, Activation activation, bool with_bias) {
  const Shape& shape = conv.y.tensor().shape();
  Values y;
  for (std::int64_t pixel = 0; pixel < shape[0] * shape[1] * shape[2]; ++pixel) {
    for (std::int64_t k = 0; k < shape[3]; ++k) {
      const double sum =
          naive_output(conv, pixel / (shape[1] * shape[2]), pixel / shape[2] % shape[1], pixel % shape[2], k);
      const double value = with_bias ? sum + conv.bias.get(k) : sum;
      y.push_back(activation == Activation::relu ? std::max(0.0, value) : value);
    }
  }
  return y;
}

std::string text(const Case& of) {
  return str("x [", of.n, ", ", of.h, ", ", of.w, ", ", of.c, "], K ", of.k, ", kernel ", of.geometry.kernel,
             ", stride ", of.geometry.stride, ", padding ", of.geometry.padded_rows(), " x ", of.geometry.padding);
}

}  // namespace

TEST_CASE("conv2d forward is its definition, with or without bias and relu") {
  const CpuUnderTest cpu;
  for (const Case& of : kCases) {
    for (const Activation activation : {Activation::none, Activation::relu}) {
      const bool with_bias = activation == Activation::relu;
      INFO(text(of) << ", relu and bias " << with_bias);
      Convolution exact(*cpu.backend, DType::fp64, of), fast(*cpu.backend, DType::fp32, of);
      exact.forward(*cpu.backend, activation, with_bias);
      CHECK(worst_error(exact.y.values(), naive_forward(exact, activation, with_bias)) < 1e-13);
      fast.forward(*cpu.backend, activation, with_bias);
      CHECK(worst_error(fast.y, exact.y) < kFloatError);
      CHECK((exact.guards_intact() && fast.guards_intact()));
    }
  }
}

TEST_CASE("conv2d gradients agree with finite differences") {
  const CpuUnderTest cpu;
  for (const Case& of : kCases) {
    if (of.n * of.h * of.w * of.c * of.k > 40000) continue;
    INFO(text(of));
    Convolution conv(*cpu.backend, DType::fp64, of);
    conv.backward(*cpu.backend);
    const auto loss = [&] {
      conv.forward(*cpu.backend);
      return dot(conv.dy.values(), conv.y.values());
    };
    CHECK(gradient_error(conv.x, conv.dx.values(), loss) < 1e-9);
    CHECK(gradient_error(conv.w, conv.dw.values(), loss) < 1e-9);
    CHECK(gradient_error(conv.bias, conv.dbias.values(), loss) < 1e-9);
  }
}

TEST_CASE("conv2d gradients in fp32 agree with fp64") {
  const CpuUnderTest cpu;
  for (const Case& of : kCases) {
    INFO(text(of));
    Convolution exact(*cpu.backend, DType::fp64, of), fast(*cpu.backend, DType::fp32, of);
    exact.backward(*cpu.backend);
    fast.backward(*cpu.backend);
    CHECK(worst_error(fast.dx, exact.dx) < kFloatError);
    CHECK(worst_error(fast.dw, exact.dw) < kFloatError);
    CHECK(worst_error(fast.dbias, exact.dbias) < kFloatError);
    CHECK((exact.guards_intact() && fast.guards_intact()));
  }
}

TEST_CASE("conv2d weight gradients accumulate when asked, bias gradients are optional") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const Case& of : kCases) {
      INFO(text(of) << " in " << name_of(dtype));
      Convolution once(*cpu.backend, dtype, of), more(*cpu.backend, dtype, of);
      once.backward(*cpu.backend);
      const OwnedTensor before = random_tensor(dtype, once.w.tensor().shape(), 8);
      more.dw.set(before.values());
      cpu.backend->conv2d_backward_weight(more.dw, Tensor(), more.dy, more.x, of.geometry, true, more.workspace);
      Values expected = once.dw.values();
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += before.get(static_cast<std::int64_t>(i));
      CHECK(worst_error(more.dw.values(), expected) < kFloatError);
      CHECK(more.guards_intact());
    }
  }
}

TEST_CASE("convolutions give the same bits on every call, and on any number of threads") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const Case& of : kCases) {
      INFO(text(of) << " in " << name_of(dtype));
      std::optional<Convolution> expected;
      for (const int threads : {1, 2, 5}) {
        with_threads(threads, [&] {
          // The workspace is planned for the threads that will run.
          Convolution conv(*cpu.backend, dtype, of), again(*cpu.backend, dtype, of);
          for (Convolution* run : {&conv, &again}) {
            run->forward(*cpu.backend, Activation::relu);
            run->backward(*cpu.backend);
          }
          CHECK(same_bits(conv.y, again.y));
          CHECK(same_bits(conv.dx, again.dx));
          CHECK(same_bits(conv.dw, again.dw));
          CHECK((conv.guards_intact() && again.guards_intact()));
          if (!expected) {
            expected.emplace(std::move(conv));
            return;
          }
          CHECK(same_up_to_split(conv.y, expected->y));
          CHECK(same_up_to_split(conv.dx, expected->dx));
          CHECK(same_up_to_split(conv.dw, expected->dw));
          CHECK(same_bits(conv.dbias, expected->dbias));
        });
      }
    }
  }
}

TEST_CASE("an image's result does not depend on the batch that it stands in") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    Convolution whole(*cpu.backend, dtype, {5, 6, 6, 64, 64}), one(*cpu.backend, dtype, {1, 6, 6, 64, 64});
    whole.forward(*cpu.backend);
    whole.backward(*cpu.backend);
    cpu.backend->conv2d_forward(one.y, whole.x.tensor().rows(3, 1), whole.w, whole.bias, {}, Activation::none,
                                one.workspace);
    cpu.backend->conv2d_backward_data(one.dx, whole.dy.tensor().rows(3, 1), whole.w, {}, one.workspace);
    const auto same_image = [&](const OwnedTensor& image, const OwnedTensor& of) {
      OwnedTensor expected(dtype, image.tensor().shape());
      cpu.backend->copy(expected, of.tensor().rows(3, 1));
      return same_up_to_split(image, expected);
    };
    CHECK(same_image(one.y, whole.y));
    CHECK(same_image(one.dx, whole.dx));
  }
}

TEST_CASE("NaN comes out of a convolution, with or without relu") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const Activation activation : {Activation::none, Activation::relu}) {
      Convolution conv(*cpu.backend, dtype, {2, 6, 6, 32, 32});
      conv.x.put(0, std::nan(""));
      conv.forward(*cpu.backend, activation);
      for (std::int64_t k = 0; k < 32; ++k) CHECK(std::isnan(conv.y.get(k)));
      for (std::int64_t i = conv.y.elements() / 2; i < conv.y.elements(); ++i) CHECK_FALSE(std::isnan(conv.y.get(i)));
    }
  }
}

TEST_CASE("a convolution refuses what does not fit, and a workspace that is too small") {
  const CpuUnderTest cpu;
  Convolution conv(*cpu.backend, DType::fp32, {2, 5, 7, 20, 5});
  const OwnedTensor small(DType::fp32, {2, 4, 7, 5});
  CHECK_THROWS_AS(cpu.backend->conv2d_forward(small, conv.x, conv.w, conv.bias, {}, Activation::none, conv.workspace),
                  Error);
  CHECK_THROWS_AS(
      cpu.backend->conv2d_forward(conv.y, conv.x, conv.w, conv.bias, {5, 1, 2}, Activation::none, conv.workspace),
      Error);
  const Tensor less = conv.workspace.tensor().range(0, conv.workspace.elements() - 1);
  CHECK_THROWS_AS(cpu.backend->conv2d_forward(conv.y, conv.x, conv.w, conv.bias, {}, Activation::none, less), Error);
  CHECK_THROWS_AS(cpu.backend->conv2d_workspace_bytes({2, 2, 2, 4}, {4, 5, 5, 4}, {5, 1, 0}, DType::fp32), Error);
}
