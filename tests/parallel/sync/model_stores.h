#pragma once
// Stores of real models, without memory: what plans are made of.

#include <string>
#include <vector>

#include "parallel/sync/shard_map.h"
#include "workloads/models.h"

namespace pdl::testing {

struct ModelStore {
  explicit ModelStore(const std::string& json, std::int64_t outputs)
      : layers(make(json, outputs)),
        store(make_param_store(layers, 0, static_cast<int>(layers.size()))),
        users(parameter_users(layers, store)) {}

  static LayerList make(const std::string& json, std::int64_t outputs) {
    const ConfigDocument document = ConfigDocument::parse(json, "model");
    return make_model(read_model_options(document.root()), outputs).build(LayerFactory());
  }
  int layer_count() const { return static_cast<int>(layers.size()); }

  LayerList layers;
  ParamStore store;
  std::vector<std::vector<int>> users;
};

inline ModelStore vgg16() { return ModelStore(R"({"model": "vgg16"})", 1000); }
inline ModelStore gpt2_medium() { return ModelStore(R"({"model": "gpt2-medium"})", 50257); }

/// Parameters of the given sizes, named p0, p1 and so on.
inline ParamStore plain_store(const std::vector<std::int64_t>& sizes) {
  std::vector<ParamSpec> specs;
  std::vector<int> numbers;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    specs.push_back({.name = "p" + std::to_string(i), .global_shape = {sizes[i]}, .decay = i % 2 == 0});
    numbers.push_back(static_cast<int>(i));
  }
  return ParamStore(std::move(specs), numbers, numbers);
}

}  // namespace pdl::testing
