#include "engine/nn/model.h"

#include <map>
#include <tuple>
#include <utility>

namespace pdl {
namespace {

Shape with_samples(const Shape& sample, std::int64_t samples) {
  switch (sample.rank()) {
    case 1:
      return {samples, sample[0]};
    case 2:
      return {samples, sample[0], sample[1]};
    case 3:
      return {samples, sample[0], sample[1], sample[2]};
    default:
      PDL_CHECK(false, "samples have one to three extents, not ", sample.to_string());
  }
  return {};
}

}  // namespace

std::vector<Shape> layer_input_shapes(const LayerList& layers, const TensorSpec& sample_input, std::int64_t samples) {
  std::vector<Shape> shapes = {with_samples(sample_input.shape, samples)};
  for (const auto& layer : layers) shapes.push_back(layer->output_shape(shapes.back()));
  return shapes;
}

std::vector<LayerInfo> describe_layers(const LayerList& layers, const TensorSpec& sample_input, DType dtype) {
  const std::vector<Shape> shapes = layer_input_shapes(layers, sample_input, 1);
  std::vector<LayerInfo> infos;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    LayerInfo info{.name = layers[i]->name(), .output = shapes[i + 1]};
    for (const ParamSpec& spec : layers[i]->param_specs()) {
      if (spec.tied_to.empty()) info.parameters += spec.shape().elements();
    }
    info.saved_bytes = shapes[i + 1].elements() * size_of(dtype);
    for (const TensorSpec& spec : layers[i]->saved_specs(shapes[i], dtype)) info.saved_bytes += spec.bytes();
    info.forward_flops = layers[i]->flops(shapes[i]);
    infos.push_back(std::move(info));
  }
  return infos;
}

std::int64_t parameter_count(const LayerList& layers) {
  std::int64_t count = 0;
  for (const auto& layer : layers) {
    for (const ParamSpec& spec : layer->param_specs()) {
      if (spec.tied_to.empty()) count += spec.global_shape.elements();
    }
  }
  return count;
}

ParamStore make_param_store(const LayerList& layers, int first, int last) {
  std::vector<ParamSpec> specs;
  std::vector<int> numbers, ids;
  std::map<std::string, std::pair<int, InitRule>> registered;
  int next = 0;
  for (int layer = 0; layer < static_cast<int>(layers.size()); ++layer) {
    for (ParamSpec& spec : layers[static_cast<std::size_t>(layer)]->param_specs()) {
      int id = next++;
      if (spec.tied_to.empty()) {
        registered.emplace(spec.name, std::pair(id, spec.init));
      } else {
        // A tied parameter is its target, also where it has to have a range of its own: it starts from the same values.
        const auto target = registered.find(spec.tied_to);
        PDL_CHECK(target != registered.end(), spec.name, " is tied to ", spec.tied_to,
                  ", which comes later or not at all");
        std::tie(id, spec.init) = target->second;
      }
      if (layer >= first && layer < last) {
        specs.push_back(std::move(spec));
        numbers.push_back(layer);
        ids.push_back(id);
      }
    }
  }
  return ParamStore(std::move(specs), std::move(numbers), std::move(ids));
}

}  // namespace pdl
