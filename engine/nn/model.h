#pragma once
// A model is an ordered list of layers, the last of which is the loss. Engines slice it.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/nn/layer.h"
#include "engine/nn/layer_factory.h"

namespace pdl {

using LayerList = std::vector<std::unique_ptr<Layer>>;

/// What an engine needs to build any slice of a model with its own factory.
struct ModelDescription {
  std::string name;                                     ///< "gpt2-medium"
  std::function<LayerList(const LayerFactory&)> build;  ///< whole model, loss last
  TensorSpec sample_input;                              ///< one sample, without N: [T] int32, or [H, W, C]
  TensorSpec sample_target;                             ///< [T] or [1] int32
  std::int64_t predictions_per_sample = 1;              ///< losses per sample: T for text, 1 for images
  std::optional<std::int64_t> hidden_size;              ///< width of a transformer's residual stream
  double training_flops_per_sample = 0.0;               ///< forward and backward, the formula named in `flops_formula`
  std::string flops_formula;
  std::optional<double> palm_flops_per_sample;  ///< likewise by PaLM's formula, for models that it speaks of
  std::string palm_formula;
  /// What the backward pass computes again, counted as `flops_formula` counts; empty when it computes nothing again.
  std::optional<double> recomputed_flops_per_sample;
};

/// One layer's costs, for plans, partitions and reports.
struct LayerInfo {
  std::string name;
  Shape output;  ///< of one sample, N = 1
  std::int64_t parameters = 0;
  std::int64_t saved_bytes = 0;  ///< per sample, output included
  double forward_flops = 0.0;    ///< per sample
};

/// Shapes of x per layer for `samples` samples; entry i is layer i's input, the last entry the loss's output (empty).
std::vector<Shape> layer_input_shapes(const LayerList& layers, const TensorSpec& sample_input, std::int64_t samples);

std::vector<LayerInfo> describe_layers(const LayerList& layers, const TensorSpec& sample_input, DType dtype);

/// Element count of the distinct parameters (tied ones once).
std::int64_t parameter_count(const LayerList& layers);

/// The store of layers [first, last): ids and layer numbers are those of the whole model. A tied parameter has its
/// target's id and initial values, also where the target is outside.
ParamStore make_param_store(const LayerList& layers, int first, int last);

}  // namespace pdl
