// Which blocks are recomputed: upstream's two methods, over stages that a pipeline may cut anywhere.

#include "parallel/pipeline/recomputation.h"

#include "engine/nn/layers/transformer_block.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// A norm, five blocks, a norm.
LayerList five_blocks() {
  const LayerFactory factory;
  LayerList layers;
  layers.push_back(factory.layernorm("first", 8));
  for (int i = 0; i < 5; ++i) layers.push_back(make_transformer_block(str("h.", i), {.width = 8, .heads = 2}, factory));
  layers.push_back(factory.layernorm("last", 8));
  return layers;
}

using Ranges = std::vector<LayerRange>;
using Method = Recomputation::Method;

}  // namespace

TEST_CASE("uniform recomputation groups all blocks of a stage", "[pipeline]") {
  const LayerList layers = five_blocks();
  CHECK(recomputed_layers(layers, 0, 7, {Method::uniform, 1}) == Ranges{{1, 2}, {2, 3}, {3, 4}, {4, 5}, {5, 6}});
  CHECK(recomputed_layers(layers, 0, 7, {Method::uniform, 2}) == Ranges{{1, 3}, {3, 5}, {5, 6}});
  CHECK(recomputed_layers(layers, 2, 7, {Method::uniform, 3}) == Ranges{{2, 5}, {5, 6}});
  CHECK(recomputed_layers(layers, 2, 4, {Method::uniform, 5}) == Ranges{{2, 4}});
  CHECK(recomputed_layers(layers, 6, 7, {Method::uniform, 1}).empty());
}

TEST_CASE("block recomputation takes the first blocks of a stage", "[pipeline]") {
  const LayerList layers = five_blocks();
  CHECK(recomputed_layers(layers, 0, 7, {Method::block, 2}) == Ranges{{1, 2}, {2, 3}});
  CHECK(recomputed_layers(layers, 4, 7, {Method::block, 3}) == Ranges{{4, 5}, {5, 6}});
}

TEST_CASE("without recomputation there is none", "[pipeline]") {
  const LayerList layers = five_blocks();
  CHECK(recomputed_layers(layers, 0, 7, {}).empty());
  CHECK(count_blocks(layers, 0, 7) == 5);
  CHECK(count_blocks(layers, 5, 7) == 1);
}
