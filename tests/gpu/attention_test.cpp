// Attention of the CUDA backend against plain loops in fp64.

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/device_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

struct Case {
  std::int64_t b, t, a, d;
  double rate = 0.0;
};
// One token, odd numbers of everything, whole tiles, partial tiles, and each with dropout.
const Case kCases[] = {{1, 1, 2, 16},        {2, 7, 3, 16},       {2, 64, 2, 32},     {1, 200, 3, 64},
                       {2, 256, 2, 64},      {1, 1, 2, 16, 0.5},  {2, 7, 3, 16, 0.3}, {2, 64, 2, 32, 0.1},
                       {1, 200, 3, 64, 0.2}, {2, 256, 2, 64, 0.1}};
constexpr std::int64_t kFirstHead = 4;

// Weights are rounded to the element type before they meet the values, as are gradients of scores before they meet
// queries and keys; those are differences of nearly equal numbers.
constexpr Tolerance kValue = {5e-6, 2e-3, 8e-3, 1.5e-3};
constexpr Tolerance kStats = {3e-6, 1e-3, 5e-3, 1e-3};
constexpr Tolerance kGradient = {1e-5, 4e-3, 3e-2, 4e-3};

// All tensors of one call.
struct Attention {
  Attention(DType dtype, const Case& of_in, double range = 2.0)
      : of(of_in),
        qkv_shape({of.b, of.t, of.a, 3, of.d}),
        y_shape({of.b, of.t, of.a, of.d}),
        qkv(random_twin(dtype, qkv_shape, 1, -range, range)),
        dy(random_twin(dtype, y_shape, 2)),
        y(dtype, y_shape),
        stats(DType::fp32, {of.b, of.a, of.t}),
        dqkv(dtype, qkv_shape),
        key(of.rate == 0.0 ? TwinKey() : TwinKey(of.rate, of.b == 1 ? Values{11.0} : Values{11.0, 5.0})) {}

  Room room(const Side& on) const { return Room(on, on->attention_workspace_bytes(qkv_shape, qkv[on].dtype())); }
  void forward(const Side& on) const {
    const Room workspace = room(on);
    on->attention_forward(y[on], stats[on], qkv[on], key[on], kFirstHead, workspace);
    CHECK(workspace.guards_intact());
  }
  void backward(const Side& on) const {
    const Room workspace = room(on);
    on->attention_backward(dqkv[on], dy[on], y[on], stats[on], qkv[on], key[on], kFirstHead, workspace);
    CHECK(workspace.guards_intact());
  }
  // Elements of q (0), k (1) or v (2).
  Choice part(std::int64_t which) const {
    return [which, d = of.d](std::int64_t i) { return i / d % 3 == which; };
  }

  Case of;
  Shape qkv_shape, y_shape;
  Twin qkv, dy, y, stats, dqkv;
  TwinKey key;
};

std::string text(DType dtype, const Case& of) {
  return str(name_of(dtype), ", B ", of.b, ", T ", of.t, ", A ", of.a, ", D ", of.d, ", rate ", of.rate);
}

}  // namespace

TEST_CASE("cuda: attention forward and backward, dropout included") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : kCases) {
      INFO(text(dtype, of));
      Attention call(dtype, of);
      std::vector<Output> outputs = {{call.y, "y", kValue}, {call.stats, "stats", kStats}};
      if (of.t == 1) {  // dq and dk vanish: only rounding is left of them
        outputs.push_back({call.dqkv, "dqkv", kGradient});
      } else {
        outputs.push_back({call.dqkv, "dq", kGradient, call.part(0)});
        outputs.push_back({call.dqkv, "dk", kGradient, call.part(1)});
        outputs.push_back({call.dqkv, "dv", kGradient, call.part(2)});
      }
      agree(dtype, outputs, [&](const Side& on) {
        call.forward(on);
        call.backward(on);
      });
    }
  }
}

TEST_CASE("cuda: attention drops the weights that the CPU drops, in the shard of any head") {
  if (gpu() == nullptr) return;
  // With a unit matrix as values, y is the matrix of weights itself.
  for (const DType dtype : kComputeTypes) {
    const Case of = {2, 64, 2, 64, 0.3};
    Attention call(dtype, of);
    Values qkv = call.qkv.values();
    for (std::int64_t i = 0; i < call.qkv.elements(); ++i) {
      const std::int64_t column = i % of.d, token = i / (of.d * 3 * of.a) % of.t;
      if (i / of.d % 3 == 2) qkv[static_cast<std::size_t>(i)] = column == token ? 1.0 : 0.0;
    }
    call.qkv.set(qkv);
    for (const std::int64_t first_head : {0, 1, 13}) {
      INFO(name_of(dtype) << ", first head " << first_head);
      agree(dtype, {{call.y, "weights", kValue}}, [&](const Side& on) {
        const Room workspace = call.room(on);
        on->attention_forward(call.y[on], call.stats[on], call.qkv[on], call.key[on], first_head, workspace);
        CHECK(workspace.guards_intact());
      });
      CHECK(call.y.same_zeros());
    }
  }
}

TEST_CASE("cuda: no query sees a later key") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const double rate : {0.0, 0.2}) {
      INFO(name_of(dtype) << ", rate " << rate);
      const std::int64_t cut = 77;  // tokens from here on change
      const Side on = {gpu()->deterministic.get(), true};
      Attention call(dtype, {1, 200, 2, 64, rate});
      call.forward(on);
      const Values before = call.y.values();
      const std::int64_t token = 2 * 3 * 64;
      Values qkv = call.qkv.values();
      for (std::size_t i = cut * token; i < qkv.size(); ++i) qkv[i] = 3.0 - qkv[i];
      call.qkv.set(qkv);
      call.forward(on);
      const Values after = call.y.values();
      const auto seen = static_cast<std::ptrdiff_t>(cut * 2 * 64);
      CHECK(std::equal(before.begin(), before.begin() + seen, after.begin()));
      CHECK_FALSE(std::equal(before.begin() + seen, before.end(), after.begin() + seen));
    }
  }
}

TEST_CASE("cuda: large scores neither overflow nor lose the row") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const double rate : {0.0, 0.1}) {
      Attention call(dtype, {1, 64, 2, 64, rate}, 50.0);
      for (const Mode& mode : modes_of(dtype)) {
        INFO(mode.name() << ", rate " << rate);
        call.forward(mode.side());
        call.backward(mode.side());
        for (const Twin* result : {&call.y, &call.stats, &call.dqkv}) {
          const Values values = result->values();
          CHECK(std::all_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); }));
        }
      }
    }
  }
}

TEST_CASE("cuda: a gradient of attention beyond the range of fp16 does not come out as a number") {
  if (gpu() == nullptr) return;
  for (const double rate : {0.0, 0.1}) {
    for (const Mode& mode : modes_of(DType::fp16)) {
      INFO(mode.name() << ", rate " << rate);
      Attention call(DType::fp16, {1, 64, 2, 64, rate});
      call.qkv.set(Values(static_cast<std::size_t>(call.qkv.elements()), 0.5));
      call.dy.set(Values(static_cast<std::size_t>(call.dy.elements()), 6e4));
      call.forward(mode.side());
      call.backward(mode.side());
      // Every query has the first key in view with the weight of all others: the sum of 1 / (query + 1) is above 4.
      const Values dqkv = call.dqkv.values();
      for (std::size_t d = 0; d < 64; ++d) CHECK_FALSE(std::isfinite(dqkv[2 * 64 + d]));
    }
  }
}

TEST_CASE("cuda: attention refuses tensors that do not fit each other") {
  if (gpu() == nullptr) return;
  const Attention call(DType::bf16, {2, 64, 2, 32});
  const Side on = {gpu()->deterministic.get(), true};
  const Room workspace = call.room(on);
  const Twin other(DType::bf16, {2, 64, 2, 31}), few(DType::fp32, {2, 2, 63}), wide(DType::fp64, call.y_shape);
  CHECK_THROWS_AS(on->attention_forward(other[on], call.stats[on], call.qkv[on], call.key[on], 0, workspace), Error);
  CHECK_THROWS_AS(on->attention_forward(wide[on], call.stats[on], call.qkv[on], call.key[on], 0, workspace), Error);
  CHECK_THROWS_AS(on->attention_forward(call.y[on], few[on], call.qkv[on], call.key[on], 0, workspace), Error);
  CHECK_THROWS_AS(on->attention_backward(call.qkv[on], other[on], call.y[on], call.stats[on], call.qkv[on],
                                         call.key[on], 0, workspace),
                  Error);
  gpu()->wait();
}
