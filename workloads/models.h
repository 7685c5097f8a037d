#pragma once
// The models by name. A model is a description: which layers, in which order, and how many floating-point operations
// its training is worth. It knows no engine and no data set; data sets look at `sample_input` to see what the model
// takes.
//
// One file per family, listed in workloads.def: another family is one more file and one more line.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/base/config_reader.h"
#include "engine/nn/model.h"

namespace pdl {

/// A model as configured: all but how many tokens or classes it tells apart, which the data decides.
struct ModelOptions {
  std::string name;                ///< "gpt2-medium"
  std::string family;              ///< "gpt2"
  TensorSpec sample_input;         ///< one sample, without N: int32 [T], or fp32 [H, W, C]
  TensorSpec sample_target;        ///< int32 [T] or [1]
  std::int64_t usual_outputs = 0;  ///< vocabulary or classes of the published model: for plans without data
  std::function<ModelDescription(std::int64_t vocabulary_or_classes)> build;
};

/// Reads "model" and the keys of its family from the "workload" block. What is wrong is noted in the reader.
ModelOptions read_model_options(const ConfigReader& workload);

/// The model for data with so many tokens in its vocabulary, or so many classes.
ModelDescription make_model(const ModelOptions& options, std::int64_t vocabulary_or_classes);

/// A model with its family's defaults, for `list`.
struct ModelInfo {
  std::string name;
  std::string family;
  std::string summary;          ///< one line
  std::int64_t parameters = 0;  ///< with `usual_outputs` tokens or classes
  std::int64_t usual_outputs = 0;
};

/// All models, in the order of workloads.def.
const std::vector<ModelInfo>& model_infos();

/// One line of workloads.def: a family and what its file gives.
struct ModelFamily {
  struct Member {
    std::string name;
    std::string summary;
  };
  std::string name;
  std::vector<Member> members;
  /// The model `name` with the family's keys. `name` is one of the members.
  ModelOptions (*read)(const std::string& name, const ConfigReader& workload) = nullptr;
};

const std::vector<ModelFamily>& model_families();

}  // namespace pdl
