#include "workloads/models.h"

#include <cmath>
#include <map>
#include <set>

#include "engine/nn/stage.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

ModelOptions read(const std::string& json) {
  const ConfigDocument document = ConfigDocument::parse(json, "run.json");
  const ModelOptions options = read_model_options(document.root());
  document.finish();
  return options;
}

LayerList layers_of(const std::string& json, std::int64_t outputs) {
  return make_model(read(json), outputs).build(LayerFactory());
}

std::int64_t parameters_of(const std::string& json, std::int64_t outputs) {
  return parameter_count(layers_of(json, outputs));
}

std::vector<std::string> names_of(const LayerList& layers) {
  std::vector<std::string> names;
  for (const auto& layer : layers) names.push_back(layer->name());
  return names;
}

double flops_of(const std::string& json, std::int64_t outputs) {
  return make_model(read(json), outputs).training_flops_per_sample;
}

}  // namespace

TEST_CASE("models have their published numbers of parameters") {
  std::map<std::string, std::int64_t> found;
  for (const ModelInfo& info : model_infos()) found[info.name] = info.parameters;
  const std::int64_t tiny = 2 * (12 * 64 * 64 + 13 * 64) + 50257 * 64 + 128 * 64 + 2 * 64;
  const std::int64_t mini = 4 * (12 * 256 * 256 + 13 * 256) + 50257 * 256 + 128 * 256 + 2 * 256;
  const std::map<std::string, std::int64_t> expected = {
      {"gpt2-tiny", tiny},       {"gpt2-mini", mini},     {"gpt2-small", 124439808}, {"gpt2-medium", 354823168},
      {"gpt2-large", 774030080}, {"gpt2-xl", 1557611200}, {"vgg11", 132863336},      {"vgg16", 138357544}};
  CHECK(found == expected);
}

TEST_CASE("models are listed with family and summary") {
  std::set<std::string> families;
  for (const ModelInfo& info : model_infos()) {
    INFO(info.name);
    families.insert(info.family);
    CHECK_FALSE(info.summary.empty());
    CHECK(info.usual_outputs == (info.family == "gpt2" ? 50257 : 1000));
  }
  CHECK(families == std::set<std::string>{"gpt2", "vgg"});
}

TEST_CASE("GPT-2 is embedding, blocks, norm, tied head and loss") {
  const LayerList layers = layers_of(R"({"model": "gpt2-tiny", "sequence_length": 16})", 100);
  CHECK(names_of(layers) == std::vector<std::string>{"embedding", "h.0", "h.1", "ln_f", "lm_head", "loss"});
  const std::vector<Shape> shapes = layer_input_shapes(layers, {DType::int32, {16}}, 3);
  CHECK(shapes == std::vector<Shape>{{3, 16}, {3, 16, 64}, {3, 16, 64}, {3, 16, 64}, {3, 16, 64}, {3, 16, 100}, {}});
  const ParamSpec head = layers[4]->param_specs().front();
  CHECK(head.tied_to == "wte.weight");
  CHECK(layers[0]->param_specs()[1].global_shape == Shape{16, 64});
  for (const auto& layer : layers) {
    for (const ParamSpec& spec : layer->param_specs()) {
      INFO(spec.name);
      if (spec.name.ends_with("c_proj.weight")) {
        CHECK(spec.init.scale == Approx(0.02 / 2.0));
      } else if (spec.global_shape.rank() == 2) {
        CHECK(spec.init.scale == 0.02);
      }
    }
  }
}

TEST_CASE("GPT-2 of published size keeps 1024 positions however short its samples are") {
  CHECK(parameters_of(R"({"model": "gpt2-medium", "sequence_length": 128})", 50257) == 354823168);
  CHECK(parameters_of(R"({"model": "gpt2-medium", "sequence_length": 1024})", 50257) == 354823168);
  CHECK(parameters_of(R"({"model": "gpt2-medium", "sequence_length": 2048})", 50257) == 354823168 + 1024 * 1024);
  CHECK(parameters_of(R"({"model": "gpt2-medium", "positions": 512})", 50257) == 354823168 - 512 * 1024);
  CHECK(parameters_of(R"({"model": "gpt2-medium"})", 50304) == 354871296);
}

TEST_CASE("sizes of GPT-2 can be overridden") {
  const LayerList layers = layers_of(R"({"model": "gpt2-tiny", "layers": 3, "width": 96, "heads": 6})", 50);
  CHECK(layers.size() == 7);
  CHECK(parameter_count(layers) == 3 * (12 * 96 * 96 + 13 * 96) + 50 * 96 + 128 * 96 + 2 * 96);
}

TEST_CASE("operations of GPT-2 are 6 a matrix parameter and token, and causal attention") {
  const double matrices = 353453056.0, length = 1024.0;
  const double expected = length * (6.0 * matrices + 6.0 * 24.0 * 1024.0 * length);
  const std::string medium = R"({"model": "gpt2-medium", "sequence_length": 1024})";
  CHECK(flops_of(medium, 50257) == expected);
  CHECK(flops_of(medium, 50257) / 1024.0 == Approx(2.2717e9).epsilon(2e-5));
  CHECK_FALSE(make_model(read(medium), 50257).flops_formula.empty());
  // Three times the layers' own forward count, less what the formula gives no credit for: lookup, norm and loss.
  const LayerList layers = layers_of(medium, 50257);
  double forward = 0.0;
  for (const LayerInfo& info : describe_layers(layers, {DType::int32, {1024}}, DType::fp32)) {
    if (info.name != "embedding" && info.name != "ln_f" && info.name != "loss") forward += info.forward_flops;
  }
  CHECK(3.0 * forward == Approx(expected).epsilon(1e-12));
}

TEST_CASE("VGG carries torchvision's names") {
  CHECK(names_of(layers_of(R"({"model": "vgg11"})", 1000)) ==
        std::vector<std::string>{"features.0",   "features.2",   "features.3",   "features.5",   "features.6",
                                 "features.8",   "features.10",  "features.11",  "features.13",  "features.15",
                                 "features.16",  "features.18",  "features.20",  "flatten",      "classifier.0",
                                 "classifier.2", "classifier.3", "classifier.5", "classifier.6", "loss"});
  CHECK(names_of(layers_of(R"({"model": "vgg16"})", 1000)) ==
        std::vector<std::string>{"features.0",   "features.2",   "features.4",   "features.5",   "features.7",
                                 "features.9",   "features.10",  "features.12",  "features.14",  "features.16",
                                 "features.17",  "features.19",  "features.21",  "features.23",  "features.24",
                                 "features.26",  "features.28",  "features.30",  "flatten",      "classifier.0",
                                 "classifier.2", "classifier.3", "classifier.5", "classifier.6", "loss"});
}

TEST_CASE("VGG starts as in torchvision") {
  for (const auto& layer : layers_of(R"({"model": "vgg16"})", 1000)) {
    for (const ParamSpec& spec : layer->param_specs()) {
      INFO(spec.name);
      const bool matrix = spec.global_shape.rank() > 1;
      CHECK(spec.decay == matrix);
      if (!matrix) {
        CHECK(spec.init.kind == InitRule::Kind::zeros);
      } else if (spec.global_shape.rank() == 4) {
        CHECK(spec.init.scale == Approx(std::sqrt(2.0 / static_cast<double>(spec.global_shape[0] * 9))));
      } else {
        CHECK(spec.init.scale == 0.01);
      }
    }
  }
}

TEST_CASE("the narrow classifier of small images starts as PyTorch's linear layers do") {
  for (const auto& layer : layers_of(R"({"model": "vgg16", "image_size": 64})", 10)) {
    if (!layer->name().starts_with("classifier")) continue;
    for (const ParamSpec& spec : layer->param_specs()) {
      INFO(spec.name);
      if (spec.global_shape.rank() == 1) {
        CHECK(spec.init.kind == InitRule::Kind::zeros);
      } else {
        CHECK(spec.init.kind == InitRule::Kind::uniform);
        CHECK(spec.init.scale == Approx(1.0 / std::sqrt(static_cast<double>(spec.global_shape[1]))));
      }
    }
  }
}

TEST_CASE("VGG adapts its classifier to the image") {
  const auto map_before_flatten = [](const std::string& json, std::int64_t size) {
    const LayerList layers = layers_of(json, 10);
    const std::vector<Shape> shapes = layer_input_shapes(layers, {DType::fp32, {size, size, 3}}, 2);
    std::size_t flatten = 0;
    while (layers[flatten]->name() != "flatten") ++flatten;
    return std::pair(shapes[flatten], layers[flatten - 1]->name());
  };
  CHECK(map_before_flatten(R"({"model": "vgg16"})", 224) == std::pair(Shape{2, 7, 7, 512}, std::string("features.30")));
  CHECK(map_before_flatten(R"({"model": "vgg16", "image_size": 256})", 256) ==
        std::pair(Shape{2, 7, 7, 512}, std::string("avgpool")));
  CHECK(map_before_flatten(R"({"model": "vgg16", "image_size": 64})", 64) ==
        std::pair(Shape{2, 2, 2, 512}, std::string("features.30")));
  const std::int64_t features = 14714688;
  CHECK(parameters_of(R"({"model": "vgg16", "image_size": 256})", 1000) == 138357544);
  CHECK(parameters_of(R"({"model": "vgg16", "image_size": 32})", 10) ==
        features + 512 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10);
  CHECK(parameters_of(R"({"model": "vgg16", "image_size": 64, "classifier_width": 100})", 10) ==
        features + 2048 * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10);
  CHECK(parameters_of(R"({"model": "vgg16", "image_size": 32, "classifier_width": 0})", 10) ==
        features + 512 * 10 + 10);
}

TEST_CASE("PaLM's formula counts all parameters but the position embedding, and the whole of attention") {
  const ModelDescription model = make_model(read(R"({"model": "gpt2-medium", "sequence_length": 1024})"), 50257);
  const double parameters = 354823168.0 - 1024.0 * 1024.0, length = 1024.0;
  CHECK(model.palm_flops_per_sample == length * (6.0 * parameters + 12.0 * 24.0 * 1024.0 * length));
  CHECK(*model.palm_flops_per_sample / length == Approx(2.4246e9).epsilon(2e-5));
  CHECK_FALSE(model.palm_formula.empty());
  // A padded vocabulary is no work.
  const std::string padded = R"({"model": "gpt2-medium", "sequence_length": 1024, "make_vocab_size_divisible_by": 64})";
  CHECK(make_model(read(padded), 50257).palm_flops_per_sample == model.palm_flops_per_sample);
  CHECK_FALSE(make_model(read(R"({"model": "vgg16"})"), 1000).palm_flops_per_sample.has_value());
}

TEST_CASE("what is computed again counts as the formula counts, where something is") {
  const auto recomputed = [](const std::string& recompute) {
    return make_model(read(R"({"model": "gpt2-tiny", "recompute": ")" + recompute + "\"}"), 64)
        .recomputed_flops_per_sample;
  };
  CHECK_FALSE(recomputed("nothing").has_value());
  CHECK(recomputed("gelu") == 0.0);
  CHECK(recomputed("gelu_and_norms") == 0.0);
}

TEST_CASE("operations of VGG-16 are the published products") {
  // 3 x 15,470,264,320 multiply-adds, less the 86,704,128 of the first convolution's data gradient.
  CHECK(flops_of(R"({"model": "vgg16"})", 1000) == 2.0 * (3.0 * 15470264320.0 - 86704128.0));
  CHECK(flops_of(R"({"model": "vgg16"})", 1000) == Approx(92.648e9).epsilon(1e-5));
  double forward = 0.0;
  const ModelDescription model = make_model(read(R"({"model": "vgg16"})"), 1000);
  for (const LayerInfo& info : describe_layers(model.build(LayerFactory()), model.sample_input, DType::fp32)) {
    const bool product = info.parameters > 0;
    if (product) forward += info.forward_flops;
  }
  CHECK(forward == 2.0 * 15470264320.0);
}

TEST_CASE("models tell what samples they take") {
  const ModelDescription text = make_model(read(R"({"model": "gpt2-small", "sequence_length": 77})"), 50257);
  CHECK(text.name == "gpt2-small");
  CHECK(text.sample_input.dtype == DType::int32);
  CHECK(text.sample_input.shape == Shape{77});
  CHECK(text.sample_target.shape == Shape{77});
  CHECK(text.predictions_per_sample == 77);
  const ModelOptions options = read(R"({"model": "vgg11", "image_size": 64})");
  CHECK(options.sample_input.shape == Shape{64, 64, 3});
  const ModelDescription images = make_model(options, 10);
  CHECK(images.sample_input.dtype == DType::fp32);
  CHECK(images.sample_input.shape == Shape{64, 64, 3});
  CHECK(images.sample_target.shape == Shape{1});
  CHECK(images.predictions_per_sample == 1);
  CHECK_THROWS(make_model(options, 0));
}

TEST_CASE("model keys that cannot be are problems, all at once") {
  CHECK_THROWS_WITH(read("{}"), ContainsSubstring("\"model\" is missing"));
  CHECK_THROWS_WITH(read(R"({"model": "vgg-16"})"), ContainsSubstring("did you mean \"vgg16\""));
  CHECK_THROWS_WITH(read(R"({"model": "vgg-16", "image_size": 32})"), !ContainsSubstring("image_size"));
  CHECK_THROWS_WITH(read(R"({"model": "gpt2-tiny", "image_size": 32})"), ContainsSubstring("unknown key"));
  CHECK_THROWS_WITH(read(R"({"model": "vgg16", "sequence_length": 32})"), ContainsSubstring("unknown key"));
  CHECK_THROWS_WITH(read(R"({"model": "gpt2-tiny", "heads": 3})"), ContainsSubstring("nearest: 2"));
  CHECK_THROWS_WITH(read(R"({"model": "gpt2-tiny", "positions": 64})"), ContainsSubstring("at least sequence_length"));
  CHECK_THROWS_WITH(read(R"({"model": "vgg16", "image_size": 100})"), ContainsSubstring("nearest: 96 or 128"));
  CHECK_THROWS_WITH(read(R"({"model": "vgg16", "dropout": 1})"), ContainsSubstring("below 1"));
  const std::string both = R"({"model": "gpt2-tiny", "heads": 3, "dropout": 2})";
  CHECK_THROWS_WITH(read(both), ContainsSubstring("/heads") && ContainsSubstring("/dropout"));
}

TEST_CASE("gpt2-tiny and a small vgg11 train on the device") {
  for (const std::string& json : {std::string(R"({"model": "gpt2-tiny", "sequence_length": 8})"),
                                  std::string(R"({"model": "vgg11", "image_size": 32, "classifier_width": 16})")}) {
    INFO(json);
    const ModelDescription model = make_model(read(json), 10);
    const std::unique_ptr<Device> device = make_device({.kind = "cpu", .threads = 2});
    const std::unique_ptr<Backend> backend = make_backend(*device, {});
    const LayerList layers = model.build(LayerFactory());
    const int count = static_cast<int>(layers.size());
    ParamStore store = make_param_store(layers, 0, count);
    Stage stage(layers, 0, count, model.sample_input, 2, DType::fp32, *backend);
    store.allocate(*device, DType::fp32);
    store.initialise(*device, 1);
    stage.allocate(*device);
    const Slot slot = stage.make_slot(*device);

    const TensorSpec input = stage.input_spec(2);
    const Buffer memory = device->allocate(input.bytes(), MemoryKind::activations);
    std::vector<std::int32_t> targets(static_cast<std::size_t>(2 * model.predictions_per_sample), 3);
    std::vector<std::int64_t> ids = {0, 1};
    std::vector<double> metrics = {0.0, 0.0};
    MicroBatch batch;
    batch.size = 2;
    batch.input = memory.tensor(input.dtype, input.shape);
    batch.target = Tensor(targets.data(), DType::int32, {static_cast<std::int64_t>(targets.size())});
    batch.sample_ids = Tensor(ids.data(), DType::int64, {2});
    std::int64_t update = 0;
    batch.update = Tensor(&update, DType::int64, {1});
    batch.metrics = Tensor(metrics.data(), DType::fp64, {2});
    batch.gradient_scale = 1.0 / static_cast<double>(targets.size());
    std::vector<char> touched(store.params().size(), 0);
    stage.forward(store, store.values(), slot, batch, batch.input, true);
    stage.backward(store, store.values(), store.grads(), touched, slot, batch, batch.input, Tensor(), nullptr);
    CHECK(metrics[0] * batch.gradient_scale == Approx(std::log(10.0)).epsilon(0.05));
    for (const Param& param : store.params()) {
      double squares = 0.0;
      const float* const grads = store.grads().data<float>() + param.offset;
      for (std::int64_t i = 0; i < param.count; ++i) squares += static_cast<double>(grads[i]) * grads[i];
      INFO(param.spec.name);
      CHECK(std::isfinite(squares));
    }
  }
}
