#include "engine/optim/optimizer.h"

#include <cmath>
#include <limits>

#include "engine/base/random.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

constexpr std::int64_t kElements = 23;
/// Three parameters, the second spared by decay; elements 0, 12 and 22 belong to none.
const std::vector<UpdateSegment> kSegments = {
    {.offset = 1, .count = 7, .decay = true}, {.offset = 8, .count = 4, .decay = false}, {.offset = 13, .count = 9}};

double number(std::uint64_t what, std::uint64_t element) {
  return RandomStream(1, RandomUse::synthetic, what).normal(element);
}

std::vector<double> numbers(std::uint64_t what) {
  std::vector<double> all;
  for (std::uint64_t i = 0; i < kElements; ++i) all.push_back(number(what, i));
  return all;
}

/// The formulas of one element, written as in the papers, over whole segments.
struct ByHand {
  OptimizerOptions options;
  std::vector<double> values, first = std::vector<double>(kElements, 0.0), second = first;

  void step(const std::vector<double>& grads, double lr, double scale, int update) {
    for (const UpdateSegment& segment : kSegments) {
      const double decay = segment.decay ? options.weight_decay : 0.0;
      std::vector<double> directions;
      double weight_squares = 0.0, direction_squares = 0.0;
      for (std::int64_t e = segment.offset; e < segment.offset + segment.count; ++e) {
        const auto i = static_cast<std::size_t>(e);
        directions.push_back(direction(i, scale * grads[i], decay, lr, update));
        weight_squares += values[i] * values[i];
        direction_squares += directions.back() * directions.back();
      }
      double ratio = 1.0;
      if (options.name == "lamb" && weight_squares > 0.0 && direction_squares > 0.0) {
        ratio = std::sqrt(weight_squares) / std::sqrt(direction_squares);
      }
      for (std::size_t j = 0; j < directions.size(); ++j) {
        values[static_cast<std::size_t>(segment.offset) + j] -= lr * ratio * directions[j];
      }
    }
  }

  double direction(std::size_t i, double g, double decay, double lr, int update) {
    double& w = values[i];
    if (options.name == "sgd") {
      g += decay * w;
      if (options.momentum == 0.0) return g;
      first[i] = update == 1 ? g : options.momentum * first[i] + g;
      return options.nesterov ? g + options.momentum * first[i] : first[i];
    }
    if (options.name == "adam") g += decay * w;
    if (options.name == "adamw") w *= 1.0 - lr * decay;
    first[i] = options.beta1 * first[i] + (1.0 - options.beta1) * g;
    second[i] = options.beta2 * second[i] + (1.0 - options.beta2) * g * g;
    const double mean = first[i] / (1.0 - std::pow(options.beta1, update));
    const double square = second[i] / (1.0 - std::pow(options.beta2, update));
    const double adam = mean / (std::sqrt(square) + options.epsilon);
    return options.name == "lamb" ? adam + decay * w : adam;
  }
};

struct Setup {
  std::unique_ptr<Device> device = make_device({.kind = "cpu", .threads = 2});
  std::unique_ptr<Backend> backend = make_backend(*device, {});
};

std::vector<OptimizerOptions> all_options() {
  std::vector<OptimizerOptions> all;
  for (const char* name : {"sgd", "adam", "adamw", "lamb"}) {
    OptimizerOptions options;
    options.name = name;
    all.push_back(options);
    options.weight_decay = 0.03;
    all.push_back(options);
    if (options.name == "sgd") {
      options.momentum = 0.9;
      all.push_back(options);
      options.nesterov = true;
      all.push_back(options);
    } else {
      options.beta1 = 0.8;
      options.beta2 = 0.95;
      options.epsilon = 1e-3;
      all.push_back(options);
    }
  }
  return all;
}

std::string text_of(const OptimizerOptions& options) {
  return str(options.name, " momentum ", options.momentum, " decay ", options.weight_decay, " beta1 ", options.beta1);
}

double worst_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

}  // namespace

TEST_CASE("five updates follow the formulas of the papers") {
  Setup setup;
  for (const OptimizerOptions& options : all_options()) {
    INFO(text_of(options));
    const std::unique_ptr<Optimizer> optimizer = make_optimizer(options);
    optimizer->allocate(*setup.device, kElements, DType::fp64, kSegments);
    std::vector<double> values = numbers(0);
    ByHand hand{options, values};
    setup.device->seal();
    for (int update = 1; update <= 5; ++update) {
      const double lr = 0.05 / update, scale = update == 3 ? 0.25 : 1.0;
      std::vector<double> grads = numbers(static_cast<std::uint64_t>(update));
      hand.step(grads, lr, scale, update);
      optimizer->step(*setup.backend, {.values = Tensor(values.data(), DType::fp64, {kElements}),
                                       .grads = Tensor(grads.data(), DType::fp64, {kElements}),
                                       .lr = lr,
                                       .grad_scale = scale,
                                       .update = update});
      CHECK(worst_difference(values, hand.values) < 1e-14);
    }
    setup.device->unseal();
    for (std::size_t outside : {0, 12, 22}) CHECK(values[outside] == number(0, outside));
    const std::vector<Tensor> state = optimizer->state();
    REQUIRE(state.size() == static_cast<std::size_t>(optimizer->moments()));
    if (!state.empty()) CHECK(state[0].data<double>()[5] == Approx(hand.first[5]).epsilon(1e-13));
    if (state.size() > 1) CHECK(state[1].data<double>()[5] == Approx(hand.second[5]).epsilon(1e-13));
  }
}

TEST_CASE("fp32 updates follow fp64 ones") {
  Setup setup;
  for (const OptimizerOptions& options : all_options()) {
    INFO(text_of(options));
    const std::unique_ptr<Optimizer> optimizer = make_optimizer(options);
    optimizer->allocate(*setup.device, kElements, DType::fp32, kSegments);
    ByHand hand{options, numbers(0)};
    std::vector<float> values(hand.values.begin(), hand.values.end());
    for (int update = 1; update <= 5; ++update) {
      const std::vector<double> wide = numbers(static_cast<std::uint64_t>(update));
      std::vector<float> grads(wide.begin(), wide.end());
      hand.step(wide, 0.01, 1.0, update);
      optimizer->step(*setup.backend, {.values = Tensor(values.data(), DType::fp32, {kElements}),
                                       .grads = Tensor(grads.data(), DType::fp32, {kElements}),
                                       .lr = 0.01,
                                       .update = update});
    }
    CHECK(worst_difference({values.begin(), values.end()}, hand.values) < 2e-6);
  }
}

TEST_CASE("the memory of an optimizer is the memory foreseen") {
  Setup setup;
  for (const OptimizerOptions& options : all_options()) {
    for (DType dtype : {DType::fp64, DType::fp32}) {
      INFO(text_of(options) << " " << name_of(dtype));
      const std::unique_ptr<Optimizer> optimizer = make_optimizer(options);
      optimizer->allocate(*setup.device, kElements, dtype, kSegments);
      const MemoryByKind& held = setup.device->memory().current();
      CHECK(held[MemoryKind::optimizer] == optimizer_bytes(options, kElements, dtype, 3));
      CHECK(held.total() == held[MemoryKind::optimizer]);
    }
  }
  OptimizerOptions options;
  CHECK(optimizer_bytes(options, 1000, DType::fp32, 10) == 0);
  options.momentum = 0.9;
  CHECK(optimizer_bytes(options, 1000, DType::fp32, 10) == 4000);
  options.name = "adamw";
  CHECK(optimizer_bytes(options, 1000, DType::fp64, 10) == 16000);
  CHECK(optimizer_bytes(options, 1000, DType::bf16, 10) == 8000);
  options.name = "lamb";
  CHECK(optimizer_bytes(options, 1000, DType::fp32, 10) == 8160);
}

TEST_CASE("updates over shards are the updates of the whole") {
  Setup setup;
  for (const OptimizerOptions& options : all_options()) {
    INFO(text_of(options));
    ByHand hand{options, numbers(0)};
    std::vector<double> values = numbers(0);
    // Elements 0 to 15 on one rank, the others on another: the third parameter is cut after 3 of its 9 elements.
    const std::int64_t cut = 16;
    const std::vector<UpdateSegment> low = {kSegments[0], kSegments[1], {.offset = 13, .count = 3}};
    const std::vector<UpdateSegment> high = {{.offset = 0, .count = 6}};
    const std::unique_ptr<Optimizer> first = make_optimizer(options), second = make_optimizer(options);
    first->allocate(*setup.device, cut, DType::fp64, low);
    second->allocate(*setup.device, kElements - cut, DType::fp64, high);
    for (int update = 1; update <= 3; ++update) {
      std::vector<double> grads = numbers(static_cast<std::uint64_t>(update));
      const auto step_of = [&](std::int64_t begin, std::int64_t count, double share_of_weights,
                               double share_of_direction, std::int64_t segment) {
        OptimizerStep step;
        step.values = Tensor(values.data() + begin, DType::fp64, {count});
        step.grads = Tensor(grads.data() + begin, DType::fp64, {count});
        step.lr = 0.05;
        step.update = update;
        step.sum_over_shards = [=](Tensor norms) {
          norms.data<double>()[2 * segment] += share_of_weights;
          norms.data<double>()[2 * segment + 1] += share_of_direction;
        };
        return step;
      };
      // What the other rank would send: the squares of its part of weights and direction, found by a step on copies by
      // hand.
      ByHand parts = hand;
      double squares[2][2] = {{0, 0}, {0, 0}};
      for (std::int64_t e = 13; e < 22; ++e) {
        const auto i = static_cast<std::size_t>(e);
        const double d = parts.direction(i, grads[i], options.weight_decay, 0.05, update);
        squares[e < cut ? 0 : 1][0] += parts.values[i] * parts.values[i];
        squares[e < cut ? 0 : 1][1] += d * d;
      }
      hand.step(grads, 0.05, 1.0, update);
      first->step(*setup.backend, step_of(0, cut, squares[1][0], squares[1][1], 2));
      second->step(*setup.backend, step_of(cut, kElements - cut, squares[0][0], squares[0][1], 0));
      CHECK(worst_difference(values, hand.values) < 1e-13);
    }
  }
}

TEST_CASE("weights that go from one range to another have the bits of an update in place") {
  Setup setup;
  for (const OptimizerOptions& options : all_options()) {
    INFO(options.name);
    const std::unique_ptr<Optimizer> in_place = make_optimizer(options), across = make_optimizer(options);
    for (Optimizer* optimizer : {in_place.get(), across.get()}) {
      optimizer->allocate(*setup.device, kElements, DType::fp64, kSegments);
    }
    std::vector<double> values = numbers(1), slots[2] = {values, values};
    for (const UpdateSegment& segment : kSegments) {  // what the first update finds in the other range is of no account
      std::fill_n(slots[1].begin() + segment.offset, segment.count, NAN);
    }
    for (int update = 1; update <= 3; ++update) {
      std::vector<double> grads = numbers(static_cast<std::uint64_t>(10 + update)), same_grads = grads;
      std::vector<double>&from = slots[(update + 1) % 2], &to = slots[update % 2];
      const std::vector<double> before = from;
      OptimizerStep step{.values = Tensor(values.data(), DType::fp64, {kElements}),
                         .grads = Tensor(grads.data(), DType::fp64, {kElements}),
                         .lr = 0.05,
                         .grad_scale = 0.5,
                         .update = update};
      in_place->step(*setup.backend, step);
      step.values = Tensor(to.data(), DType::fp64, {kElements});
      step.grads = Tensor(same_grads.data(), DType::fp64, {kElements});
      step.from = Tensor(from.data(), DType::fp64, {kElements});
      across->step(*setup.backend, step);
      CHECK(to == values);
      CHECK(from == before);
    }
  }
}

TEST_CASE("an update in parts has the bits of one at once, and leaves the other segments alone") {
  Setup setup;
  for (const OptimizerOptions& options : all_options()) {
    INFO(options.name);
    const std::unique_ptr<Optimizer> whole = make_optimizer(options), parts = make_optimizer(options);
    for (Optimizer* optimizer : {whole.get(), parts.get()}) {
      optimizer->allocate(*setup.device, kElements, DType::fp64, kSegments);
    }
    std::vector<double> at_once = numbers(1), in_parts = at_once;
    for (int update = 1; update <= 3; ++update) {
      std::vector<double> first_grads = numbers(static_cast<std::uint64_t>(10 + update)), second_grads = first_grads;
      const auto step_of = [&](std::vector<double>& values, std::vector<double>& grads, std::int64_t first,
                               std::int64_t count) {
        return OptimizerStep{.values = Tensor(values.data(), DType::fp64, {kElements}),
                             .grads = Tensor(grads.data(), DType::fp64, {kElements}),
                             .lr = 0.05,
                             .grad_scale = 0.5,
                             .update = update,
                             .first_segment = first,
                             .segment_count = count};
      };
      whole->step(*setup.backend, step_of(at_once, first_grads, 0, -1));
      const std::vector<double> before = in_parts;
      parts->step(*setup.backend, step_of(in_parts, second_grads, 1, -1));
      for (std::size_t i = 0; i < 8; ++i) CHECK(in_parts[i] == before[i]);
      CHECK(in_parts != before);
      parts->step(*setup.backend, step_of(in_parts, second_grads, 0, 1));
      CHECK(in_parts == at_once);
    }
    std::vector<double> grads = numbers(1);
    CHECK_THROWS(parts->step(*setup.backend, {.values = Tensor(in_parts.data(), DType::fp64, {kElements}),
                                              .grads = Tensor(grads.data(), DType::fp64, {kElements}),
                                              .first_segment = 2,
                                              .segment_count = 2}));
  }
}

TEST_CASE("LAMB leaves a parameter of zeros or without a gradient to Adam's step") {
  Setup setup;
  OptimizerOptions options;
  options.name = "lamb";
  const std::unique_ptr<Optimizer> optimizer = make_optimizer(options);
  optimizer->allocate(*setup.device, 4, DType::fp64, {{.offset = 0, .count = 2}, {.offset = 2, .count = 2}});
  std::vector<double> values = {0.0, 0.0, 1.0, 2.0}, grads = {1.0, -1.0, 0.0, 0.0};
  optimizer->step(
      *setup.backend,
      {.values = Tensor(values.data(), DType::fp64, {4}), .grads = Tensor(grads.data(), DType::fp64, {4}), .lr = 0.1});
  CHECK(values[0] == Approx(-0.1).epsilon(1e-6));
  CHECK(values[1] == Approx(0.1).epsilon(1e-6));
  CHECK(values[2] == 1.0);
  CHECK(values[3] == 2.0);
}

TEST_CASE("steps that do not fit the optimizer are refused") {
  Setup setup;
  const std::unique_ptr<Optimizer> optimizer = make_optimizer({.name = "adam"});
  CHECK_THROWS(optimizer->allocate(*setup.device, 5, DType::fp64, {{.offset = 3, .count = 3}}));
  const std::unique_ptr<Optimizer> other = make_optimizer({.name = "adam"});
  other->allocate(*setup.device, 5, DType::fp64, {{.offset = 0, .count = 5}});
  CHECK_THROWS(other->allocate(*setup.device, 5, DType::fp64, {{.offset = 0, .count = 5}}));
  std::vector<double> four(4, 1.0), five(5, 1.0);
  const Tensor small(four.data(), DType::fp64, {4}), right(five.data(), DType::fp64, {5});
  CHECK_THROWS(other->step(*setup.backend, {.values = small, .grads = right}));
  CHECK_THROWS(other->step(*setup.backend, {.values = right, .grads = right, .update = 0}));
  CHECK_THROWS_WITH(make_optimizer({.name = "adagrad"}), ContainsSubstring("adagrad"));
}

TEST_CASE("clipping scales to the largest norm, as in PyTorch") {
  CHECK(clip_scale(0.5, 1.0) == 1.0);
  CHECK(clip_scale(4.0, 1.0) == 1.0 / 4.000001);
  CHECK(clip_scale(1.0, 1.0) == 1.0 / 1.000001);
  CHECK(clip_scale(4.0, 0.0) == 1.0);
  CHECK(clip_scale(0.0, 1.0) == 1.0);
  CHECK(clip_scale(std::numeric_limits<double>::infinity(), 1.0) == 0.0);
}

namespace {

OptimizerOptions read(const std::string& json) {
  const ConfigDocument document = ConfigDocument::parse(json, "run.json");
  const OptimizerOptions options = read_optimizer_options(document.root());
  document.finish();
  return options;
}

}  // namespace

TEST_CASE("optimizers have PyTorch's defaults") {
  const OptimizerOptions sgd = read("{}");
  CHECK(sgd.name == "sgd");
  CHECK(sgd.lr == 0.01);
  CHECK(sgd.momentum == 0.0);
  CHECK_FALSE(sgd.nesterov);
  CHECK(sgd.weight_decay == 0.0);
  CHECK(sgd.clip_grad_norm == 0.0);
  const OptimizerOptions adam = read(R"({"name": "adam"})");
  CHECK(adam.lr == 0.001);
  CHECK(adam.beta1 == 0.9);
  CHECK(adam.beta2 == 0.999);
  CHECK(adam.epsilon == 1e-8);
  CHECK(adam.weight_decay == 0.0);
  CHECK(read(R"({"name": "adamw"})").weight_decay == 0.01);
  CHECK(read(R"({"name": "lamb"})").epsilon == 1e-6);
}

TEST_CASE("optimizer keys are read") {
  const OptimizerOptions sgd = read(
      R"({"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": true, "weight_decay": 1e-4, "clip_grad_norm": 1})");
  CHECK(sgd.lr == 0.1);
  CHECK(sgd.momentum == 0.9);
  CHECK(sgd.nesterov);
  CHECK(sgd.weight_decay == 1e-4);
  CHECK(sgd.clip_grad_norm == 1.0);
  const OptimizerOptions lamb = read(R"({"name": "lamb", "lr": 2, "beta1": 0.5, "beta2": 0.6, "epsilon": 1e-3})");
  CHECK(lamb.lr == 2.0);
  CHECK(lamb.beta1 == 0.5);
  CHECK(lamb.beta2 == 0.6);
  CHECK(lamb.epsilon == 1e-3);
}

TEST_CASE("optimizer keys that cannot act are problems") {
  CHECK_THROWS_WITH(read(R"({"name": "adma"})"), ContainsSubstring("did you mean \"adam\""));
  CHECK_THROWS_WITH(read(R"({"name": "adma", "beta1": 0.5})"), !ContainsSubstring("beta1"));
  CHECK_THROWS_WITH(read(R"({"name": "adam", "momentum": 0.9})"), ContainsSubstring("belongs to sgd; adam has none"));
  CHECK_THROWS_WITH(read(R"({"beta1": 0.9})"), ContainsSubstring("belongs to adam, adamw and lamb; sgd has none"));
  CHECK_THROWS_WITH(read(R"({"momentun": 0.9})"), ContainsSubstring("did you mean \"momentum\""));
  CHECK_THROWS_WITH(read(R"({"lr": -1})"), ContainsSubstring("/lr"));
  CHECK_THROWS_WITH(read(R"({"momentum": 1})"), ContainsSubstring("below 1"));
  CHECK_THROWS_WITH(read(R"({"name": "adam", "beta2": 1.5})"), ContainsSubstring("/beta2"));
  CHECK_THROWS_WITH(read(R"({"name": "adam", "epsilon": 0})"), ContainsSubstring("above 0"));
  CHECK_THROWS_WITH(read(R"({"nesterov": true})"), ContainsSubstring("momentum above 0"));
}
