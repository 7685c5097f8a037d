#include "engine/nn/layer.h"

#include "engine/nn/layers/transformer_block.h"
#include "engine/nn/model.h"
#include "tests/engine/nn/stage_rig.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

std::vector<Shape> shapes_of(const TinyModel& model, std::int64_t samples) {
  return layer_input_shapes(model.build(LayerFactory()), model.input, samples);
}

}  // namespace

TEST_CASE("layers tell their output shapes") {
  CHECK(shapes_of(tiny_gpt(0.1), 3) ==
        std::vector<Shape>{{3, 5}, {3, 5, 8}, {3, 5, 8}, {3, 5, 8}, {3, 5, 8}, {3, 5, 13}, {}});
  CHECK(shapes_of(tiny_vgg(0.1), 2) == std::vector<Shape>{{2, 13, 12, 3},
                                                          {2, 13, 12, 4},
                                                          {2, 6, 6, 4},
                                                          {2, 6, 6, 6},
                                                          {2, 3, 3, 5},
                                                          {2, 2, 2, 5},
                                                          {2, 20},
                                                          {2, 9},
                                                          {2, 9},
                                                          {2, 5},
                                                          {}});
}

TEST_CASE("inputs of another width are refused by name") {
  const LayerFactory factory;
  LinearOptions linear;
  linear.in = 4;
  linear.out = 2;
  CHECK_THROWS_WITH(factory.linear("classifier.0", linear)->output_shape({3, 5}), ContainsSubstring("classifier.0"));
  CHECK_THROWS_WITH(factory.conv2d("features.0", {.in = 3, .out = 8})->output_shape({1, 8, 8, 4}),
                    ContainsSubstring("features.0"));
  CHECK_THROWS_WITH(factory.attention("h.0.attn", 3, 8, 0.0), ContainsSubstring("3 heads"));
}

TEST_CASE("forward operations are counted as two for a multiply-add") {
  const LayerFactory factory;
  LinearOptions linear;
  linear.in = 4;
  linear.out = 6;
  CHECK(factory.linear("l", linear)->flops({2, 3, 4}) == 2.0 * 2 * 3 * 4 * 6);
  CHECK(factory.conv2d("c", {.in = 3, .out = 8})->flops({2, 5, 5, 3}) == 2.0 * 2 * 5 * 5 * 9 * 3 * 8);
  const auto block = make_transformer_block("h.0", {.width = 8, .heads = 2, .layers = 1}, factory);
  // 12 C^2 products a token, and half of two T x T products of width C.
  CHECK(block->flops({2, 5, 8}) == 2.0 * 10 * 12 * 64 + 2.0 * 10 * 5 * 8);
  CHECK(factory.lm_head("head", 8, 13, "wte.weight")->flops({2, 5, 8}) == 2.0 * 10 * 8 * 13);
}

TEST_CASE("a block registers the published names, with shrunk residual projections") {
  const auto block = make_transformer_block("h.7", {.width = 8, .heads = 2, .layers = 8}, LayerFactory());
  std::vector<std::string> names;
  for (const ParamSpec& spec : block->param_specs()) {
    names.push_back(spec.name);
    const bool projection = spec.name.ends_with("c_proj.weight");
    if (spec.name.ends_with("weight") && spec.global_shape.rank() == 2) {
      CHECK(spec.init.kind == InitRule::Kind::normal);
      CHECK(spec.init.scale == (projection ? 0.02 / 4.0 : 0.02));
      CHECK(spec.decay);
    } else {
      CHECK(spec.init.kind == (spec.name.ends_with("weight") ? InitRule::Kind::ones : InitRule::Kind::zeros));
      CHECK_FALSE(spec.decay);
    }
  }
  CHECK(names == std::vector<std::string>{"h.7.ln_1.weight", "h.7.ln_1.bias", "h.7.attn.c_attn.weight",
                                          "h.7.attn.c_attn.bias", "h.7.attn.c_proj.weight", "h.7.attn.c_proj.bias",
                                          "h.7.ln_2.weight", "h.7.ln_2.bias", "h.7.mlp.c_fc.weight",
                                          "h.7.mlp.c_fc.bias", "h.7.mlp.c_proj.weight", "h.7.mlp.c_proj.bias"});
}

TEST_CASE("statistics are kept in fp32 at least") {
  const auto block = make_transformer_block("h.0", {.width = 8, .heads = 2, .layers = 1}, LayerFactory());
  for (const auto& [compute, statistics] : {std::pair(DType::fp64, DType::fp64), std::pair(DType::fp32, DType::fp32),
                                            std::pair(DType::bf16, DType::fp32)}) {
    int vectors = 0;
    for (const TensorSpec& spec : block->saved_specs({2, 5, 8}, compute)) {
      const bool is_statistics = spec.shape.rank() == 1 || spec.shape == Shape{2, 2, 5};
      CHECK(spec.dtype == (is_statistics ? statistics : compute));
      vectors += is_statistics ? 1 : 0;
    }
    CHECK(vectors == 5);  // mean and deviation of two norms, log-sum-exp of the scores
    for (const TensorSpec& spec : LayerFactory().loss("loss", 13)->saved_specs({2, 5, 13}, compute)) {
      CHECK(spec.dtype == statistics);
    }
  }
}

TEST_CASE("layers are described for plans") {
  const TinyModel model = tiny_gpt(0.1);
  const std::vector<LayerInfo> infos = describe_layers(model.build(LayerFactory()), model.input, DType::fp32);
  REQUIRE(infos.size() == 6);
  CHECK(infos[0].name == "embedding");
  CHECK(infos[0].parameters == 13 * 8 + 7 * 8);
  CHECK(infos[0].saved_bytes == 5 * 8 * 4);
  CHECK(infos[1].parameters == 12 * 64 + 13 * 8);
  CHECK(infos[1].output == Shape{1, 5, 8});
  // Output, two norm outputs, residual, attention output (5 C); qkv (3 C); hidden and its pre-activation (8 C);
  // statistics.
  CHECK(infos[1].saved_bytes == (5 * 8 * (5 + 3 + 8) + 4 * 5 + 2 * 5) * 4);
  CHECK(infos[4].parameters == 0);
  CHECK(infos[4].forward_flops == 2.0 * 5 * 8 * 13);
}

TEST_CASE("each dropout of a model has a place of its own") {
  MicroBatch batch;
  batch.size = 4;
  batch.seed = 42;
  std::int64_t update = 17;
  batch.update = Tensor(&update, DType::int64, {1});
  const std::unique_ptr<Device> device = make_device({.kind = "cpu"});
  const std::unique_ptr<Backend> backend = make_backend(*device, {});
  LayerIo io(*backend, batch);
  io.layer_index = 5;
  const DropoutKey key = io.dropout_key(0.3, 2);
  CHECK(key.rate == 0.3);
  CHECK(key.seed == 42);
  CHECK(key.update == &update);
  CHECK(key.site == 42);
  CHECK(key.samples == 4);
  io.training = false;
  CHECK(io.dropout_key(0.3, 2).rate == 0.0);
}
