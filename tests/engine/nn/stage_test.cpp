#include "engine/nn/stage.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/engine/nn/stage_rig.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

struct Case {
  std::string name;
  TinyModel model;
};

std::vector<Case> models() { return {{"gpt", tiny_gpt(0.2)}, {"vgg", tiny_vgg(0.4)}, {"mlp", tiny_mlp()}}; }

struct Outcome {
  std::vector<double> metrics;
  ByName gradients;
  bool operator==(const Outcome&) const = default;
};

/// Loss and gradients of one batch, from fresh gradients.
Outcome run(Chain& chain, TestBatch& batch, int slot = 0) {
  batch.metrics = {0.0, 0.0};
  chain.clear();
  chain.forward(slot, batch);
  chain.backward(slot, batch);
  return {batch.metrics, chain.gradients()};
}

struct Recorder final : GradientListener {
  void gradient_ready(int index) override { heard.push_back(index); }
  std::vector<int> heard;
};

}  // namespace

TEST_CASE("two micro-batches add up to one batch") {
  for (const auto& [name, model] : models()) {
    INFO(name);
    Chain chain(model, {});
    chain.scramble_values();
    const auto whole = make_batch(model, {5, 6, 7, 8}, 4);
    const Outcome expected = run(chain, *whole);
    const auto first = make_batch(model, {5, 6, 7}, 4), second = make_batch(model, {8}, 4);
    chain.clear();
    for (TestBatch* part : {first.get(), second.get()}) {
      chain.forward(0, *part);
      chain.backward(0, *part);
    }
    CHECK(first->metrics[0] + second->metrics[0] == Approx(expected.metrics[0]).epsilon(1e-13));
    CHECK(first->metrics[1] + second->metrics[1] == expected.metrics[1]);
    CHECK(worst_relative_difference(chain.gradients(), expected.gradients) < 1e-12);
  }
}

TEST_CASE("a model cut into stages gives the bits of the whole model") {
  for (const auto& [name, model] : models()) {
    Chain whole(model, {});
    whole.scramble_values();
    const auto batch = make_batch(model, {9, 3, 12}, 3);
    const Outcome expected = run(whole, *batch);
    const int layers = static_cast<int>(whole.layers().size());
    std::vector<std::vector<int>> all_cuts;
    for (int cut = 1; cut < layers; ++cut) all_cuts.push_back({cut});
    for (int cut = 2; cut < layers; ++cut) all_cuts.push_back({1, cut});
    std::vector<int> everywhere(static_cast<std::size_t>(layers - 1));
    std::iota(everywhere.begin(), everywhere.end(), 1);
    all_cuts.push_back(everywhere);
    for (const std::vector<int>& cuts : all_cuts) {
      INFO(name << " cut before layer " << cuts.front() << ", " << cuts.size() + 1 << " stages");
      Chain cut(model, {.cuts = cuts});
      cut.scramble_values();
      CHECK(cut.values() == whole.values());
      CHECK(run(cut, *batch) == expected);
    }
  }
}

TEST_CASE("slots keep micro-batches in flight apart, in any order") {
  for (const auto& [name, model] : models()) {
    INFO(name);
    Chain one(model, {.max_samples = 2});
    const auto a = make_batch(model, {1, 2}, 6), b = make_batch(model, {3, 4}, 6), c = make_batch(model, {5, 6}, 6);
    for (TestBatch* batch : {b.get(), c.get(), a.get()}) {
      one.forward(0, *batch);
      one.backward(0, *batch);
    }
    Chain several(model, {.cuts = {2, 3}, .max_samples = 2, .slots = 3});
    Chain several_whole(model, {.max_samples = 2, .slots = 3});
    several_whole.forward(2, *a);
    several_whole.forward(0, *b);
    several_whole.backward(0, *b);
    several_whole.forward(1, *c);
    several_whole.backward(1, *c);
    several_whole.backward(2, *a);
    CHECK(several_whole.gradients() == one.gradients());

    several.forward(0, *a);
    several.forward(1, *b);
    several.forward(2, *c);
    several.backward(1, *b);
    several.backward(2, *c);
    several.backward(0, *a);
    CHECK(worst_relative_difference(several.gradients(), one.gradients()) < 1e-14);
  }
}

TEST_CASE("a slot takes smaller batches, and no larger ones") {
  for (const auto& [name, model] : models()) {
    INFO(name);
    const auto small = make_batch(model, {21, 22, 23}, 3), full = make_batch(model, {1, 2, 3, 4, 5}, 5);
    Chain fitting(model, {.max_samples = 3}), roomy(model, {.max_samples = 5});
    const Outcome expected = run(fitting, *small);
    run(roomy, *full);
    CHECK(run(roomy, *small) == expected);
    CHECK_THROWS_WITH(fitting.forward(0, *full), ContainsSubstring("3 samples"));
  }
}

TEST_CASE("running forward again changes nothing: recomputed activations are the same") {
  for (const auto& [name, model] : models()) {
    INFO(name);
    Chain chain(model, {.cuts = {2}});
    const auto batch = make_batch(model, {2, 4}, 2), other = make_batch(model, {3, 5, 8, 9}, 4);
    const Outcome expected = run(chain, *batch);
    chain.forward(0, *other);
    CHECK(run(chain, *batch) == expected);
  }
}

TEST_CASE("backward runs through the weights it is given, not through the newest") {
  for (const auto& [name, model] : models()) {
    INFO(name);
    Chain chain(model, {});
    const auto batch = make_batch(model, {2, 4}, 2);
    const Outcome expected = run(chain, *batch);
    Chain::Piece& piece = chain.pieces()[0];
    const Buffer stash = chain.device().allocate(piece.store->values().bytes(), MemoryKind::weight_versions);
    const Tensor old = stash.tensor(DType::fp64, piece.store->values().shape());
    chain.backend().copy(old, piece.store->values());
    const MicroBatch& micro = batch->micro;
    piece.stage->forward(*piece.store, old, piece.slots[0], micro, micro.input, true);
    chain.scramble_values();
    chain.clear();
    piece.stage->backward(*piece.store, old, piece.store->grads(), piece.touched, piece.slots[0], micro, micro.input,
                          Tensor(), nullptr);
    CHECK(chain.gradients() == expected.gradients);
  }
}

TEST_CASE("gradients arrive in the reverse of registration, each once, the tied one last") {
  for (const auto& [name, model] : models()) {
    INFO(name);
    Chain chain(model, {});
    const auto batch = make_batch(model, {2, 4}, 2);
    for (int pass = 0; pass < 2; ++pass) {
      Recorder recorder;
      chain.forward(0, *batch);
      chain.backward(0, *batch, &recorder);
      std::vector<int> reversed(chain.pieces()[0].store->params().size());
      std::iota(reversed.rbegin(), reversed.rend(), 0);
      CHECK(recorder.heard == reversed);
    }
  }
  Chain gpt(tiny_gpt(0.1), {});
  const ParamStore& store = *gpt.pieces()[0].store;
  CHECK(store.params().front().spec.name == "wte.weight");
  CHECK(store.registered() == static_cast<int>(store.params().size()) + 1);
}

TEST_CASE("a gradient is complete when its listener hears of it") {
  struct Snapshot final : GradientListener {
    explicit Snapshot(ParamStore& of) : store(of) {}
    void gradient_ready(int index) override {
      const Tensor view = store.view(store.grads(), index);
      seen[store.params()[static_cast<std::size_t>(index)].spec.name].assign(view.data<double>(),
                                                                             view.data<double>() + view.elements());
    }
    ParamStore& store;
    ByName seen;
  };
  for (const auto& [name, model] : models()) {
    INFO(name);
    Chain chain(model, {});
    const auto batch = make_batch(model, {2, 4}, 2);
    Snapshot snapshot(*chain.pieces()[0].store);
    chain.forward(0, *batch);
    chain.backward(0, *batch, &snapshot);
    CHECK(snapshot.seen == chain.gradients());
  }
}

TEST_CASE("a stage takes exactly the memory that it announces") {
  for (const auto& [name, model] : models()) {
    INFO(name);
    Chain chain(model, {.max_samples = 3, .slots = 2});
    const MemoryByKind& held = chain.device().memory().current();
    const Chain::Piece& piece = chain.pieces()[0];
    const std::int64_t parameters = piece.store->elements() * size_of(DType::fp64);
    CHECK(held[MemoryKind::activations] == 2 * piece.stage->slot_bytes() + piece.stage->scratch_bytes());
    CHECK(held[MemoryKind::workspace] == piece.stage->workspace_bytes());
    CHECK(held[MemoryKind::parameters] == parameters);
    CHECK(held[MemoryKind::gradients] == parameters);
    CHECK(held.total() == chain.device().memory().peak_total());

    std::int64_t saved = 0;
    for (const LayerInfo& layer : describe_layers(chain.layers(), model.input, DType::fp64)) saved += layer.saved_bytes;
    CHECK(3 * saved <= piece.stage->slot_bytes());
    CHECK(piece.stage->slot_bytes() <= 3 * saved + 64 * 12 * static_cast<std::int64_t>(chain.layers().size()));
  }
}

TEST_CASE("training and evaluation steps take no memory after set-up") {
  for (const auto& [name, model] : models()) {
    INFO(name);
    Chain chain(model, {.cuts = {1, 3}, .slots = 2});
    const auto batch = make_batch(model, {2, 4}, 2);
    chain.device().seal();
    CHECK_NOTHROW(chain.forward(0, *batch));
    CHECK_NOTHROW(chain.forward(1, *batch, false));
    CHECK_NOTHROW(chain.backward(0, *batch));
    CHECK_THROWS(chain.device().allocate(64, MemoryKind::workspace));
    chain.device().unseal();
  }
}

TEST_CASE("evaluation is the model without dropout, and keeps the logits") {
  for (const auto& make : {tiny_gpt, tiny_vgg}) {
    const TinyModel with = make(0.3), without = make(0.0);
    Chain dropping(with, {}), plain(without, {});
    const auto batch = make_batch(with, {1, 2, 3}, 3);
    plain.forward(0, *batch);
    const std::vector<double> expected = batch->metrics;
    batch->metrics = {0.0, 0.0};
    dropping.forward(0, *batch, false);
    CHECK(batch->metrics == expected);
    batch->metrics = {0.0, 0.0};
    dropping.forward(0, *batch, true);
    CHECK(batch->metrics[0] != expected[0]);
  }
}

TEST_CASE("dropout depends on sample and update, not on the place in the batch") {
  for (const auto& make : {tiny_gpt, tiny_vgg}) {
    const TinyModel model = make(0.3);
    Chain chain(model, {});
    const auto loss_of = [&](std::vector<std::int64_t> ids, std::int64_t update) {
      const auto batch = make_batch(model, std::move(ids), 1);
      batch->update = update;
      chain.forward(0, *batch);
      return batch->metrics[0];
    };
    CHECK(loss_of({7}, 1) + loss_of({8}, 1) == Approx(loss_of({8, 7}, 1)).epsilon(1e-13));
    CHECK(loss_of({7}, 1) != loss_of({7}, 2));
  }
}

TEST_CASE("metrics add up over forward passes") {
  const TinyModel model = tiny_gpt(0.0);
  Chain chain(model, {});
  const auto batch = make_batch(model, {1, 2, 3}, 3);
  chain.forward(0, *batch, false);
  const std::vector<double> once = batch->metrics;
  chain.forward(0, *batch, false);
  CHECK(batch->metrics[0] == Approx(2.0 * once[0]).epsilon(1e-14));
  CHECK(batch->metrics[1] == 2.0 * once[1]);
  CHECK(once[0] > 0.0);
  CHECK(once[1] == std::floor(once[1]));
}

TEST_CASE("fp32 follows fp64") {
  for (const auto& [name, model] : models()) {
    INFO(name);
    Chain wide(model, {}), narrow(model, {.dtype = DType::fp32});
    wide.scramble_values();
    narrow.scramble_values();
    const auto batch = make_batch(model, {1, 2, 3}, 3);
    const auto narrow_batch = make_batch(model, {1, 2, 3}, 3, DType::fp32);
    const Outcome expected = run(wide, *batch), found = run(narrow, *narrow_batch);
    CHECK(found.metrics[0] == Approx(expected.metrics[0]).epsilon(1e-5));
    CHECK(found.metrics[1] == expected.metrics[1]);
    CHECK(worst_relative_difference(narrow.values(), wide.values()) < 2e-7);
    CHECK(worst_relative_difference(found.gradients, expected.gradients) < 1e-4);
  }
}

TEST_CASE("a stage tells what it takes and hands on") {
  const TinyModel gpt = tiny_gpt(0.1), vgg = tiny_vgg(0.1);
  Chain text(gpt, {.cuts = {2}}), images(vgg, {.cuts = {3}});
  const auto same = [](const TensorSpec& a, const TensorSpec& b) { return a.dtype == b.dtype && a.shape == b.shape; };
  CHECK(same(text.pieces()[0].stage->input_spec(3), {DType::int32, {3, 5}}));
  CHECK(same(text.pieces()[0].stage->output_spec(3), {DType::fp64, {3, 5, 8}}));
  CHECK(same(text.pieces()[1].stage->input_spec(3), {DType::fp64, {3, 5, 8}}));
  CHECK(text.pieces()[1].stage->output_spec(3).shape.empty());
  CHECK(same(images.pieces()[0].stage->input_spec(1), {DType::fp64, {1, 13, 12, 3}}));
  CHECK(same(images.pieces()[1].stage->input_spec(2), {DType::fp64, {2, 6, 6, 6}}));
  CHECK(text.pieces()[0].stage->forward_flops(2) + text.pieces()[1].stage->forward_flops(2) ==
        Chain(gpt, {}).pieces()[0].stage->forward_flops(2));
}

namespace {

struct Names final : RangeListener {
  explicit Names(std::vector<std::string>& to) : names(to) {}
  void push(const std::string& name) override { names.push_back(name); }
  void pop() override { names.push_back(")"); }
  std::vector<std::string>& names;
};

/// What the chain's only stage tells a profiler in a step.
std::vector<std::string> names_of_step(Chain& chain, TestBatch& batch) {
  std::vector<std::string> names;
  chain.device().name_ranges_to(std::make_unique<Names>(names));
  chain.pieces()[0].stage->allocate(chain.device());  // where a stage asks who listens
  run(chain, batch);
  return names;
}

}  // namespace

TEST_CASE("layers tell a profiler their names, from the outside of each pass") {
  const TinyModel model = tiny_mlp();
  Chain chain(model, {});
  const auto batch = make_batch(model, {0, 1}, 2);
  std::vector<std::string> expected;
  for (const auto& layer : chain.layers()) expected.insert(expected.end(), {layer->name() + " forward", ")"});
  for (std::size_t i = chain.layers().size(); i-- > 0;) {
    expected.insert(expected.end(), {chain.layers()[i]->name() + " backward", ")"});
  }
  CHECK(names_of_step(chain, *batch) == expected);
}

TEST_CASE("recomputed layers give the same bits and keep only their inputs") {
  using Ranges = std::vector<LayerRange>;
  const TinyModel text = tiny_gpt(0.2), images = tiny_vgg(0.4);
  const std::vector<std::pair<TinyModel, std::vector<Ranges>>> cases = {
      {text, {{{1, 2}}, {{1, 2}, {2, 3}}, {{1, 3}}, {{0, 4}}, {{2, 4}}}},
      {images, {{{0, 3}, {3, 6}}, {{1, 2}}, {{2, 8}}, {{0, 8}}}}};
  for (const auto& [model, all_ranges] : cases) {
    const auto batch = make_batch(model, {9, 3, 12}, 3), other = make_batch(model, {4, 5}, 3);
    for (const std::vector<int>& cuts : {std::vector<int>{}, std::vector<int>{3}}) {
      const Chain::Settings plain = {.cuts = cuts, .max_samples = 3, .slots = 2};
      Chain whole(model, plain);
      whole.scramble_values();
      const Outcome expected = run(whole, *batch);
      for (const Ranges& ranges : all_ranges) {
        INFO(model.outputs << " outputs, layers " << ranges.front().first << " to " << ranges.front().second << ", "
                           << ranges.size() << " ranges, " << cuts.size() << " cuts");
        Chain::Settings settings = plain;
        settings.recomputed = ranges;
        Chain chain(model, settings);
        chain.scramble_values();
        CHECK(run(chain, *batch) == expected);
        // Another micro-batch goes forward in between: what is recomputed may lie over what was there.
        batch->metrics = {0.0, 0.0};
        chain.clear();
        chain.forward(0, *batch);
        chain.forward(1, *other);
        chain.backward(0, *batch);
        CHECK(batch->metrics == expected.metrics);
        CHECK(chain.gradients() == expected.gradients);
        std::int64_t kept = 0, needed = 0, held = 0;
        for (const Chain::Piece& piece : whole.pieces()) kept += piece.stage->slot_bytes();
        for (const Chain::Piece& piece : chain.pieces()) {
          needed += piece.stage->slot_bytes();
          held += 2 * piece.stage->slot_bytes() + piece.stage->scratch_bytes();
        }
        CHECK(needed <= kept);
        if (cuts.empty()) CHECK((needed < kept || ranges == Ranges{{1, 2}}));  // a pool alone has nothing to drop
        CHECK(chain.device().memory().current()[MemoryKind::activations] == held);
      }
    }
  }
}

TEST_CASE("recomputed layers go forward twice, just before they go backward") {
  const TinyModel model = tiny_gpt(0.2);
  Chain chain(model, {.recomputed = {{1, 3}}});
  const std::vector<std::string> names = names_of_step(chain, *make_batch(model, {0, 1}, 2));
  const std::vector<std::string> expected = {"ln_f backward", ")", "h.0 forward again", ")", "h.1 forward again", ")",
                                             "h.1 backward",  ")", "h.0 backward",      ")"};
  const auto found = std::search(names.begin(), names.end(), expected.begin(), expected.end());
  CHECK(found != names.end());
  CHECK(names.size() == 2 * (2 * chain.layers().size() + 2));
}

TEST_CASE("what the loss writes over is never recomputed") {
  const TinyModel model = tiny_gpt(0.0);
  CHECK_THROWS_WITH(Chain(model, {.recomputed = {{4, 5}}}), ContainsSubstring("overwrites its input"));
  CHECK_THROWS_WITH(Chain(model, {.recomputed = {{4, 6}}}), ContainsSubstring("overwrites its input"));
}

namespace {

/// Hands on the first samples of a micro-batch and drops the others.
class First final : public Layer {
 public:
  explicit First(std::int64_t samples) : samples_(samples) {}
  std::string name() const override { return "first samples"; }
  Shape output_shape(const Shape& x) const override { return x.with_first(std::min(samples_, x[0])); }
  std::vector<TensorSpec> saved_specs(const Shape&, DType) const override { return {}; }
  double flops(const Shape&) const override { return 0.0; }
  MicroBatch output_batch(const MicroBatch& batch) const override {
    MicroBatch part = batch;
    part.size = std::min(samples_, batch.size);
    part.target = batch.target.rows(0, part.size);
    part.sample_ids = batch.sample_ids.rows(0, part.size);
    return part;
  }
  void forward(const LayerIo& io) const override { io.backend.copy(io.y, io.x.rows(0, io.y.shape()[0])); }
  void backward(const LayerIo& io) const override {
    io.backend.fill(io.dx, 0.0);
    io.backend.copy(io.dx.rows(0, io.dy.shape()[0]), io.dy);
  }

 private:
  std::int64_t samples_;
};

}  // namespace

TEST_CASE("layers behind one that hands fewer samples on work on those, and on none at all") {
  const TinyModel whole = tiny_mlp();
  for (const std::int64_t samples : {0, 1, 3}) {
    INFO(samples << " samples are handed on");
    TinyModel cut = whole;
    cut.build = [&](const LayerFactory& factory) {
      LayerList layers = whole.build(factory);
      layers.insert(layers.begin() + 1, std::make_unique<First>(samples));
      return layers;
    };
    Chain chain(cut, {}), reference(whole, {});
    const auto batch = make_batch(cut, {5, 6, 7, 8}, 4);
    Outcome expected{{0.0, 0.0}, reference.gradients()};
    if (samples > 0) {
      const std::vector<std::int64_t> ids = {5, 6, 7};
      expected = run(reference, *make_batch(whole, {ids.begin(), ids.begin() + samples}, 4));
    } else {
      for (auto& [name, gradient] : expected.gradients) gradient.assign(gradient.size(), 0.0);
    }
    Recorder recorder;
    for (const bool again : {false, true}) {  // the second time, gradients are added to what is there
      batch->metrics = {0.0, 0.0};
      chain.forward(0, *batch);
      chain.backward(0, *batch, &recorder);
      CHECK(batch->metrics == expected.metrics);
      if (again) {
        for (auto& [name, gradient] : expected.gradients) {
          for (double& value : gradient) value *= 2.0;
        }
      }
      if (samples == 0) CHECK(chain.gradients() == expected.gradients);
      if (samples > 0) CHECK(worst_relative_difference(chain.gradients(), expected.gradients) < 1e-14);
    }
    CHECK(recorder.heard.size() == 2 * chain.gradients().size());
  }
}
