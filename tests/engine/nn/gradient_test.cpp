#include <cmath>

#include "engine/base/random.h"
#include "tests/engine/nn/stage_rig.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// Compares gradients of a whole model with central differences of its loss, dropout included: the masks depend on
/// sample and update alone, so the loss is a plain function of the weights.
struct DifferenceCheck {
  Chain& chain;
  TestBatch& batch;
  double step;
  double tolerance;

  double loss() {
    batch.metrics = {0.0, 0.0};
    chain.forward(0, batch);
    return batch.loss();
  }

  /// Slope of the loss along `direction`, nonzero only inside [offset, offset + count).
  double slope(const std::vector<double>& direction, std::int64_t offset) {
    double* const values = chain.pieces()[0].store->values().data<double>() + offset;
    const std::vector<double> before(values, values + direction.size());
    const auto at = [&](double distance) {
      for (std::size_t i = 0; i < direction.size(); ++i) values[i] = before[i] + distance * direction[i];
      return loss();
    };
    const double ahead = at(step), behind = at(-step);
    std::copy(before.begin(), before.end(), values);
    return (ahead - behind) / (2.0 * step);
  }

  void run() {
    loss();
    chain.clear();
    chain.backward(0, batch);
    const ParamStore& store = *chain.pieces()[0].store;
    for (const Param& param : store.params()) {
      INFO(param.spec.name);
      const Tensor range = store.grads().range(param.offset, param.count);
      const std::vector<double> gradient(range.data<double>(), range.data<double>() + param.count);
      std::vector<double> direction(gradient.size());
      const RandomStream random(5, RandomUse::synthetic, static_cast<std::uint64_t>(param.id));
      double product = 0.0;
      for (std::size_t i = 0; i < direction.size(); ++i) {
        direction[i] = random.normal(i) / std::sqrt(static_cast<double>(param.count));
        product += direction[i] * gradient[i];
      }
      CHECK(slope(direction, param.offset) == Approx(product).epsilon(tolerance).margin(tolerance));
      for (std::uint64_t probe = 0; probe < 4; ++probe) {
        const std::uint32_t element = random.below(1000 + probe, static_cast<std::uint32_t>(param.count));
        INFO("element " << element);
        CHECK(slope({1.0}, param.offset + element) == Approx(gradient[element]).epsilon(tolerance).margin(tolerance));
      }
    }
  }
};

/// A linear layer that leaves residual sums to its caller.
class PlainLinear final : public Layer {
 public:
  explicit PlainLinear(std::unique_ptr<Layer> linear) : linear_(std::move(linear)) {}
  std::string name() const override { return linear_->name(); }
  std::vector<ParamSpec> param_specs() const override { return linear_->param_specs(); }
  Shape output_shape(const Shape& x) const override { return linear_->output_shape(x); }
  std::vector<TensorSpec> saved_specs(const Shape& x, DType dtype) const override {
    return linear_->saved_specs(x, dtype);
  }
  double flops(const Shape& x) const override { return linear_->flops(x); }
  void forward(const LayerIo& io) const override {
    CHECK_FALSE(io.residual.defined());
    linear_->forward(io);
  }
  void backward(const LayerIo& io) const override { linear_->backward(io); }

 private:
  std::unique_ptr<Layer> linear_;
};

class PlainLinearFactory final : public LayerFactory {
 public:
  std::unique_ptr<Layer> linear(std::string name, const LinearOptions& options) const override {
    return std::make_unique<PlainLinear>(LayerFactory::linear(std::move(name), options));
  }
};

void check_differences(const TinyModel& model, double step, double tolerance) {
  Chain chain(model, {});
  chain.scramble_values();
  const auto batch = make_batch(model, {11, 4, 29, 4000000001}, 6);
  DifferenceCheck{chain, *batch, step, tolerance}.run();
}

}  // namespace

TEST_CASE("gradients of a whole GPT-2 with dropout are the slopes of its loss") {
  check_differences(tiny_gpt(0.2), 1e-5, 1e-8);
}

TEST_CASE("gradients of a whole GPT-2 without dropout are the slopes of its loss") {
  check_differences(tiny_gpt(0.0), 1e-5, 1e-8);
}

TEST_CASE("gradients of a GPT-2 whose vocabulary is padded are the slopes of its loss") {
  check_differences(tiny_gpt_variant(0.1, Recompute::nothing, 16), 1e-5, 1e-8);
}

TEST_CASE("what is computed again changes no bit, and takes less memory") {
  ByName saved;
  std::int64_t saved_bytes = 0;
  for (const Recompute recompute : {Recompute::nothing, Recompute::gelu, Recompute::gelu_and_norms}) {
    const TinyModel model = tiny_gpt_variant(0.2, recompute);
    Chain chain(model, {});
    chain.scramble_values();
    const auto batch = make_batch(model, {3, 1, 2}, 3);
    chain.forward(0, *batch);
    chain.backward(0, *batch);
    const std::int64_t bytes = chain.pieces().front().stage->slot_bytes();
    if (recompute == Recompute::nothing) {
      saved = chain.gradients();
    } else {
      CHECK(chain.gradients() == saved);
      CHECK(bytes < saved_bytes);
    }
    saved_bytes = bytes;
  }
}

TEST_CASE("a block adds the residual itself where something is dropped or its linear layers do not") {
  for (const double dropout : {0.0, 0.2}) {
    const TinyModel model = tiny_gpt(dropout);
    TinyModel plain = model;
    plain.build = [&model](const LayerFactory&) { return model.build(PlainLinearFactory()); };
    const auto gradients_of = [](const TinyModel& of) {
      Chain chain(of, {});
      chain.scramble_values();
      const auto batch = make_batch(of, {3, 1, 2}, 3);
      chain.forward(0, *batch);
      chain.backward(0, *batch);
      return chain.gradients();
    };
    CHECK(gradients_of(plain) == gradients_of(model));
  }
}

TEST_CASE("gradients of a whole VGG with dropout are the slopes of its loss") {
  // Steps small enough that no ReLU and no maximum changes sides.
  check_differences(tiny_vgg(0.4), 1e-6, 1e-7);
}

TEST_CASE("gradients of linear layers with GELU and without bias are the slopes of the loss") {
  check_differences(tiny_mlp(), 1e-5, 1e-8);
}

TEST_CASE("a prediction whose target is -1 counts for nothing") {
  const TinyModel model = tiny_gpt(0.0);
  Chain chain(model, {});
  const auto all = make_batch(model, {1, 2}, 2), some = make_batch(model, {1, 2}, 2);
  for (std::size_t i = 0; i < 5; ++i) some->targets[5 + i] = -1;
  const auto alone = make_batch(model, {1}, 2);
  chain.forward(0, *some);
  chain.backward(0, *some);
  const ByName ignored = chain.gradients();
  chain.clear();
  chain.forward(0, *alone);
  chain.backward(0, *alone);
  CHECK(some->metrics == alone->metrics);
  CHECK(worst_relative_difference(ignored, chain.gradients()) < 1e-14);
}
