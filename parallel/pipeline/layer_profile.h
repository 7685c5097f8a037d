#pragma once
// Measured times of each layer, for cuts by time: a file that every rank reads, so that all cut alike, and that makes
// the cut of a run reproducible.

#include <cstdint>
#include <string>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/nn/model.h"
#include "parallel/pipeline/partition.h"

namespace pdl {

/// Mean seconds of one layer for one micro-batch. The loss is part of the last layer, as in partition.h.
struct LayerTime {
  std::string name;
  double forward_s = 0.0, backward_s = 0.0;
};

struct LayerProfile {
  std::string model;         ///< model that was measured
  std::int64_t samples = 0;  ///< of the micro-batch that was measured
  std::vector<LayerTime> layers;
};

/// Runs every layer by itself on the device: once to warm up, then at least three times and for `seconds`. Takes the
/// memory of one layer at a time.
LayerProfile measure_layers(const ModelDescription& model, std::int64_t samples, DType dtype, Device& device,
                            Backend& backend, double seconds = 0.1);

/// As a JSON object: times in nanoseconds.
std::string to_json(const LayerProfile& profile);
/// Throws ConfigError when the file is none of these or its layers are not those in `names` (of the model without its
/// loss).
LayerProfile read_layer_profile(const std::string& path, const std::vector<std::string>& names);

/// The costs of micro-batches of `samples` with the times of such a file, which grow with the samples. Errors as above.
std::vector<LayerCost> measured_costs(std::vector<LayerCost> costs, const std::string& path, std::int64_t samples);

}  // namespace pdl
