#include "parallel/pipeline/recomputation.h"

namespace pdl {
namespace {

bool is_block(const LayerList& layers, int index) { return layers[static_cast<std::size_t>(index)]->is_block(); }

}  // namespace

std::vector<LayerRange> recomputed_layers(const LayerList& layers, int first, int last, const Recomputation& how) {
  std::vector<LayerRange> groups;
  if (how.method == Recomputation::Method::none) return groups;
  const bool in_groups = how.method == Recomputation::Method::uniform;
  for (int index = first; index < last; ++index) {
    if (!is_block(layers, index)) continue;
    const bool joins = in_groups && !groups.empty() && groups.back().second == index &&
                       groups.back().second - groups.back().first < how.blocks;
    if (joins) {
      ++groups.back().second;
    } else if (in_groups || static_cast<int>(groups.size()) < how.blocks) {
      groups.emplace_back(index, index + 1);
    }
  }
  return groups;
}

int count_blocks(const LayerList& layers, int first, int last) {
  int blocks = 0;
  for (int index = first; index < last; ++index) blocks += is_block(layers, index) ? 1 : 0;
  return blocks;
}

}  // namespace pdl
