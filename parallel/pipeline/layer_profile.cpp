#include "parallel/pipeline/layer_profile.h"

#include <functional>

#include "engine/base/config_reader.h"
#include "engine/nn/stage.h"

namespace pdl {
namespace {

constexpr int kLeastRepetitions = 3;
constexpr double kNanosecondsPerSecond = 1e9;

/// Mean seconds of `pass`, once it has run to warm up.
double time_of(const std::function<void()>& pass, Device& device, double seconds) {
  pass();
  const std::unique_ptr<Stopwatch> stopwatch = device.make_stopwatch();
  double total = 0.0;
  int repetitions = 0;
  while (repetitions < kLeastRepetitions || total < seconds) {
    const std::int64_t begin = stopwatch->mark();
    pass();
    total += stopwatch->seconds(begin, stopwatch->mark());
    ++repetitions;
  }
  return total / repetitions;
}

/// One layer, or the last one with the loss, over zeros.
class Specimen {
 public:
  Specimen(const LayerList& layers, int first, int last, const ModelDescription& model, std::int64_t samples,
           DType dtype, Device& device, Backend& backend)
      : store_(make_param_store(layers, first, last)),
        stage_(layers, first, last, model.sample_input, samples, dtype, backend),
        samples_(samples) {
    store_.allocate(device, dtype);
    stage_.allocate(device);
    slot_ = stage_.make_slot(device);
    const TensorSpec input = stage_.input_spec(samples), output = stage_.output_spec(samples);
    input_ = device.allocate(input.bytes(), MemoryKind::activations);
    x_ = input_.tensor(input.dtype, input.shape);
    if (!output.shape.empty()) {
      output_ = device.allocate(output.bytes(), MemoryKind::activations);
      dy_ = output_.tensor(output.dtype, output.shape);
    }
    const std::int64_t targets = model.sample_target.shape.elements() * samples;
    targets_ = device.allocate((targets + 3 * samples + 64) * size_of(DType::int64), MemoryKind::activations);
    batch_.size = samples;
    batch_.input = x_;
    batch_.sample_ids = targets_.tensor(DType::int64, Shape{samples});
    batch_.update = targets_.tensor(DType::int64, Shape{1}, samples * size_of(DType::int64));
    batch_.metrics = targets_.tensor(DType::fp64, Shape{2}, (samples + 1) * size_of(DType::int64));
    batch_.target = targets_.tensor(DType::int32, Shape{samples, model.sample_target.shape.elements()},
                                    (samples + 3) * size_of(DType::int64));
    touched_.assign(store_.params().size(), 1);  // as in all micro-batches but the first
  }

  void forward() { stage_.forward(store_, store_.values(), slot_, batch_, x_, true); }
  void backward() {
    stage_.backward(store_, store_.values(), store_.grads(), touched_, slot_, batch_, x_, dy_, nullptr);
  }

 private:
  ParamStore store_;
  Stage stage_;
  Slot slot_;
  std::int64_t samples_;
  Buffer input_, output_, targets_;
  Tensor x_, dy_;
  MicroBatch batch_;
  std::vector<char> touched_;
};

}  // namespace

LayerProfile measure_layers(const ModelDescription& model, std::int64_t samples, DType dtype, Device& device,
                            Backend& backend, double seconds) {
  const LayerList layers = model.build(LayerFactory());
  const int places = static_cast<int>(layers.size()) - 1;
  LayerProfile profile{.model = model.name, .samples = samples, .layers = {}};
  for (int layer = 0; layer < places; ++layer) {
    const int last = layer + 1 == places ? layer + 2 : layer + 1;
    Specimen specimen(layers, layer, last, model, samples, dtype, device, backend);
    LayerTime time{.name = layers[static_cast<std::size_t>(layer)]->name()};
    time.forward_s = time_of([&] { specimen.forward(); }, device, seconds);
    time.backward_s = time_of([&] { specimen.backward(); }, device, seconds);
    profile.layers.push_back(std::move(time));
  }
  return profile;
}

std::string to_json(const LayerProfile& profile) {
  std::string text =
      str("{\n  \"model\": \"", profile.model, "\",\n  \"samples\": ", profile.samples, ",\n  \"layers\": {");
  for (const LayerTime& layer : profile.layers) {
    text += str(&layer == profile.layers.data() ? "\n" : ",\n", "    \"", layer.name,
                "\": { \"forward_ns\": ", static_cast<std::int64_t>(layer.forward_s * kNanosecondsPerSecond),
                ", \"backward_ns\": ", static_cast<std::int64_t>(layer.backward_s * kNanosecondsPerSecond), " }");
  }
  return text + "\n  }\n}\n";
}

LayerProfile read_layer_profile(const std::string& path, const std::vector<std::string>& names) {
  const ConfigDocument document = ConfigDocument::load(path);
  const ConfigReader root = document.root();
  LayerProfile profile;
  profile.model = root.require<std::string>("model", "model that was measured");
  profile.samples = root.require<std::int64_t>("samples", "samples of the micro-batch that was measured", {1, 1e12});
  const ConfigReader layers = root.section("layers", "times by layer");
  for (const std::string& name : names) {
    const ConfigReader layer = layers.section(name, "one layer");
    const auto seconds = [&](const char* key) {
      return static_cast<double>(layer.require<std::int64_t>(key, "mean time", {0, 1e18})) / kNanosecondsPerSecond;
    };
    profile.layers.push_back({.name = name, .forward_s = seconds("forward_ns"), .backward_s = seconds("backward_ns")});
  }
  document.finish();
  return profile;
}

std::vector<LayerCost> measured_costs(std::vector<LayerCost> costs, const std::string& path, std::int64_t samples) {
  std::vector<std::string> names;
  for (const LayerCost& cost : costs) names.push_back(cost.name);
  const LayerProfile profile = read_layer_profile(path, names);
  const double scale = static_cast<double>(samples) / static_cast<double>(profile.samples);
  for (std::size_t i = 0; i < costs.size(); ++i) {
    costs[i].forward = profile.layers[i].forward_s * scale;
    costs[i].backward = profile.layers[i].backward_s * scale;
  }
  return costs;
}

}  // namespace pdl
