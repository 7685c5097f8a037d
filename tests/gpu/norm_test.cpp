// Layer norm of the CUDA backend against plain loops in fp64.

#include "tests/support/catch.h"
#include "tests/support/device_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

struct Case {
  std::int64_t rows, width;
  std::int64_t offset;  // elements that parameters and their gradients start behind a multiple of 64 bytes
};
// Widths of GPT-2 from tiny to XL, odd ones, single rows, and rows enough for every block.
const Case kCases[] = {{1, 64, 0},    {5, 100, 1},    {4, 5, 3},    {1000, 65, 1}, {33, 768, 3},
                       {300, 768, 0}, {257, 1024, 1}, {7, 1600, 3}, {3, 4096, 0},  {2100, 64, 0}};

constexpr Tolerance kMean = {2e-6, 2e-6, 2e-6, 2e-6};

// All tensors of one norm.
struct Norm {
  Norm(DType dtype, const Case& of_in, double centre = 1.0)
      : of(of_in),
        x(random_twin(dtype, {of.rows, of.width}, 1, centre - 2.0, centre + 2.0)),
        gamma(random_twin(dtype, {of.width}, 2, 0.5, 1.5, of.offset)),
        beta(random_twin(dtype, {of.width}, 3, -1.0, 1.0, of.offset)),
        dy(random_twin(dtype, {of.rows, of.width}, 4)),
        dresidual(random_twin(dtype, {of.rows, of.width}, 5)),
        y(dtype, {of.rows, of.width}),
        dx(dtype, {of.rows, of.width}),
        mean(DType::fp32, {of.rows}),
        rstd(DType::fp32, {of.rows}),
        dgamma(DType::fp32, {of.width}, of.offset),
        dbeta(DType::fp32, {of.width}, of.offset) {}

  void forward(const Side& on) const { on->layernorm_forward(y[on], mean[on], rstd[on], x[on], gamma[on], beta[on]); }
  // The statistics that both sides go backward with: the oracle's, rounded.
  void save_statistics() {
    forward({gpu()->oracle.get(), false});
    mean.set(mean.expected());
    rstd.set(rstd.expected());
  }
  // `to` and `from` instead of dx and dy, as they may be the same.
  void backward(const Side& on, const Twin& to, const Twin& from, const Twin& residual, bool accumulate) const {
    on->layernorm_backward(to[on], dgamma[on], dbeta[on], from[on], residual[on], x[on], gamma[on], mean[on], rstd[on],
                           accumulate);
  }

  Case of;
  Twin x, gamma, beta, dy, dresidual, y, dx, mean, rstd, dgamma, dbeta;
};

std::string text(DType dtype, const Case& of) {
  return str(name_of(dtype), ", M ", of.rows, ", C ", of.width, ", offset ", of.offset);
}

}  // namespace

TEST_CASE("cuda: layer norm forward") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : kCases) {
      INFO(text(dtype, of));
      Norm norm(dtype, of);
      agree(dtype, {{norm.y, "y", kRounded}, {norm.mean, "mean", kMean}, {norm.rstd, "rstd", kMean}},
            [&](const Side& on) { norm.forward(on); });
    }
  }
}

TEST_CASE("cuda: layer norm of rows that lie far from zero") {
  if (gpu() == nullptr) return;
  // A variance from sums of squares would have errors of 1e-7 * centre^2 here.
  Norm norm(DType::fp32, {20, 768, 0}, 100.0);
  constexpr Tolerance kFar = {5e-5, 5e-5, 0.0, 0.0};
  agree(DType::fp32, {{norm.y, "y", kFar}, {norm.mean, "mean", kMean}, {norm.rstd, "rstd", kFar}},
        [&](const Side& on) { norm.forward(on); });
}

TEST_CASE("cuda: layer norm backward, with or without the gradient that goes past it") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : kCases) {
      INFO(text(dtype, of));
      Norm norm(dtype, of);
      norm.save_statistics();
      agree(dtype, {{norm.dx, "dx", kRounded}, {norm.dgamma, "dgamma", kWide}, {norm.dbeta, "dbeta", kWide}},
            [&](const Side& on) { norm.backward(on, norm.dx, norm.dy, Twin(), false); });
      norm.dgamma.set(random_values(of.width, 6));
      norm.dbeta.set(random_values(of.width, 7));
      agree(dtype,
            {{norm.dx, "dx + dresidual", kRounded}, {norm.dgamma, "dgamma +=", kWide}, {norm.dbeta, "dbeta +=", kWide}},
            [&](const Side& on) { norm.backward(on, norm.dx, norm.dy, norm.dresidual, true); });
    }
  }
}

TEST_CASE("cuda: layer norm's dx may take the place of dresidual or of dy") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : {Case{5, 100, 1}, Case{33, 768, 0}, Case{2, 4096, 3}}) {
      INFO(text(dtype, of));
      Norm norm(dtype, of);
      norm.save_statistics();
      agree(
          dtype,
          {{norm.dresidual, "dx in dresidual", kRounded}, {norm.dgamma, "dgamma", kWide}, {norm.dbeta, "dbeta", kWide}},
          [&](const Side& on) { norm.backward(on, norm.dresidual, norm.dy, norm.dresidual, false); });
      norm.dresidual.reset({nullptr, true});
      norm.dresidual.reset({nullptr, false});
      const Twin none;
      for (const bool residual : {false, true}) {
        Twin in_place(dtype, {of.rows, of.width}, norm.dy.values());
        agree(dtype, {{in_place, "dx in dy", kRounded}, {norm.dgamma, "dgamma", kWide}, {norm.dbeta, "dbeta", kWide}},
              [&](const Side& on) { norm.backward(on, in_place, in_place, residual ? norm.dresidual : none, false); });
      }
    }
  }
}

TEST_CASE("cuda: layer norm lets NaN through in its own row only") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    Norm norm(dtype, {6, 768, 0});
    Values x = norm.x.values();
    x[3 * 768 + 700] = std::nan("");
    norm.x.set(x);
    INFO(name_of(dtype));
    agree(dtype, {{norm.y, "y", kRounded}, {norm.rstd, "rstd", kMean}}, [&](const Side& on) { norm.forward(on); });
  }
}

TEST_CASE("cuda: layer norm refuses tensors that do not fit each other") {
  if (gpu() == nullptr) return;
  const Norm norm(DType::bf16, {4, 64, 0});
  const Side on = {gpu()->deterministic.get(), true};
  const Twin narrow(DType::bf16, {63}), few(DType::fp32, {3}), other(DType::bf16, {4, 63}), wide(DType::fp64, {4, 64});
  CHECK_THROWS_AS(
      on->layernorm_forward(norm.y[on], norm.mean[on], norm.rstd[on], norm.x[on], narrow[on], norm.beta[on]), Error);
  CHECK_THROWS_AS(on->layernorm_forward(norm.y[on], few[on], norm.rstd[on], norm.x[on], norm.gamma[on], norm.beta[on]),
                  Error);
  CHECK_THROWS_AS(
      on->layernorm_forward(wide[on], norm.mean[on], norm.rstd[on], wide[on], norm.gamma[on], norm.beta[on]), Error);
  CHECK_THROWS_AS(norm.backward(on, other, norm.dy, Twin(), false), Error);
  CHECK_THROWS_AS(norm.backward(on, norm.dx, norm.dy, other, false), Error);
  gpu()->wait();
}
