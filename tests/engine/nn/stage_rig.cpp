#include "tests/engine/nn/stage_rig.h"

#include <algorithm>
#include <cmath>

#include "engine/base/random.h"
#include "engine/nn/layers/transformer_block.h"

namespace pdl {
namespace {

constexpr std::uint64_t kSeed = 77;

InitRule normal(double deviation) { return {InitRule::Kind::normal, deviation}; }

double number(std::uint64_t id, std::uint64_t element) {
  return RandomStream(kSeed, RandomUse::synthetic, id).normal(element);
}

std::int32_t integer(std::uint64_t id, std::uint64_t element, std::int64_t bound) {
  return static_cast<std::int32_t>(
      RandomStream(kSeed, RandomUse::synthetic, id).below(element, static_cast<std::uint32_t>(bound)));
}

std::vector<double> to_doubles(const Tensor& tensor) {
  const auto count = static_cast<std::size_t>(tensor.elements());
  if (tensor.dtype() == DType::fp64) return {tensor.data<double>(), tensor.data<double>() + count};
  return {tensor.data<float>(), tensor.data<float>() + count};
}

const std::string& name_in_model(const ParamSpec& spec) { return spec.tied_to.empty() ? spec.name : spec.tied_to; }

}  // namespace

TinyModel tiny_gpt(double dropout) { return tiny_gpt_variant(dropout, Recompute::nothing); }

TinyModel tiny_gpt_variant(double dropout, Recompute recompute, std::int64_t rows) {
  TinyModel model;
  model.input = {DType::int32, {5}};
  model.predictions = 5;
  model.outputs = 13;
  model.build = [=](const LayerFactory& factory) {
    LayerList layers;
    layers.push_back(factory.embedding(
        "embedding", {.vocabulary = rows, .positions = 7, .width = 8, .dropout = dropout, .init_stddev = 0.3}));
    for (const char* name : {"h.0", "h.1"}) {
      layers.push_back(make_transformer_block(
          name, {.width = 8, .heads = 2, .layers = 2, .dropout = dropout, .recompute = recompute}, factory));
    }
    layers.push_back(factory.layernorm("ln_f", 8));
    layers.push_back(factory.lm_head("lm_head", 8, rows, "wte.weight"));
    layers.push_back(factory.loss("loss", 13));
    return layers;
  };
  return model;
}

TinyModel tiny_vgg(double dropout) {
  TinyModel model;
  model.input = {DType::fp32, {13, 12, 3}};
  model.outputs = 5;
  model.build = [dropout](const LayerFactory& factory) {
    const auto conv = [&](const char* name, std::int64_t in, std::int64_t out, Conv2dGeometry geometry) {
      return factory.conv2d(name, {.in = in,
                                   .out = out,
                                   .geometry = geometry,
                                   .activation = Activation::relu,
                                   .weight_init = normal(0.4),
                                   .bias_init = normal(0.1)});
    };
    const auto linear = [&](const char* name, std::int64_t in, std::int64_t out, Activation activation) {
      LinearOptions options;
      options.in = in;
      options.out = out;
      options.activation = activation;
      options.weight_init = normal(0.4);
      return factory.linear(name, options);
    };
    LayerList layers;
    layers.push_back(conv("features.0", 3, 4, {.kernel = 3, .stride = 1, .padding = 1}));
    layers.push_back(factory.max_pool("features.2", 2));                                   // [6, 6, 4]
    layers.push_back(conv("features.3", 4, 6, {.kernel = 5, .stride = 1, .padding = 2}));  // [6, 6, 6]
    layers.push_back(conv("features.5", 6, 5, {.kernel = 3, .stride = 2, .padding = 1}));  // [3, 3, 5]
    layers.push_back(factory.adaptive_avg_pool("avgpool", 2, 2));
    layers.push_back(factory.flatten("flatten"));
    layers.push_back(linear("classifier.0", 20, 9, Activation::relu));
    layers.push_back(factory.dropout("classifier.2", dropout, Split::none));
    layers.push_back(linear("classifier.3", 9, 5, Activation::none));
    layers.push_back(factory.loss("loss", 5));
    return layers;
  };
  return model;
}

TinyModel tiny_mlp() {
  TinyModel model;
  model.input = {DType::fp32, {6}};
  model.outputs = 4;
  model.build = [](const LayerFactory& factory) {
    LinearOptions first, second;
    first.in = 6;
    first.out = second.in = 7;
    second.out = 4;
    first.activation = Activation::gelu_tanh;
    first.weight_init = second.weight_init = normal(0.5);
    second.bias = false;
    LayerList layers;
    layers.push_back(factory.linear("first", first));
    layers.push_back(factory.layernorm("norm", 7));
    layers.push_back(factory.linear("second", second));
    layers.push_back(factory.loss("loss", 4));
    return layers;
  };
  return model;
}

std::unique_ptr<TestBatch> make_batch(const TinyModel& model, std::vector<std::int64_t> ids,
                                      std::int64_t global_samples, DType dtype) {
  auto batch = std::make_unique<TestBatch>();
  batch->ids = std::move(ids);
  const auto samples = static_cast<std::int64_t>(batch->ids.size());
  const std::int64_t inputs = model.input.shape.elements();
  for (std::int64_t id : batch->ids) {
    const auto sample = static_cast<std::uint64_t>(id);
    for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(inputs); ++i) {
      if (model.input.dtype == DType::int32) {
        batch->tokens.push_back(integer(sample, i, model.outputs));
      } else {
        batch->images.push_back(number(sample, i));
        batch->narrow_images.push_back(static_cast<float>(batch->images.back()));
      }
    }
    for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(model.predictions); ++i) {
      batch->targets.push_back(integer(sample, 100000 + i, model.outputs));
    }
  }
  Shape shape = {samples};
  const Shape& one = model.input.shape;
  if (one.rank() == 1) shape = {samples, one[0]};
  if (one.rank() == 3) shape = {samples, one[0], one[1], one[2]};
  MicroBatch& micro = batch->micro;
  micro.size = samples;
  if (model.input.dtype == DType::int32) {
    micro.input = Tensor(batch->tokens.data(), DType::int32, shape);
  } else if (dtype == DType::fp64) {
    micro.input = Tensor(batch->images.data(), DType::fp64, shape);
  } else {
    micro.input = Tensor(batch->narrow_images.data(), DType::fp32, shape);
  }
  micro.target = Tensor(batch->targets.data(), DType::int32, {samples, model.predictions});
  micro.sample_ids = Tensor(batch->ids.data(), DType::int64, {samples});
  micro.metrics = Tensor(batch->metrics.data(), DType::fp64, {2});
  micro.seed = kSeed;
  micro.update = Tensor(&batch->update, DType::int64, {1});
  micro.gradient_scale = 1.0 / static_cast<double>(global_samples * model.predictions);
  return batch;
}

Chain::Chain(const TinyModel& model, Settings settings)
    : device_(make_device({.kind = "cpu", .threads = 2})),
      backend_(make_backend(*device_, {.deterministic = true})),
      layers_(model.build(LayerFactory())),
      outputs_(static_cast<std::size_t>(settings.slots)) {
  std::vector<int> bounds = {0};
  bounds.insert(bounds.end(), settings.cuts.begin(), settings.cuts.end());
  bounds.push_back(static_cast<int>(layers_.size()));
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
    Piece piece;
    piece.store = std::make_unique<ParamStore>(make_param_store(layers_, bounds[i], bounds[i + 1]));
    std::vector<LayerRange> recomputed;
    for (const LayerRange& range : settings.recomputed) {
      if (range.first >= bounds[i] && range.second <= bounds[i + 1]) recomputed.push_back(range);
    }
    piece.stage = std::make_unique<Stage>(layers_, bounds[i], bounds[i + 1], model.input, settings.max_samples,
                                          settings.dtype, *backend_, recomputed);
    piece.store->allocate(*device_, settings.dtype);
    piece.store->initialise(*device_, kSeed);
    piece.stage->allocate(*device_);
    for (int slot = 0; slot < settings.slots; ++slot) piece.slots.push_back(piece.stage->make_slot(*device_));
    piece.touched.assign(piece.store->params().size(), 0);
    pieces_.push_back(std::move(piece));
  }
  for (auto& outputs : outputs_) outputs.resize(pieces_.size());
}

Tensor Chain::input_of(std::size_t piece, int slot, const TestBatch& batch) {
  return piece == 0 ? batch.micro.input : outputs_[static_cast<std::size_t>(slot)][piece - 1];
}

void Chain::forward(int slot, TestBatch& batch, bool training) {
  const auto s = static_cast<std::size_t>(slot);
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    Piece& piece = pieces_[i];
    outputs_[s][i] = piece.stage->forward(*piece.store, piece.store->values(), piece.slots[s], batch.micro,
                                          input_of(i, slot, batch), training);
  }
}

void Chain::backward(int slot, TestBatch& batch, GradientListener* listener) {
  Tensor dy;
  for (std::size_t i = pieces_.size(); i-- > 0;) {
    Piece& piece = pieces_[i];
    dy = piece.stage->backward(*piece.store, piece.store->values(), piece.store->grads(), piece.touched,
                               piece.slots[static_cast<std::size_t>(slot)], batch.micro, input_of(i, slot, batch), dy,
                               listener);
    hand_over_tied(i);
  }
}

void Chain::hand_over_tied(std::size_t from) {
  ParamStore& store = *pieces_[from].store;
  for (std::size_t p = 0; p < store.params().size(); ++p) {
    const ParamSpec& spec = store.params()[p].spec;
    if (spec.tied_to.empty()) continue;
    for (std::size_t to = 0; to < from; ++to) {
      ParamStore& target = *pieces_[to].store;
      for (std::size_t q = 0; q < target.params().size(); ++q) {
        if (target.params()[q].spec.name != spec.tied_to) continue;
        const Tensor mine = store.view(store.grads(), static_cast<int>(p));
        const Tensor theirs = target.view(target.grads(), static_cast<int>(q));
        if (pieces_[to].touched[q]) {
          backend_->add(theirs, mine, 1.0);
        } else {
          backend_->copy(theirs, mine);
        }
        pieces_[to].touched[q] = 1;
        pieces_[from].touched[p] = 0;  // the next backward starts a new part
      }
    }
  }
}

void Chain::clear() {
  for (Piece& piece : pieces_) std::fill(piece.touched.begin(), piece.touched.end(), 0);
}

void Chain::scramble_values() {
  for (Piece& piece : pieces_) {
    for (const Param& param : piece.store->params()) {
      const Tensor range = piece.store->values().range(param.offset, param.count);
      for (std::int64_t i = 0; i < param.count; ++i) {
        const double more = 0.2 * number(5000 + static_cast<std::uint64_t>(param.id), static_cast<std::uint64_t>(i));
        if (range.dtype() == DType::fp64) {
          range.data<double>()[i] += more;
        } else {
          range.data<float>()[i] += static_cast<float>(more);
        }
      }
    }
  }
}

ByName Chain::read(bool values) const {
  ByName all;
  for (const Piece& piece : pieces_) {
    for (std::size_t p = 0; p < piece.store->params().size(); ++p) {
      const Tensor flat = values ? piece.store->values() : piece.store->grads();
      // The first stage that has a tied parameter has all of its gradient.
      all.emplace(name_in_model(piece.store->params()[p].spec),
                  to_doubles(piece.store->view(flat, static_cast<int>(p))));
    }
  }
  return all;
}

double worst_relative_difference(const ByName& a, const ByName& b) {
  if (a.size() != b.size()) return INFINITY;
  double worst = 0.0;
  for (const auto& [name, numbers] : b) {
    const auto found = a.find(name);
    if (found == a.end() || found->second.size() != numbers.size()) return INFINITY;
    double difference = 0.0, size = 0.0;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      difference += (found->second[i] - numbers[i]) * (found->second[i] - numbers[i]);
      size += numbers[i] * numbers[i];
    }
    if (!(size > 0.0)) return INFINITY;
    const double relative = std::sqrt(difference / size);
    if (!(relative <= worst)) worst = relative;
  }
  return worst;
}

}  // namespace pdl
