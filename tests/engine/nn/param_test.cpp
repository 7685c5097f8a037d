#include "engine/nn/param.h"

#include <cmath>

#include "engine/base/random.h"
#include "tests/engine/nn/stage_rig.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

std::vector<double> initial_values(const ParamSpec& spec, int id = 3, std::uint64_t seed = 9) {
  std::vector<double> values(static_cast<std::size_t>(spec.shape().elements()));
  fill_initial_values(Tensor(values.data(), DType::fp64, spec.shape()), spec, id, seed);
  return values;
}

ParamSpec weight(std::string name, Shape shape) {
  return {.name = std::move(name), .global_shape = shape, .init = {InitRule::Kind::normal, 0.02}};
}

}  // namespace

TEST_CASE("a slice along any axis starts as that part of the whole parameter") {
  const Shape shape = {6, 5, 4, 3};
  const ParamSpec whole = weight("w", shape);
  const std::vector<double> all = initial_values(whole);
  for (int axis = 0; axis < 4; ++axis) {
    for (std::int64_t begin = 0; begin < shape[axis]; ++begin) {
      ParamSpec part = whole;
      part.slice = {.axis = axis, .begin = begin, .count = std::min<std::int64_t>(2, shape[axis] - begin)};
      const std::vector<double> held = initial_values(part);
      std::size_t next = 0;
      bool same = true;
      for (std::int64_t i = 0; i < shape.elements(); ++i) {
        const std::int64_t index[] = {i / 60, i / 12 % 5, i / 3 % 4, i % 3};
        if (index[axis] < begin || index[axis] >= begin + part.slice.count) continue;
        same = same && next < held.size() && held[next] == all[static_cast<std::size_t>(i)];
        ++next;
      }
      INFO("axis " << axis << ", from " << begin);
      CHECK(next == held.size());
      CHECK(same);
    }
  }
}

TEST_CASE("slices in groups: some channels of each pixel, and back into the whole") {
  ParamSpec part = weight("w", {4, 18});  // 3 pixels of 6 channels
  const std::vector<double> all = initial_values(part);
  std::vector<double> together(all.size(), 0.0);
  const Tensor whole(together.data(), DType::fp64, part.global_shape);
  for (std::int64_t begin = 0; begin < 6; begin += 2) {
    part.slice = {.axis = 1, .begin = begin, .count = 2, .groups = 3};
    CHECK(part.shape() == Shape{4, 6});
    std::vector<double> held = initial_values(part);
    for (std::size_t i = 0; i < held.size(); ++i) {
      const std::size_t row = i / 6, pixel = i % 6 / 2, channel = static_cast<std::size_t>(begin) + i % 2;
      CHECK(held[i] == all[row * 18 + pixel * 6 + channel]);
    }
    place_slice(whole, Tensor(held.data(), DType::fp64, part.shape()), part);
  }
  CHECK(together == all);
  std::vector<double> longer(100);
  CHECK_THROWS_AS(place_slice(whole, Tensor(longer.data(), DType::fp64, {100}), part), Error);
}

TEST_CASE("initial values are those of the rule, seed and parameter") {
  ParamSpec spec = weight("w", {100, 200});
  const std::vector<double> normal = initial_values(spec);
  double sum = 0.0, squares = 0.0;
  for (double value : normal) {
    sum += value;
    squares += value * value;
  }
  CHECK(std::abs(sum / 20000.0) < 0.02 * 4.0 / std::sqrt(20000.0));
  CHECK(std::sqrt(squares / 20000.0) == Approx(0.02).epsilon(0.03));
  CHECK(normal[7] == 0.02 * RandomStream(9, RandomUse::init, 3).normal(7));
  CHECK(initial_values(spec, 4) != normal);
  CHECK(initial_values(spec, 3, 10) != normal);
  CHECK(initial_values(spec) == normal);

  spec.init = {InitRule::Kind::uniform, 0.5};
  double largest = 0.0;
  for (double value : initial_values(spec)) largest = std::max(largest, std::abs(value));
  CHECK(largest < 0.5);
  CHECK(largest > 0.499);
  spec.init = {InitRule::Kind::ones};
  CHECK(initial_values(spec) == std::vector<double>(20000, 1.0));
  spec.init = {};
  CHECK(initial_values(spec) == std::vector<double>(20000, 0.0));
}

TEST_CASE("fp32 values are the rounded fp64 ones") {
  const ParamSpec spec = weight("w", {10, 10});
  const std::vector<double> wide = initial_values(spec);
  std::vector<float> narrow(100);
  fill_initial_values(Tensor(narrow.data(), DType::fp32, {10, 10}), spec, 3, 9);
  for (std::size_t i = 0; i < 100; ++i) CHECK(narrow[i] == static_cast<float>(wide[i]));
}

TEST_CASE("a store lays parameters end to end in registration order") {
  ParamSpec bias = {.name = "b", .global_shape = {3}, .decay = false};
  ParamSpec half = weight("c", {4, 2});
  half.slice = {.axis = 1, .begin = 1, .count = 1};
  const ParamStore store({weight("a", {3, 5}), bias, half}, {0, 0, 2}, {7, 8, 9});
  REQUIRE(store.params().size() == 3);
  CHECK(store.elements() == 15 + 3 + 4);
  CHECK(store.params()[1].offset == 15);
  CHECK(store.params()[2].offset == 18);
  CHECK(store.params()[2].count == 4);
  CHECK(store.params()[2].id == 9);
  CHECK(store.params()[2].layer == 2);
  CHECK(store.params()[2].spec.shape() == Shape{4, 1});
  const std::vector<UpdateSegment> segments = store.segments(false);
  REQUIRE(segments.size() == 3);
  CHECK(segments[1].offset == 15);
  CHECK(segments[1].count == 3);
  CHECK_FALSE(segments[1].decay);
  CHECK(segments[2].decay);
}

TEST_CASE("a tied parameter shares its target's range, or starts as its copy elsewhere") {
  const std::unique_ptr<Device> device = make_device({.kind = "cpu"});
  const LayerList layers = tiny_gpt(0.0).build(LayerFactory());
  const int count = static_cast<int>(layers.size());
  const ParamStore whole = make_param_store(layers, 0, count);
  CHECK(whole.owner(whole.registered() - 1) == 0);
  CHECK(parameter_count(layers) == whole.elements());

  ParamStore first = make_param_store(layers, 0, 2), last = make_param_store(layers, 2, count);
  CHECK(first.elements() + last.elements() == whole.elements() + 13 * 8);
  const Param& head = last.params().back();
  CHECK(head.spec.name == "lm_head.weight");
  CHECK(head.spec.tied_to == "wte.weight");
  CHECK(head.id == 0);
  CHECK(last.params().front().id == 14);  // two embeddings and one block of twelve come before
  for (ParamStore* store : {&first, &last}) {
    store->allocate(*device, DType::fp64);
    store->initialise(*device, 1);
  }
  const Tensor embedding = first.view(first.values(), 0);
  const Tensor copy = last.view(last.values(), static_cast<int>(last.params().size()) - 1);
  REQUIRE(embedding.shape() == copy.shape());
  for (std::int64_t i = 0; i < embedding.elements(); ++i) CHECK(embedding.data<double>()[i] == copy.data<double>()[i]);
}

TEST_CASE("a store without gradients takes memory for values only") {
  const std::unique_ptr<Device> device = make_device({.kind = "cpu"});
  ParamStore store({weight("a", {3, 5})}, {0}, {0});
  store.allocate(*device, DType::fp32, {.gradients = false});
  CHECK(device->memory().current()[MemoryKind::parameters] == 60);
  CHECK(device->memory().current()[MemoryKind::gradients] == 0);
}

TEST_CASE("broken lists of parameters are refused") {
  CHECK_THROWS_WITH(ParamStore({weight("a", {2}), weight("a", {2})}, {0, 0}, {0, 1}), ContainsSubstring("called a"));
  CHECK_THROWS(ParamStore({weight("a", {2})}, {}, {}));
  ParamSpec tied = weight("b", {3});
  tied.tied_to = "a";
  CHECK_THROWS_WITH(ParamStore({weight("a", {2}), tied}, {0, 0}, {0, 1}), ContainsSubstring("another shape"));
  LayerList layers;
  layers.push_back(LayerFactory().lm_head("head", 4, 5, "wte.weight"));
  CHECK_THROWS_WITH(make_param_store(layers, 0, 1), ContainsSubstring("wte.weight"));
}
