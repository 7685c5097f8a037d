// Measured layer times, and the file that carries them.

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "parallel/pipeline/layer_profile.h"
#include "tests/support/catch.h"
#include "workloads/models.h"

using namespace pdl;

namespace {

ModelDescription model_of(const std::vector<std::string>& options) {
  const ConfigDocument document = ConfigDocument::parse("{}", "test", options);
  return make_model(read_model_options(document.root()), 10);
}

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() / ("pdl_profile_" + std::to_string(::getpid()) + ".json")) {
    std::ofstream(path_) << text;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

std::vector<std::string> names_of(const LayerProfile& profile) {
  std::vector<std::string> names;
  for (const LayerTime& layer : profile.layers) names.push_back(layer.name);
  return names;
}

}  // namespace

TEST_CASE("every layer is measured, with little memory, and the file gives the times back", "[pipeline]") {
  const std::unique_ptr<Device> device = make_device({.kind = "cpu"});
  const std::unique_ptr<Backend> backend = make_backend(*device, {});
  backend->set_stream(device->compute_stream());
  for (const ModelDescription& model :
       {model_of({"model=gpt2-tiny", "sequence_length=16"}),
        model_of({"model=vgg11", "image_size=32", "width_multiplier=0.125", "classifier_width=16"})}) {
    const LayerProfile profile = measure_layers(model, 2, DType::fp32, *device, *backend, 0.0);
    CHECK(device->memory().current().total() == 0);
    CHECK(profile.layers.size() + 1 == model.build(LayerFactory()).size());
    CHECK(profile.samples == 2);
    for (const LayerTime& layer : profile.layers) {
      INFO(layer.name);
      CHECK(layer.forward_s > 0.0);
      CHECK(layer.backward_s > 0.0);
    }
    const TemporaryFile file(to_json(profile));
    const LayerProfile read = read_layer_profile(file.path(), names_of(profile));
    CHECK(read.model == model.name);
    CHECK(read.samples == 2);
    for (std::size_t i = 0; i < read.layers.size(); ++i) {
      CHECK(std::abs(read.layers[i].forward_s - profile.layers[i].forward_s) <= 1e-9);
      CHECK(std::abs(read.layers[i].backward_s - profile.layers[i].backward_s) <= 1e-9);
    }
  }
}

TEST_CASE("a profile of another model is refused", "[pipeline]") {
  const TemporaryFile file(R"({"model": "m", "samples": 4, "layers": {"a": {"forward_ns": 10, "backward_ns": 20}}})");
  CHECK(read_layer_profile(file.path(), {"a"}).layers[0].backward_s == 20e-9);
  CHECK_THROWS_WITH(read_layer_profile(file.path(), {"a", "b"}), ContainsSubstring("/layers/b/forward_ns"));
  CHECK_THROWS_WITH(read_layer_profile(file.path(), {"b"}), ContainsSubstring("unknown key \"a\""));
  CHECK_THROWS_AS(read_layer_profile("/no/such/file.json", {"a"}), ConfigError);
}
