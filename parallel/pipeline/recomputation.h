#pragma once
// Which layers of a stage run forward again in the backward pass, by Megatron-LM's rules: their activations are not
// kept, only the inputs of groups of transformer blocks.

#include <vector>

#include "engine/nn/stage.h"

namespace pdl {

struct Recomputation {
  enum class Method {
    none,
    uniform,  ///< all blocks, in groups of `blocks` whose inputs are kept
    block     ///< the first `blocks` of each stage, one by one; the others keep all
  };
  Method method = Method::none;
  int blocks = 1;
};

/// The groups among layers [first, last) of a model, in order: a stage's. Layers that are no blocks are never in one;
/// the last group of a row of blocks may be smaller.
std::vector<LayerRange> recomputed_layers(const LayerList& layers, int first, int last, const Recomputation& how);

/// Transformer blocks among layers [first, last).
int count_blocks(const LayerList& layers, int first, int last);

}  // namespace pdl
