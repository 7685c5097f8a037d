#include "parallel/shard/spatial_plan.h"

#include <algorithm>
#include <map>

namespace pdl {
namespace {

/// What a model asks of its layers, as far as slices care.
struct Window {
  std::int64_t kernel = 0;
  bool is_convolution = false, keeps_height = false;
  std::int64_t out = 0;
};
using Windows = std::map<std::string, Window>;

/// Makes dense layers and notes their windows.
class WindowReader final : public LayerFactory {
 public:
  explicit WindowReader(Windows& windows) : windows_(windows) {}
  std::unique_ptr<Layer> conv2d(std::string name, const ConvOptions& options) const override {
    const Conv2dGeometry& geometry = options.geometry;
    const bool keeps_height = geometry.stride == 1 && 2 * geometry.padded_rows() == geometry.kernel - 1;
    windows_[name] = {geometry.kernel, true, keeps_height, options.out};
    return LayerFactory::conv2d(std::move(name), options);
  }
  std::unique_ptr<Layer> max_pool(std::string name, std::int64_t kernel) const override {
    windows_[name] = {.kernel = kernel};
    return LayerFactory::max_pool(std::move(name), kernel);
  }

 private:
  Windows& windows_;
};

/// Whether a layer with this window can work on slices of `rows` rows.
bool fits(const Window& window, std::int64_t rows) {
  return window.is_convolution ? rows >= (window.kernel - 1) / 2 : rows % window.kernel == 0;
}

/// Why the model's convolutions or its images stand in the way, whatever else; empty when they do not.
std::string obstacle_in_model(const ModelDescription& model, int parts, SpatialPlan& plan) {
  Windows windows;
  const LayerList layers = model.build(WindowReader(windows));
  const bool has_images = model.sample_input.shape.rank() == 3;
  if (!has_images ||
      std::none_of(windows.begin(), windows.end(), [](const auto& entry) { return entry.second.is_convolution; })) {
    return str(model.name, " has no convolutions");
  }
  for (const auto& [name, window] : windows) {
    if (window.is_convolution && window.kernel % 2 == 0)
      return str("the kernel of ", name, " is even (", window.kernel, ")");
    if (window.is_convolution && !window.keeps_height) return str(name, " changes the height of images");
  }
  const std::int64_t height = model.sample_input.shape[0];
  if (height % parts != 0) return str("it does not divide the ", height, " rows of an image");
  const std::vector<Shape> shapes = layer_input_shapes(layers, model.sample_input, 1);
  plan.parts = parts;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const std::string name = layers[i]->name();
    const auto window = windows.find(name);
    if (window == windows.end() || !fits(window->second, shapes[i][1] / parts)) {
      plan.whole_from = name;
      plan.whole_input = shapes[i];
      break;
    }
    const std::int64_t halo = window->second.is_convolution ? (window->second.kernel - 1) / 2 : 0;
    plan.layers.push_back({name, shapes[i], window->second.out, halo, i == 0});
  }
  if (plan.layers.empty()) return str("slices of ", height / parts, " rows are too low for ", plan.whole_from);
  return "";
}

std::string obstacle(const ModelDescription& model, int parts, int ranks) {
  if (parts == 1) return "";
  SpatialPlan plan;
  const std::string in_model = obstacle_in_model(model, parts, plan);
  if (!in_model.empty()) return in_model;
  return ranks % parts == 0 ? "" : str("groups of so many do not make up ", ranks, " ranks");
}

}  // namespace

const SpatialLayer* SpatialPlan::find(const std::string& layer) const {
  const auto found = std::find_if(layers.begin(), layers.end(),
                                  [&](const SpatialLayer& candidate) { return candidate.name == layer; });
  return found == layers.end() ? nullptr : &*found;
}

SpatialPlan plan_spatial(const ModelDescription& model, int parts) {
  SpatialPlan plan;
  if (parts == 1) return plan;
  const std::string problem = obstacle_in_model(model, parts, plan);
  PDL_CHECK(problem.empty(), parts, " slices: ", problem);
  return plan;
}

std::string obstacle_to_split(const ModelDescription& model, int parts, int ranks) {
  const std::string problem = obstacle(model, parts, ranks);
  if (problem.empty()) return "";
  int below = parts - 1, above = parts + 1;
  while (below > 1 && !obstacle(model, below, ranks).empty()) --below;
  while (above <= ranks && !obstacle(model, above, ranks).empty()) ++above;
  return str(problem, "; nearest: ", std::max(below, 1), above <= ranks ? str(" or ", above) : "");
}

}  // namespace pdl
