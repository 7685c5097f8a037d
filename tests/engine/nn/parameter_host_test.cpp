// Layers touch their parameters between before_layer and after_layer only, and wherever the host says: proved by a host
// that scatters them and makes them NaN outside these calls.

#include "engine/nn/parameter_host.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "tests/engine/nn/stage_rig.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

class ScatteringHost final : public ParameterHost {
 public:
  ScatteringHost(const ParamStore& store, const LayerList& layers) : store_(store), users_(layers.size()) {
    int registered = 0;
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
      for (std::size_t i = layers[layer]->param_specs().size(); i > 0; --i) {
        users_[layer].push_back(store.owner(registered++));
      }
    }
    for (const Param& param : store.params()) {
      values_.emplace_back(static_cast<std::size_t>(param.count), NAN);
      gradients_.emplace_back(static_cast<std::size_t>(param.count), NAN);
    }
  }

  void begin_pass(bool training) override { calls.push_back(training ? "training" : "evaluation"); }
  void before_layer(int position) override {
    calls.push_back("before " + std::to_string(position));
    for (int index : users_[static_cast<std::size_t>(position)]) {
      const Tensor real = store_.view(store_.values(), index);
      values_[static_cast<std::size_t>(index)].assign(real.data<double>(), real.data<double>() + real.elements());
    }
  }
  void after_layer(int position) override {
    calls.push_back("after " + std::to_string(position));
    for (int index : users_[static_cast<std::size_t>(position)]) {
      std::vector<double>& values = values_[static_cast<std::size_t>(index)];
      std::fill(values.begin(), values.end(), NAN);
    }
  }
  Tensor value(int index) override { return view(values_, index); }
  Tensor gradient(int index) override { return view(gradients_, index); }

  std::vector<std::string> calls;

 private:
  Tensor view(std::vector<std::vector<double>>& all, int index) {
    const auto i = static_cast<std::size_t>(index);
    return Tensor(all[i].data(), DType::fp64, store_.params()[i].spec.shape());
  }
  const ParamStore& store_;
  std::vector<std::vector<int>> users_;  ///< of each layer: parameters
  std::vector<std::vector<double>> values_, gradients_;
};

struct Recorder final : GradientListener {
  void gradient_ready(int index) override { heard.push_back(index); }
  std::vector<int> heard;
};

}  // namespace

TEST_CASE("passes over scattered parameters give the bits of passes over whole ranges") {
  for (const TinyModel& model : {tiny_gpt(0.2), tiny_vgg(0.4), tiny_mlp()}) {
    Chain chain(model, {});
    chain.scramble_values();
    const auto batch = make_batch(model, {5, 6, 7}, 3);
    chain.forward(0, *batch);
    Recorder whole;
    chain.backward(0, *batch, &whole);
    const std::vector<double> metrics = batch->metrics;

    Chain::Piece& piece = chain.pieces()[0];
    ScatteringHost host(*piece.store, chain.layers());
    batch->metrics = {0.0, 0.0};
    chain.clear();
    piece.stage->forward(*piece.store, host, piece.slots[0], batch->micro, batch->micro.input, true);
    Recorder scattered;
    piece.stage->backward(*piece.store, host, piece.touched, piece.slots[0], batch->micro, batch->micro.input, Tensor(),
                          &scattered);
    CHECK(batch->metrics == metrics);
    CHECK(scattered.heard == whole.heard);
    for (std::size_t i = 0; i < piece.store->params().size(); ++i) {
      INFO(piece.store->params()[i].spec.name);
      const Tensor expected = piece.store->view(piece.store->grads(), static_cast<int>(i));
      const Tensor found = host.gradient(static_cast<int>(i));
      CHECK(std::equal(found.data<double>(), found.data<double>() + found.elements(), expected.data<double>()));
    }
  }
}

TEST_CASE("an idle pass shows host and listener what a real one does") {
  const TinyModel model = tiny_gpt(0.0);
  Chain chain(model, {});
  const auto batch = make_batch(model, {1, 2}, 2);
  Chain::Piece& piece = chain.pieces()[0];
  ScatteringHost busy(*piece.store, chain.layers()), idle(*piece.store, chain.layers());
  Recorder at_work, at_rest;
  piece.stage->forward(*piece.store, busy, piece.slots[0], batch->micro, batch->micro.input, true);
  piece.stage->backward(*piece.store, busy, piece.touched, piece.slots[0], batch->micro, batch->micro.input, Tensor(),
                        &at_work);
  piece.stage->forward(*piece.store, busy, piece.slots[0], batch->micro, batch->micro.input, false);
  piece.stage->idle_pass(*piece.store, idle, true, &at_rest);
  piece.stage->idle_pass(*piece.store, idle, false, nullptr);
  CHECK(idle.calls == busy.calls);
  CHECK(std::set<int>(at_rest.heard.begin(), at_rest.heard.end()) ==
        std::set<int>(at_work.heard.begin(), at_work.heard.end()));
  CHECK(at_rest.heard.size() == piece.store->params().size());
  for (int index : at_rest.heard) {
    const Tensor gradient = idle.gradient(index);
    CHECK(std::all_of(gradient.data<double>(), gradient.data<double>() + gradient.elements(),
                      [](double value) { return value == 0.0; }));
  }
}

TEST_CASE("a store in blocks with gaps holds the same values, and only the ranges it is asked for") {
  const TinyModel model = tiny_gpt(0.0);
  Chain chain(model, {});
  const LayerList& layers = chain.layers();
  ParamStore dense = make_param_store(layers, 0, static_cast<int>(layers.size()));
  ParamStore spread = make_param_store(layers, 0, static_cast<int>(layers.size()));
  std::vector<std::int64_t> offsets;
  std::int64_t end = 3;
  for (std::size_t i = spread.params().size(); i-- > 0;) {  // back to front, five elements apart
    offsets.insert(offsets.begin(), end);
    end += spread.params()[i].count + 5;
  }
  spread.place(offsets, end);
  dense.allocate(chain.device(), DType::fp64);
  dense.initialise(chain.device(), 5);
  CHECK(spread.predicted_memory(DType::fp64, {.values = false}).total() == end * 8);
  const std::int64_t before = chain.device().memory().current().total();
  spread.allocate(chain.device(), DType::fp64, {.gradients = false});
  CHECK(chain.device().memory().current().total() == before + end * 8);
  spread.initialise(chain.device(), 5);
  double sum = 0.0, dense_sum = 0.0;
  for (std::int64_t i = 0; i < end; ++i) sum += std::abs(spread.values().data<double>()[i]);
  for (std::int64_t i = 0; i < dense.elements(); ++i) dense_sum += std::abs(dense.values().data<double>()[i]);
  CHECK(sum == Approx(dense_sum).epsilon(1e-12));  // gaps are zero
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const Tensor a = dense.view(dense.values(), static_cast<int>(i));
    const Tensor b = spread.view(spread.values(), static_cast<int>(i));
    CHECK(std::equal(a.data<double>(), a.data<double>() + a.elements(), b.data<double>()));
  }
  CHECK_THROWS_AS(spread.place(offsets, end), Error);
}
