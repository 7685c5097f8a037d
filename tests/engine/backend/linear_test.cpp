// Linear layers against the triple loop, their gradients against finite differences, fp32 against fp64.

#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>

#include "tests/support/catch.h"
#include "tests/support/op_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

struct Extents {
  std::int64_t rows, in, out;
};
// Odd ones, ones around the sizes of tiles, vectors and blocks, and a long sum.
const Extents kExtents[] = {{1, 1, 1},    {1, 5, 3},      {3, 17, 65},   {17, 33, 64}, {6, 64, 48},
                            {7, 300, 31}, {97, 257, 100}, {13, 40, 530}, {600, 19, 9}};
constexpr Activation kActivations[] = {Activation::none, Activation::relu, Activation::gelu_tanh};

// fp32 results are within this of fp64 ones, relative to the largest: sums of up to 600 products of numbers up to 1.
constexpr double kFloatError = 2e-6;

// oneDNN may split the sums of its fp32 products differently for other threads or other rows. All else is bit-equal.
bool same_up_to_split(const OwnedTensor& a, const OwnedTensor& b) {
  if (PDL_WITH_ONEDNN && a.tensor().dtype() == DType::fp32) return worst_error(a, b) < kFloatError;
  return same_bits(a, b);
}

/// All tensors of one layer. Equal seeds give equal values in both types, up to rounding.
struct Layer {
  Layer(DType dtype, const Extents& e)
      : x(random_tensor(dtype, {e.rows, e.in}, 1)),
        w(random_tensor(dtype, {e.out, e.in}, 2)),
        bias(random_tensor(dtype, {e.out}, 3)),
        dy(random_tensor(dtype, {e.rows, e.out}, 4)),
        y(dtype, {e.rows, e.out}),
        pre_activation(dtype, {e.rows, e.out}),
        residual(random_tensor(dtype, {e.rows, e.out}, 5)),
        dx(dtype, {e.rows, e.in}),
        dw(dtype, {e.out, e.in}),
        dbias(dtype, {e.out}) {}

  void forward(Backend& backend, Activation activation = Activation::none, bool with_bias = true) {
    y.poison();
    pre_activation.poison();
    backend.linear_forward(y, activation == Activation::gelu_tanh ? pre_activation.tensor() : Tensor(), x, w,
                           with_bias ? bias.tensor() : Tensor(), activation);
  }
  void forward_onto_residual(Backend& backend, bool with_bias = true) {
    y.poison();
    backend.linear_forward(y, Tensor(), x, w, with_bias ? bias.tensor() : Tensor(), Activation::none, residual);
  }
  void backward(Backend& backend) {
    backend.linear_backward_data(dx, dy, w);
    backend.linear_backward_weight(dw, dbias, dy, x, false);
  }
  bool guards_intact() const {
    return y.guards_intact() && pre_activation.guards_intact() && dx.guards_intact() && dw.guards_intact() &&
           dbias.guards_intact() && residual.guards_intact();
  }

  OwnedTensor x, w, bias, dy, y, pre_activation, residual, dx, dw, dbias;
};

double naive_activation(double x, Activation activation) {
  if (activation == Activation::relu) return std::max(x, 0.0);
  if (activation == Activation::none) return x;
  return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}

// x w^T + bias.
Values naive_product(const Layer& layer, const Extents& e, bool with_bias) {
  Values y;
  for (std::int64_t m = 0; m < e.rows; ++m) {
    for (std::int64_t o = 0; o < e.out; ++o) {
      double sum = with_bias ? layer.bias.get(o) : 0.0;
      for (std::int64_t i = 0; i < e.in; ++i) sum += layer.x.get(m * e.in + i) * layer.w.get(o * e.in + i);
      y.push_back(sum);
    }
  }
  return y;
}

Values activated(Values values, Activation activation) {
  for (double& value : values) value = naive_activation(value, activation);
  return values;
}

std::string text(const Extents& e) { return str("M ", e.rows, ", I ", e.in, ", O ", e.out); }

}  // namespace

TEST_CASE("linear forward is the triple loop, with or without bias and activation") {
  const CpuUnderTest cpu;
  for (const Extents& e : kExtents) {
    for (const Activation activation : kActivations) {
      for (const bool with_bias : {true, false}) {
        INFO(text(e) << ", activation " << static_cast<int>(activation) << ", bias " << with_bias);
        Layer exact(DType::fp64, e), fast(DType::fp32, e);
        exact.forward(*cpu.backend, activation, with_bias);
        const Values product = naive_product(exact, e, with_bias);
        CHECK(worst_error(exact.y.values(), activated(product, activation)) < 1e-14);
        fast.forward(*cpu.backend, activation, with_bias);
        CHECK(worst_error(fast.y, exact.y) < kFloatError);
        if (activation == Activation::gelu_tanh) {
          CHECK(worst_error(exact.pre_activation.values(), product) < 1e-14);
          CHECK(worst_error(fast.pre_activation, exact.pre_activation) < kFloatError);
        }
        CHECK((exact.guards_intact() && fast.guards_intact()));
      }
    }
  }
}

TEST_CASE("linear forward onto a residual is the two operations one after the other") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const Extents& e : kExtents) {
      for (const bool with_bias : {true, false}) {
        INFO(text(e) << " in " << name_of(dtype) << ", bias " << with_bias);
        Layer apart(dtype, e), at_once(dtype, e);
        apart.forward(*cpu.backend, Activation::none, with_bias);
        cpu.backend->residual_add(apart.y, apart.residual, apart.y, DropoutKey());
        at_once.forward_onto_residual(*cpu.backend, with_bias);
        CHECK(same_bits(at_once.y, apart.y));
        CHECK(same_bits(at_once.residual, apart.residual));
        CHECK(at_once.guards_intact());
      }
    }
  }
}

TEST_CASE("gelu needs no pre-activation when nobody will go backward") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    Layer layer(dtype, {7, 19, 40}), inference(dtype, {7, 19, 40});
    layer.forward(*cpu.backend, Activation::gelu_tanh);
    cpu.backend->linear_forward(inference.y, Tensor(), inference.x, inference.w, inference.bias, Activation::gelu_tanh);
    CHECK(same_bits(layer.y, inference.y));
  }
}

TEST_CASE("linear gradients agree with finite differences") {
  const CpuUnderTest cpu;
  for (const Extents& e : {Extents{1, 1, 1}, Extents{3, 17, 65}, Extents{17, 33, 20}}) {
    INFO(text(e));
    Layer layer(DType::fp64, e);
    layer.backward(*cpu.backend);
    const auto loss = [&] {
      layer.forward(*cpu.backend);
      return dot(layer.dy.values(), layer.y.values());
    };
    CHECK(gradient_error(layer.x, layer.dx.values(), loss) < 1e-9);
    CHECK(gradient_error(layer.w, layer.dw.values(), loss) < 1e-9);
    CHECK(gradient_error(layer.bias, layer.dbias.values(), loss) < 1e-9);
  }
}

TEST_CASE("a linear layer goes back through the activation below it with the bits of the operations one by one") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const Extents& e : kExtents) {
      for (const Activation activation : {Activation::relu, Activation::gelu_tanh}) {
        INFO(text(e) << " in " << name_of(dtype) << ", activation " << static_cast<int>(activation));
        Layer apart(dtype, e), at_once(dtype, e);
        const OwnedTensor below = random_tensor(dtype, {e.rows, e.in}, 6, -3.0, 3.0);
        const OwnedTensor start = random_tensor(dtype, {e.in}, 7);
        OwnedTensor dbias(dtype, {e.in}, start.values()), expected(dtype, {e.in}, start.values());
        cpu.backend->linear_backward_data(apart.dx, apart.dy, apart.w);
        cpu.backend->activation_backward(apart.dx, expected, apart.dx, below, activation, true);
        cpu.backend->linear_backward_data(at_once.dx, dbias, at_once.dy, at_once.w, below, activation, true);
        CHECK(same_bits(at_once.dx, apart.dx));
        CHECK(same_bits(dbias, expected));
        at_once.dx.poison();
        cpu.backend->linear_backward_data(at_once.dx, Tensor(), at_once.dy, at_once.w, below, activation, false);
        CHECK(same_bits(at_once.dx, apart.dx));
        CHECK((at_once.guards_intact() && dbias.guards_intact()));
      }
    }
  }
}

TEST_CASE("linear gradients in fp32 agree with fp64") {
  const CpuUnderTest cpu;
  for (const Extents& e : kExtents) {
    INFO(text(e));
    Layer exact(DType::fp64, e), fast(DType::fp32, e);
    exact.backward(*cpu.backend);
    fast.backward(*cpu.backend);
    CHECK(worst_error(fast.dx, exact.dx) < kFloatError);
    CHECK(worst_error(fast.dw, exact.dw) < kFloatError);
    CHECK(worst_error(fast.dbias, exact.dbias) < kFloatError);
    CHECK((exact.guards_intact() && fast.guards_intact()));
  }
}

TEST_CASE("linear weight gradients accumulate when asked, and overwrite otherwise") {
  const CpuUnderTest cpu;
  const Extents e = {270, 70, 10};
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    Layer once(dtype, e), more(dtype, e);
    once.backward(*cpu.backend);
    const OwnedTensor dw = random_tensor(dtype, {e.out, e.in}, 8), dbias = random_tensor(dtype, {e.out}, 9);
    more.dw.set(dw.values());
    more.dbias.set(dbias.values());
    cpu.backend->linear_backward_weight(more.dw, more.dbias, more.dy, more.x, true);
    const auto sum = [](const OwnedTensor& a, const OwnedTensor& b) {
      Values values = a.values();
      for (std::size_t i = 0; i < values.size(); ++i) values[i] += b.get(static_cast<std::int64_t>(i));
      return values;
    };
    CHECK(worst_error(more.dw.values(), sum(once.dw, dw)) < kFloatError);
    CHECK(worst_error(more.dbias.values(), sum(once.dbias, dbias)) < kFloatError);

    more.dw.poison();
    cpu.backend->linear_backward_weight(more.dw, Tensor(), more.dy, more.x, false);
    CHECK(same_bits(more.dw, once.dw));
    CHECK(more.guards_intact());
  }
}

TEST_CASE("linear layers give the same bits on every call, and on any number of threads") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const Extents& e : kExtents) {
      INFO(text(e) << " in " << name_of(dtype));
      std::optional<Layer> expected;
      for (const int threads : {1, 2, 5}) {
        Layer layer(dtype, e), again(dtype, e);
        with_threads(threads, [&] {
          for (Layer* run : {&layer, &again}) {
            run->forward(*cpu.backend, Activation::gelu_tanh);
            run->backward(*cpu.backend);
          }
        });
        CHECK(same_bits(layer.y, again.y));
        CHECK(same_bits(layer.dx, again.dx));
        CHECK(same_bits(layer.dw, again.dw));
        if (!expected) {
          expected.emplace(std::move(layer));
          continue;
        }
        CHECK(same_up_to_split(layer.y, expected->y));
        CHECK(same_up_to_split(layer.dx, expected->dx));
        CHECK(same_up_to_split(layer.dw, expected->dw));
        CHECK(same_bits(layer.dbias, expected->dbias));
      }
    }
  }
}

TEST_CASE("a row's result does not depend on the batch that it stands in") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    Layer whole(dtype, {97, 300, 70});
    whole.forward(*cpu.backend, Activation::relu);
    cpu.backend->linear_backward_data(whole.dx, whole.dy, whole.w);
    Layer part(dtype, {5, 300, 70});
    cpu.backend->linear_forward(part.y, Tensor(), whole.x.tensor().rows(40, 5), whole.w, whole.bias, Activation::relu);
    cpu.backend->linear_backward_data(part.dx, whole.dy.tensor().rows(40, 5), whole.w);
    const auto same_rows = [&](const OwnedTensor& rows, const OwnedTensor& of) {
      OwnedTensor expected(dtype, rows.tensor().shape());
      cpu.backend->copy(expected, of.tensor().rows(40, 5));
      return same_up_to_split(rows, expected);
    };
    CHECK(same_rows(part.y, whole.y));
    CHECK(same_rows(part.dx, whole.dx));
  }
}

TEST_CASE("an output layer too wide for the usual path, without bias") {
  const CpuUnderTest cpu;
  const Extents e = {5, 24, 4100};
  Layer exact(DType::fp64, e), fast(DType::fp32, e);
  for (Layer* layer : {&exact, &fast}) {
    layer->forward(*cpu.backend, Activation::none, false);
    layer->backward(*cpu.backend);
  }
  CHECK(worst_error(fast.y, exact.y) < kFloatError);
  CHECK(worst_error(fast.dx, exact.dx) < 2 * kFloatError);  // sums of 4100 products
  CHECK(worst_error(fast.dw, exact.dw) < kFloatError);
  CHECK(fast.guards_intact());
}

TEST_CASE("NaN comes out of every activation") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const Activation activation : kActivations) {
      Layer layer(dtype, {2, 3, 20});
      layer.x.put(0, std::nan(""));
      layer.forward(*cpu.backend, activation);
      for (std::int64_t o = 0; o < 20; ++o) CHECK(std::isnan(layer.y.get(o)));
      for (std::int64_t o = 20; o < 40; ++o) CHECK_FALSE(std::isnan(layer.y.get(o)));
    }
  }
}

TEST_CASE("tensors that do not fit each other are refused") {
  const CpuUnderTest cpu;
  Layer layer(DType::fp32, {4, 8, 6});
  const OwnedTensor narrow(DType::fp32, {4, 7}), doubles(DType::fp64, {4, 8});
  CHECK_THROWS_AS(cpu.backend->linear_forward(layer.y, Tensor(), narrow, layer.w, Tensor(), Activation::none), Error);
  CHECK_THROWS_AS(cpu.backend->linear_forward(layer.y, Tensor(), doubles, layer.w, Tensor(), Activation::none), Error);
  CHECK_THROWS_AS(cpu.backend->linear_forward(layer.y, Tensor(), layer.x, layer.w, narrow, Activation::none), Error);
  CHECK_THROWS_AS(cpu.backend->linear_forward(layer.y, Tensor(), layer.x, layer.w, Tensor(), Activation::none, narrow),
                  Error);
  CHECK_THROWS_AS(
      cpu.backend->linear_forward(layer.y, Tensor(), layer.x, layer.w, Tensor(), Activation::relu, layer.residual),
      Error);
  CHECK_THROWS_AS(cpu.backend->linear_backward_weight(layer.dw, narrow, layer.dy, layer.x, false), Error);
}
