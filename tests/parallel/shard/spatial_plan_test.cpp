// Which layers of the real models work on slices, what that sends, and what is refused with which advice.

#include "parallel/shard/spatial_plan.h"

#include "engine/base/config_reader.h"
#include "parallel/shard/image_rows.h"
#include "tests/support/catch.h"
#include "workloads/models.h"

using namespace pdl;

namespace {

ModelDescription model_of(const std::string& json, std::int64_t outputs = 1000) {
  const ConfigDocument document = ConfigDocument::parse(json, "test");
  return make_model(read_model_options(document.root()), outputs);
}

const ModelDescription& vgg16() {
  static const ModelDescription model = model_of(R"({"model": "vgg16"})");
  return model;
}

/// One convolution of images 32 x 32, then the loss.
ModelDescription model_with(const ConvOptions& options) {
  ModelDescription model;
  model.name = "small";
  model.sample_input = {DType::fp32, {32, 32, 3}};
  model.build = [options](const LayerFactory& factory) {
    LayerList layers;
    layers.push_back(factory.conv2d("conv", options));
    layers.push_back(factory.flatten("flatten"));
    layers.push_back(factory.loss("loss", 2));
    return layers;
  };
  return model;
}

}  // namespace

TEST_CASE("VGG-16 is divided up to the pool where heights stop dividing") {
  // 224 rows: pool5 sees 14, pool4 28, pool3 56, and 7 rows are no even number.
  CHECK(plan_spatial(vgg16(), 2).whole_from == "features.30");
  CHECK(plan_spatial(vgg16(), 4).whole_from == "features.23");
  CHECK(plan_spatial(vgg16(), 8).whole_from == "features.16");
  CHECK(plan_spatial(vgg16(), 7).whole_from == "flatten");
  CHECK(plan_spatial(vgg16(), 8).whole_input == Shape{1, 56, 56, 256});
  CHECK(plan_spatial(vgg16(), 1).layers.empty());
  const auto small = [](int parts) {
    return plan_spatial(model_of(R"({"model": "vgg11", "image_size": 32})", 10), parts).whole_from;
  };
  CHECK(small(2) == "features.20");
  CHECK(small(4) == "features.15");
  CHECK(small(32) == "features.2");
}

TEST_CASE("the halos of VGG-16 are as large as published") {
  std::int64_t forward = 0, backward = 0, convolutions = 0;
  for (const SpatialLayer& layer : plan_spatial(vgg16(), 2).layers) {
    forward += 2 * layer.halo * layer.input[2] * layer.input[3];
    backward += 2 * layer.halo * layer.input[2] * layer.out;
    convolutions += layer.halo;
    CHECK(layer.is_first == (layer.name == "features.0"));
  }
  CHECK(convolutions == 13);
  CHECK(forward == 259392);
  CHECK(backward == 329728);  // that of the first convolution, 28 672, serves nothing and is not sent
}

TEST_CASE("what cannot be divided is refused with the nearest numbers that can") {
  CHECK(obstacle_to_split(vgg16(), 1, 7).empty());
  CHECK(obstacle_to_split(vgg16(), 4, 8).empty());
  CHECK(obstacle_to_split(vgg16(), 3, 12) == "it does not divide the 224 rows of an image; nearest: 2 or 4");
  CHECK(obstacle_to_split(vgg16(), 4, 6) == "groups of so many do not make up 6 ranks; nearest: 2");
  CHECK(obstacle_to_split(vgg16(), 5, 3) == "it does not divide the 224 rows of an image; nearest: 1");
  CHECK(obstacle_to_split(model_of(R"({"model": "gpt2-tiny"})", 50), 2, 2) ==
        "gpt2-tiny has no convolutions; nearest: 1");
  const auto obstacle = [](const Conv2dGeometry& geometry, int parts) {
    return obstacle_to_split(model_with({.in = 3, .out = 4, .geometry = geometry}), parts, 32);
  };
  CHECK(obstacle({3, 1, 1}, 32).empty());
  CHECK_THAT(obstacle({2, 1, 1}, 2), StartsWith("the kernel of conv is even (2)"));
  CHECK_THAT(obstacle({3, 2, 1}, 2), StartsWith("conv changes the height"));
  CHECK_THAT(obstacle({3, 1, 0}, 2), StartsWith("conv changes the height"));
  CHECK(obstacle({5, 1, 2}, 32) == "slices of 1 rows are too low for conv; nearest: 16");
  CHECK_THROWS_AS(plan_spatial(vgg16(), 3), Error);
}

TEST_CASE("a rank keeps its rows of images") {
  class Numbered final : public Dataset {
   public:
    DatasetInfo info() const override { return {}; }
    std::int64_t size() const override { return 3; }
    TensorSpec input_spec() const override { return {DType::fp32, Shape{4, 2, 3}}; }
    TensorSpec target_spec() const override { return {DType::int32, Shape{1}}; }
    void read(std::int64_t id, Tensor input, Tensor target) const override {
      for (int i = 0; i < 24; ++i) input.data<float>()[i] = static_cast<float>(100 * id + i);
      target.data<std::int32_t>()[0] = static_cast<std::int32_t>(id);
    }
  } images;
  const ImageRows lower(images, 2, 2);
  CHECK(lower.input_spec().shape == Shape{2, 2, 3});
  CHECK(lower.size() == 3);
  CHECK(lower.staging() == nullptr);
  std::vector<float> pixels(12);
  std::int32_t label = 0;
  lower.read(2, Tensor(pixels.data(), DType::fp32, Shape{2, 2, 3}), Tensor(&label, DType::int32, Shape{1}));
  CHECK(pixels.front() == 212.0f);
  CHECK(pixels.back() == 223.0f);
  CHECK(label == 2);
}
