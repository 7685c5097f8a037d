#pragma once
// A sample configuration, the code that reads it, and what the reader complains about: for the config tests.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/base/config_reader.h"
#include "tests/support/catch.h"

namespace pdl {

/// A configuration with a bit of everything.
inline const std::string kSample = R"({
  "name": "sample",
  "workload": { "model": "gpt2-tiny", "data": "kjv", "sequence_length": 128 },
  "engine": { "name": "zero", "stage": 2, "overlap_comm": true, "reduce_bucket_size": 5e8 },
  "training": {
    "epochs": 2, "global_batch_size": 32,
    "micro_batch_size": 4,
    "seed": 1234, "dtype": "fp32",
    "optimizer": { "name": "adamw", "lr": 0.001, "weight_decay": 0.01 },
    "lr_schedule": { "name": "cosine", "warmup_steps": 20 }
  },
  "balance": [3, 4, 5],
  "device": "auto"
})";

/// Reads every key of the sample, as the program would.
inline void read_sample(const ConfigReader& root) {
  root.require<std::string>("name", "what the run is called");
  const ConfigReader workload = root.section("workload", "what is trained");
  workload.require_choice("model", {"gpt2-tiny", "vgg11"}, "model");
  workload.get<std::string>("data", "synthetic", "data set");
  workload.get<int>("sequence_length", 64, "tokens a sample", {1, 1024});
  const ConfigReader engine = root.section("engine", "parallel engine");
  engine.require_choice("name", {"ddp", "zero", "pipedream"}, "engine");
  engine.get<int>("stage", 1, "what is sharded", {0, 3});
  engine.get<bool>("overlap_comm", false, "communicate during backward");
  engine.get<std::int64_t>("reduce_bucket_size", 500000, "elements a bucket", {1});
  const ConfigReader training = root.section("training", "how it is trained");
  training.get<int>("epochs", 1, "passes", {1});
  training.get_optional<int>("global_batch_size", "samples a step", {1});
  training.get<int>("micro_batch_size", 1, "samples a pass", {1});
  training.get<std::int64_t>("seed", 1, "seed", {0});
  training.choice("dtype", "fp32", {"fp64", "fp32", "bf16"}, "number format");
  const ConfigReader optimizer = training.section("optimizer", "update rule");
  optimizer.choice("name", "sgd", {"sgd", "adamw"}, "rule");
  optimizer.get<double>("lr", 0.1, "step size", {0});
  optimizer.get<double>("weight_decay", 0, "decay", {0, 1});
  const ConfigReader schedule = training.section("lr_schedule", "step size over time");
  schedule.choice("name", "constant", {"constant", "cosine"}, "shape");
  schedule.get<int>("warmup_steps", 0, "linear warm-up", {0});
  root.get_list("balance", {}, "layers a stage", {1});
  root.choice("device", "auto", {"auto", "cpu", "cuda"}, "where");
}

using Read = std::function<void(const ConfigReader&)>;

/// One line for each problem that `finish` reports after `read`.
inline std::string complaints(const ConfigDocument& document, const Read& read) {
  read(document.root());
  try {
    document.finish();
  } catch (const ConfigError& error) {
    CHECK(error.code() == ExitCode::usage);
    return error.what();
  }
  return "";
}

inline std::string complaints(const std::string& text, const Read& read,
                              const std::vector<std::string>& overrides = {}) {
  return complaints(ConfigDocument::parse(text, "run.json", overrides), read);
}

inline std::string sample_complaints(const std::vector<std::string>& overrides) {
  return complaints(kSample, read_sample, overrides);
}

}  // namespace pdl
