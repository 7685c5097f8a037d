// Attention against its formula with the whole matrix of weights, its gradient against finite differences, fp32 against
// fp64.

#include <cmath>
#include <optional>

#include "tests/support/catch.h"
#include "tests/support/op_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

struct Case {
  std::int64_t b, t, a, d;
  double rate = 0.0;
};
// One token, odd numbers of everything, widths below and above a vector and a panel, more queries than a block holds.
const Case kCases[] = {{1, 1, 1, 1},        {2, 7, 3, 5},        {1, 33, 1, 16},    {2, 33, 3, 20},
                       {1, 70, 2, 64},      {1, 150, 1, 80},     {2, 7, 3, 5, 0.3}, {1, 1, 2, 8, 0.5},
                       {2, 33, 3, 20, 0.1}, {1, 130, 2, 64, 0.2}};
constexpr double kFloatError = 3e-6;  // relative to the largest value

/// All tensors of one call. Equal seeds give equal values in both types, up to rounding.
struct Attention {
  Attention(const Backend& backend, DType dtype, const Case& of_in)
      : of(of_in),
        qkv(random_tensor(dtype, {of.b, of.t, of.a, 3, of.d}, 1, -2.0, 2.0)),
        dy(random_tensor(dtype, {of.b, of.t, of.a, of.d}, 2)),
        y(dtype, dy.tensor().shape()),
        stats(dtype, {of.b, of.a, of.t}),
        dqkv(dtype, qkv.tensor().shape()),
        workspace(DType::uint8, {backend.attention_workspace_bytes(qkv.tensor().shape(), dtype)}) {}

  DropoutKey key() const {
    static const std::int64_t ids[] = {11, 5}, update = 6;
    DropoutKey key;
    key.rate = of.rate;
    key.seed = 42;
    key.update = &update;
    key.site = 17;
    key.sample_ids = ids;
    key.samples = of.b;
    return key;
  }
  void forward(Backend& backend) {
    y.poison();
    stats.poison();
    workspace.poison();
    backend.attention_forward(y, stats, qkv, key(), kFirstHead, workspace);
  }
  void backward(Backend& backend) {
    dqkv.poison();
    workspace.poison();
    backend.attention_backward(dqkv, dy, y, stats, qkv, key(), kFirstHead, workspace);
  }
  bool guards_intact() const {
    return y.guards_intact() && stats.guards_intact() && dqkv.guards_intact() && workspace.guards_intact();
  }
  double element(std::int64_t b, std::int64_t t, std::int64_t a, std::int64_t part, std::int64_t d) const {
    return qkv.get((((b * of.t + t) * of.a + a) * 3 + part) * of.d + d);
  }

  static constexpr std::int64_t kFirstHead = 4;
  Case of;
  OwnedTensor qkv, dy, y, stats, dqkv, workspace;
};

// 0 or 1 / (1 - rate), by the definition of the mask.
double dropout_scale(const Attention& call, std::int64_t b, std::int64_t a, std::int64_t query, std::int64_t key) {
  const DropoutKey dropout = call.key();
  const auto element = static_cast<std::uint32_t>(((Attention::kFirstHead + a) * call.of.t + query) * call.of.t + key);
  const auto words =
      philox4x32({element / 4, static_cast<std::uint32_t>(dropout.sample_ids[b]), dropout.site, static_cast<std::uint32_t>(*dropout.update)},
                 philox_key(dropout.seed, RandomUse::dropout));
  return to_unit(words[element % 4]) >= dropout.rate ? 1.0 / (1.0 - dropout.rate) : 0.0;
}

struct Expected {
  Values y, stats;
};
Expected naive_attention(const Attention& call) {
  const auto [b_count, t_count, a_count, d_count, rate] = call.of;
  Expected expected = {Values(static_cast<std::size_t>(call.y.elements())),
                       Values(static_cast<std::size_t>(call.stats.elements()))};
  for (std::int64_t b = 0; b < b_count; ++b) {
    for (std::int64_t a = 0; a < a_count; ++a) {
      for (std::int64_t query = 0; query < t_count; ++query) {
        Values weights;
        double sum = 0.0;
        for (std::int64_t key = 0; key <= query; ++key) {
          double score = 0.0;
          for (std::int64_t d = 0; d < d_count; ++d)
            score += call.element(b, query, a, 0, d) * call.element(b, key, a, 1, d);
          weights.push_back(std::exp(score / std::sqrt(static_cast<double>(d_count))));
          sum += weights.back();
        }
        expected.stats[static_cast<std::size_t>((b * a_count + a) * t_count + query)] = std::log(sum);
        for (std::int64_t d = 0; d < d_count; ++d) {
          double value = 0.0;
          for (std::int64_t key = 0; key <= query; ++key) {
            const double scale = rate == 0.0 ? 1.0 : dropout_scale(call, b, a, query, key);
            value += scale * weights[static_cast<std::size_t>(key)] / sum * call.element(b, key, a, 2, d);
          }
          expected.y[static_cast<std::size_t>(((b * t_count + query) * a_count + a) * d_count + d)] = value;
        }
      }
    }
  }
  return expected;
}

std::string text(const Case& of) {
  return str("B ", of.b, ", T ", of.t, ", A ", of.a, ", D ", of.d, ", rate ", of.rate);
}

}  // namespace

TEST_CASE("attention forward is its formula, dropout included") {
  const CpuUnderTest cpu;
  for (const Case& of : kCases) {
    INFO(text(of));
    Attention exact(*cpu.backend, DType::fp64, of), fast(*cpu.backend, DType::fp32, of);
    exact.forward(*cpu.backend);
    const Expected expected = naive_attention(exact);
    CHECK(worst_error(exact.y.values(), expected.y) < 1e-13);
    CHECK(worst_error(exact.stats.values(), expected.stats) < 1e-13);
    fast.forward(*cpu.backend);
    CHECK(worst_error(fast.y, exact.y) < kFloatError);
    CHECK(worst_error(fast.stats, exact.stats) < kFloatError);
    CHECK((exact.guards_intact() && fast.guards_intact()));
  }
}

TEST_CASE("attention gradients agree with finite differences") {
  const CpuUnderTest cpu;
  for (const Case& of : kCases) {
    INFO(text(of));
    Attention call(*cpu.backend, DType::fp64, of);
    call.forward(*cpu.backend);
    call.backward(*cpu.backend);
    const auto loss = [&] {
      call.forward(*cpu.backend);
      return dot(call.dy.values(), call.y.values());
    };
    CHECK(gradient_error(call.qkv, call.dqkv.values(), loss) < 1e-8);
    CHECK(call.guards_intact());
  }
}

TEST_CASE("attention gradients in fp32 agree with fp64") {
  const CpuUnderTest cpu;
  for (const Case& of : kCases) {
    INFO(text(of));
    Attention exact(*cpu.backend, DType::fp64, of), fast(*cpu.backend, DType::fp32, of);
    for (Attention* call : {&exact, &fast}) {
      call->forward(*cpu.backend);
      call->backward(*cpu.backend);
    }
    CHECK(worst_error(fast.dqkv, exact.dqkv) < kFloatError);
    CHECK(fast.guards_intact());
  }
}

TEST_CASE("large scores neither overflow nor lose the row") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    Attention call(*cpu.backend, dtype, {1, 40, 1, 8});
    Values large = call.qkv.values();
    for (double& value : large) value *= 100.0;
    call.qkv.set(large);
    call.forward(*cpu.backend);
    call.backward(*cpu.backend);
    for (const OwnedTensor* result : {&call.y, &call.stats, &call.dqkv}) {
      for (const double value : result->values()) REQUIRE(std::isfinite(value));
    }
  }
}

TEST_CASE("attention gives the same bits on any number of threads, and in a workspace for fewer") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const Case& of : kCases) {
      INFO(text(of) << " in " << name_of(dtype));
      std::optional<Attention> expected;
      for (const int threads : {1, 2, 5}) {
        std::optional<Attention> call;
        with_threads(threads == 5 ? 1 : threads, [&] { call.emplace(*cpu.backend, dtype, of); });
        with_threads(threads, [&] {
          call->forward(*cpu.backend);
          call->backward(*cpu.backend);
        });
        CHECK(call->guards_intact());
        if (!expected) {
          expected.swap(call);
          continue;
        }
        CHECK(same_bits(call->y, expected->y));
        CHECK(same_bits(call->stats, expected->stats));
        CHECK(same_bits(call->dqkv, expected->dqkv));
      }
    }
  }
}

TEST_CASE("a head's result does not depend on which rank computes it, dropout included") {
  const CpuUnderTest cpu;
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    const Case of = {2, 20, 4, 6, 0.3}, half = {2, 20, 2, 6, 0.3};
    Attention whole(*cpu.backend, dtype, of), part(*cpu.backend, dtype, half);
    cpu.backend->attention_forward(whole.y, whole.stats, whole.qkv, whole.key(), 0, whole.workspace);
    for (std::int64_t token = 0; token < of.b * of.t; ++token) {
      for (std::int64_t i = 0; i < 2 * 3 * of.d; ++i)
        part.qkv.put(token * 2 * 3 * of.d + i, whole.qkv.get((token * 4 + 2) * 3 * of.d + i));
    }
    cpu.backend->attention_forward(part.y, part.stats, part.qkv, part.key(), 2, part.workspace);
    for (std::int64_t token = 0; token < of.b * of.t; ++token) {
      for (std::int64_t i = 0; i < 2 * of.d; ++i)
        REQUIRE(part.y.get(token * 2 * of.d + i) == whole.y.get((token * 4 + 2) * of.d + i));
    }
  }
}

TEST_CASE("attention refuses a workspace without room for one thread") {
  const CpuUnderTest cpu;
  Attention call(*cpu.backend, DType::fp32, {1, 16, 1, 8});
  CHECK_THROWS_AS(
      cpu.backend->attention_forward(call.y, call.stats, call.qkv, call.key(), 0, call.workspace.tensor().range(0, 64)),
      Error);
  CHECK_THROWS_AS(cpu.backend->attention_forward(call.y, call.stats, call.qkv, call.key(), 0, Tensor()), Error);
}
