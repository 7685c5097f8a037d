// Layer norm against its formula, its gradients against finite differences.

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/op_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

// Inputs and outputs of one layer norm over x [M, C].
struct Norm {
  Norm(DType dtype, std::int64_t m, std::int64_t c)
      : rows(m),
        width(c),
        x(random_tensor(dtype, {m, c}, 1, -2.0, 3.0)),
        gamma(random_tensor(dtype, {c}, 2, 0.5, 1.5)),
        beta(random_tensor(dtype, {c}, 3)),
        dy(random_tensor(dtype, {m, c}, 4)),
        dresidual(random_tensor(dtype, {m, c}, 5)),
        y(dtype, {m, c}),
        mean(dtype, {m}),
        rstd(dtype, {m}),
        dx(dtype, {m, c}),
        dgamma(dtype, {c}),
        dbeta(dtype, {c}) {}

  void forward(Backend& backend) { backend.layernorm_forward(y, mean, rstd, x, gamma, beta); }
  void backward(Backend& backend, const Tensor& residual = Tensor(), bool accumulate = false) {
    backend.layernorm_backward(dx, dgamma, dbeta, dy, residual, x, gamma, mean, rstd, accumulate);
  }
  bool guards_intact() const {
    return y.guards_intact() && mean.guards_intact() && rstd.guards_intact() && dx.guards_intact() &&
           dgamma.guards_intact() && dbeta.guards_intact();
  }

  std::int64_t rows, width;
  OwnedTensor x, gamma, beta, dy, dresidual, y, mean, rstd, dx, dgamma, dbeta;
};

struct Size {
  std::int64_t rows, width;
};
const Size kSizes[] = {{3, 2}, {5, 7}, {17, 33}, {4, 64}, {31, 257}, {150, 768}, {2, 5000}};

Values sum_of(const Values& a, const Values& b) {
  Values sum = a;
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += b[i];
  return sum;
}

}  // namespace

TEST_CASE("layer norm follows its formula") {
  const CpuUnderTest cpu;
  for (const Size& size : kSizes) {
    CAPTURE(size.rows, size.width);
    Norm norm(DType::fp64, size.rows, size.width);
    norm.forward(*cpu.backend);
    Values y, means, rstds;
    for (std::int64_t row = 0; row < size.rows; ++row) {
      double mean = 0.0, variance = 0.0;
      for (std::int64_t c = 0; c < size.width; ++c)
        mean += norm.x.get(row * size.width + c) / static_cast<double>(size.width);
      for (std::int64_t c = 0; c < size.width; ++c) {
        variance += std::pow(norm.x.get(row * size.width + c) - mean, 2) / static_cast<double>(size.width);
      }
      means.push_back(mean);
      rstds.push_back(1.0 / std::sqrt(variance + 1e-5));
      for (std::int64_t c = 0; c < size.width; ++c) {
        y.push_back((norm.x.get(row * size.width + c) - mean) * rstds.back() * norm.gamma.get(c) + norm.beta.get(c));
      }
    }
    CHECK(worst_error(norm.y.values(), y) < 1e-13);
    CHECK(worst_error(norm.mean.values(), means) < 1e-13);
    CHECK(worst_error(norm.rstd.values(), rstds) < 1e-13);
    CHECK(norm.guards_intact());
  }
}

TEST_CASE("layer norm's gradients are finite differences") {
  const CpuUnderTest cpu;
  for (const Size& size : {Size{3, 5}, Size{7, 33}, Size{70, 40}}) {
    CAPTURE(size.rows, size.width);
    Norm norm(DType::fp64, size.rows, size.width);
    norm.forward(*cpu.backend);
    norm.backward(*cpu.backend);
    const auto loss = [&] {
      norm.forward(*cpu.backend);
      return dot(norm.dy.values(), norm.y.values());
    };
    CHECK(gradient_error(norm.x, norm.dx.values(), loss) < 1e-7);
    CHECK(gradient_error(norm.gamma, norm.dgamma.values(), loss) < 1e-7);
    CHECK(gradient_error(norm.beta, norm.dbeta.values(), loss) < 1e-7);
    CHECK(norm.guards_intact());
  }
}

TEST_CASE("layer norm's backward adds the residual's gradient, onto dy or onto the residual's gradient itself") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    Norm norm(dtype, 13, 75);
    norm.forward(*cpu.backend);
    norm.backward(*cpu.backend);
    const Values plain = norm.dx.values(), dgamma = norm.dgamma.values();
    norm.backward(*cpu.backend, norm.dresidual);
    CHECK(worst_error(norm.dx.values(), sum_of(plain, norm.dresidual.values())) <
          (dtype == DType::fp64 ? 1e-15 : 1e-7));
    CHECK((norm.dgamma.values() == dgamma));
    const Values both = norm.dx.values();

    OwnedTensor onto_residual(dtype, {13, 75}, norm.dresidual.values()), onto_dy(dtype, {13, 75}, norm.dy.values());
    cpu.backend->layernorm_backward(onto_residual, norm.dgamma, norm.dbeta, norm.dy, onto_residual, norm.x, norm.gamma,
                                    norm.mean, norm.rstd, false);
    CHECK((onto_residual.values() == both));
    CHECK((norm.dgamma.values() == dgamma));
    cpu.backend->layernorm_backward(onto_dy, norm.dgamma, norm.dbeta, onto_dy, norm.dresidual, norm.x, norm.gamma,
                                    norm.mean, norm.rstd, false);
    CHECK((onto_dy.values() == both));
    CHECK((norm.dgamma.values() == dgamma));
  }
}

TEST_CASE("layer norm's parameter gradients accumulate only when asked") {
  const CpuUnderTest cpu;
  Norm norm(DType::fp64, 29, 18);
  norm.forward(*cpu.backend);
  norm.backward(*cpu.backend);  // over NaN
  const Values dgamma = norm.dgamma.values(), dbeta = norm.dbeta.values();
  const Values start_gamma = random_tensor(DType::fp64, {18}, 6).values(),
               start_beta = random_tensor(DType::fp64, {18}, 7).values();
  norm.dgamma.set(start_gamma);
  norm.dbeta.set(start_beta);
  norm.backward(*cpu.backend, Tensor(), true);
  CHECK(worst_error(norm.dgamma.values(), sum_of(dgamma, start_gamma)) < 1e-14);
  CHECK(worst_error(norm.dbeta.values(), sum_of(dbeta, start_beta)) < 1e-14);
}

TEST_CASE("layer norm in fp32 agrees with fp64 to 2e-6") {
  const CpuUnderTest cpu;
  for (const Size& size : kSizes) {
    CAPTURE(size.rows, size.width);
    Norm exact(DType::fp64, size.rows, size.width), norm(DType::fp32, size.rows, size.width);
    exact.forward(*cpu.backend);
    norm.forward(*cpu.backend);
    exact.backward(*cpu.backend, exact.dresidual);
    norm.backward(*cpu.backend, norm.dresidual);
    CHECK(worst_error(norm.y, exact.y) < 2e-6);
    CHECK(worst_error(norm.rstd, exact.rstd) < 2e-6);
    if (size.width > 2) CHECK(worst_error(norm.dx, exact.dx) < 2e-6);  // of two elements one is redundant: all cancels
    CHECK(worst_error(norm.dgamma, exact.dgamma) < 2e-6);
    CHECK(worst_error(norm.dbeta, exact.dbeta) < 2e-6);
    CHECK(norm.guards_intact());
  }
}

TEST_CASE("layer norm keeps its precision far from zero") {
  const CpuUnderTest cpu;
  Norm norm(DType::fp32, 2, 512);
  for (std::int64_t i = 0; i < norm.x.elements(); ++i) norm.x.put(i, 1000.0 + norm.x.get(i));
  Norm exact(DType::fp64, 2, 512);
  exact.x.set(norm.x.values());
  norm.forward(*cpu.backend);
  exact.forward(*cpu.backend);
  CHECK(worst_error(norm.y, exact.y) < 1e-4);  // the input itself is known to 3e-5 of its deviation
}

TEST_CASE("layer norm of a constant row gives beta") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    Norm norm(dtype, 1, 9);
    norm.x.set(Values(9, 0.25));
    norm.forward(*cpu.backend);
    CHECK((norm.y.values() == norm.beta.values()));
    CHECK(norm.rstd.get(0) == Approx(1.0 / std::sqrt(1e-5)));
  }
}

TEST_CASE("layer norm gives the same bits with any number of threads") {
  const CpuUnderTest cpu;
  for (const Size& size : {Size{1003, 65}, Size{64, 1030}}) {
    const auto run = [&](int threads) {
      Norm norm(DType::fp32, size.rows, size.width);
      with_threads(threads, [&] {
        norm.forward(*cpu.backend);
        norm.backward(*cpu.backend, norm.dresidual);
      });
      return std::vector<Values>{norm.y.values(),  norm.mean.values(),   norm.rstd.values(),
                                 norm.dx.values(), norm.dgamma.values(), norm.dbeta.values()};
    };
    const auto one = run(1);
    CHECK((one == run(2)));
    CHECK((one == run(3)));
  }
}

TEST_CASE("layer norm refuses shapes that do not belong together") {
  const CpuUnderTest cpu;
  Norm norm(DType::fp32, 4, 6), other(DType::fp32, 4, 7), exact(DType::fp64, 4, 6);
  CHECK_THROWS_AS(cpu.backend->layernorm_forward(other.y, norm.mean, norm.rstd, norm.x, norm.gamma, norm.beta), Error);
  CHECK_THROWS_AS(cpu.backend->layernorm_forward(norm.y, norm.mean, norm.rstd, norm.x, other.gamma, norm.beta), Error);
  CHECK_THROWS_AS(cpu.backend->layernorm_forward(norm.y, norm.beta, norm.rstd, norm.x, norm.gamma, norm.beta), Error);
  CHECK_THROWS_AS(cpu.backend->layernorm_forward(norm.y, exact.mean, norm.rstd, norm.x, norm.gamma, norm.beta), Error);
  CHECK_THROWS_AS(cpu.backend->layernorm_backward(norm.dx, other.dgamma, norm.dbeta, norm.dy, Tensor(), norm.x,
                                                  norm.gamma, norm.mean, norm.rstd, false),
                  Error);
}
