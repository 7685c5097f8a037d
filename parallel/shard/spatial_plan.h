#pragma once
// Which layers of a model can run on horizontal slices of images, one slice a rank.
//
// p ranks share the samples of a group; rank i of them holds rows [i H/p, (i+1) H/p) of every image. A convolution
// with an odd kernel k, stride 1 and zero padding h = (k-1)/2 needs h rows of each neighbour, its halo; pooling over
// k x k needs none as long as k divides H/p. In front of the first layer that needs more (where heights stop dividing,
// or at the fully-connected layers) the ranks exchange slices of samples for whole samples.
//
// Source: LBANN's distconv (Dryden et al., "Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained
// Parallelism", IPDPS 2019), there with further dimensions to split.

#include <cstdint>
#include <string>
#include <vector>

#include "engine/nn/model.h"

namespace pdl {

/// A layer that runs on slices.
struct SpatialLayer {
  std::string name;
  Shape input;            ///< of one whole sample: [1, H, W, C]
  std::int64_t out = 0;   ///< K of a convolution, 0 for pooling
  std::int64_t halo = 0;  ///< rows that it needs of each neighbour
  bool is_first = false;  ///< of the model: its data gradient is not wanted
};

struct SpatialPlan {
  int parts = 1;
  std::vector<SpatialLayer> layers;  ///< from the model's first layer on; none when there is one part
  std::string whole_from;            ///< the layer in front of which samples become whole
  Shape whole_input;                 ///< its input for one sample

  const SpatialLayer* find(const std::string& layer) const;
};

/// Throws Error when `obstacle_to_split` has something to say.
SpatialPlan plan_spatial(const ModelDescription& model, int parts);

/// Why images of `model` cannot be divided into `parts` slices on `ranks` ranks, as the end of a sentence about
/// `parts`, with the nearest numbers that can; empty when they can.
std::string obstacle_to_split(const ModelDescription& model, int parts, int ranks);

}  // namespace pdl
