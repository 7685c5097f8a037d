#pragma once
// The two models, small enough for fp64 loops, as configuration files in a temporary folder.

#include <unistd.h>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace pdl::testing {

using Overrides = std::vector<std::string>;

inline Overrides joined(Overrides first, const Overrides& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// Path of a configuration for "gpt2" or "vgg": fp64, dropout on, global batch 12, 60 training samples.
inline std::string tiny_config(const std::string& model) {
  const std::string workload =
      model == "gpt2"
          ? R"("model": "gpt2-tiny", "layers": 2, "width": 24, "heads": 3, "sequence_length": 11, "dropout": 0.1,
                          "data": "synthetic-learnable", "vocabulary_size": 29)"
          : R"("model": "vgg11", "width_multiplier": 0.03125, "image_size": 32, "classifier_width": 20, "dropout": 0.3,
                          "data": "synthetic-learnable", "classes": 5)";
  const std::string text =
      R"({"name": "tiny", "workload": {)" + workload + R"(, "train_samples": 60, "validation_samples": 17},
    "engine": {"name": "ddp"},
    "training": {"global_batch_size": 12, "seed": 11, "dtype": "fp64",
                 "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}}})";
  const std::string path =
      (std::filesystem::temp_directory_path() / ("pdl_tiny_" + model + "_" + std::to_string(::getpid()) + ".json"))
          .string();
  std::ofstream(path) << text;
  return path;
}

}  // namespace pdl::testing
