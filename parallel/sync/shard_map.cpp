#include "parallel/sync/shard_map.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>

#include "parallel/sync/bucket_plan.h"

namespace pdl {

ShardMap::ShardMap(const ParamStore& store, std::vector<std::vector<int>> blocks, int ranks, std::int64_t alignment)
    : ranks_(ranks), block_of_(store.params().size(), -1), offsets_(store.params().size(), 0) {
  const std::int64_t multiple = alignment * ranks;
  for (std::vector<int>& params : blocks) {
    ShardBlock block;
    block.offset = elements_;
    for (int param : params) {
      const auto i = static_cast<std::size_t>(param);
      PDL_CHECK(block_of_[i] < 0, store.params()[i].spec.name, " is in two blocks");
      block_of_[i] = static_cast<int>(blocks_.size());
      offsets_[i] = elements_ + block.used;
      block.used += store.params()[i].count;
    }
    block.params = std::move(params);
    block.elements = (block.used + multiple - 1) / multiple * multiple;
    block.slice = block.elements / ranks;
    block.shard_offset = elements_ / ranks;
    elements_ += block.elements;
    blocks_.push_back(std::move(block));
  }
  PDL_CHECK(std::find(block_of_.begin(), block_of_.end(), -1) == block_of_.end(), "a parameter is in no block");
}

std::vector<UpdateSegment> ShardMap::segments(const ParamStore& store, const ShardBlock& block, int rank,
                                              bool all_decay) const {
  const std::int64_t begin = slice_begin(block, rank), end = begin + block.slice;
  std::vector<UpdateSegment> segments;
  for (int index : block.params) {
    const Param& param = store.params()[static_cast<std::size_t>(index)];
    const std::int64_t first = std::clamp(param.offset, begin, end);
    const std::int64_t last = std::clamp(param.offset + param.count, begin, end);
    segments.push_back({.offset = first - begin, .count = last - first, .decay = all_decay || param.spec.decay});
  }
  return segments;
}

std::string ShardMap::describe() const {
  std::uint64_t hash = 1469598103934665603ull;
  const auto add = [&hash](std::int64_t number) {
    hash = (hash ^ static_cast<std::uint64_t>(number)) * 1099511628211ull;
  };
  for (const ShardBlock& block : blocks_) {
    add(block.elements);
    for (int param : block.params) add(param);
  }
  for (std::int64_t offset : offsets_) add(offset);
  char text[20];
  std::snprintf(text, sizeof text, "%08x", static_cast<unsigned>(hash ^ (hash >> 32)));
  return str(ranks_, " ranks, ", blocks_.size(), " block", blocks_.size() == 1 ? "" : "s", ", ", elements_,
             " elements, layout ", text);
}

std::vector<std::vector<int>> parameter_users(const LayerList& layers, const ParamStore& store) {
  std::vector<std::vector<int>> users(store.params().size());
  int registered = 0;
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    for (std::size_t i = layers[layer]->param_specs().size(); i > 0; --i) {
      users[static_cast<std::size_t>(store.owner(registered++))].push_back(static_cast<int>(layer));
    }
  }
  return users;
}

std::vector<std::vector<int>> one_block(const ParamStore& store) {
  std::vector<int> all(store.params().size());
  std::iota(all.begin(), all.end(), 0);
  return {all};
}

std::vector<std::vector<int>> tensor_blocks(const ParamStore& store) {
  std::vector<std::vector<int>> blocks;
  for (int index = 0; index < static_cast<int>(store.params().size()); ++index) blocks.push_back({index});
  return blocks;
}

std::vector<std::vector<int>> bucket_blocks(const ParamStore& store, std::int64_t capacity) {
  std::vector<std::int64_t> elements;
  for (const Param& param : store.params()) elements.push_back(param.count);
  std::vector<int> backward(elements.size());
  std::iota(backward.rbegin(), backward.rend(), 0);
  std::vector<std::vector<int>> blocks;
  for (Bucket& bucket : fill_buckets(backward, elements, capacity)) {
    std::reverse(bucket.params.begin(), bucket.params.end());
    blocks.push_back(std::move(bucket.params));
  }
  std::reverse(blocks.begin(), blocks.end());
  return blocks;
}

std::vector<std::vector<int>> layer_blocks(const ParamStore& store, const std::vector<std::vector<int>>& users,
                                           std::int64_t resident_elements) {
  std::vector<std::vector<int>> blocks;
  std::vector<int> resident;
  std::map<std::vector<int>, std::size_t> block_of;  // by users; blocks in the order of their first parameters
  for (std::size_t i = 0; i < store.params().size(); ++i) {
    const int index = static_cast<int>(i);
    if (store.params()[i].count <= resident_elements) {
      resident.push_back(index);
      continue;
    }
    const auto [found, is_new] = block_of.emplace(users[i], blocks.size());
    if (is_new) blocks.emplace_back();
    blocks[found->second].push_back(index);
  }
  if (!resident.empty()) blocks.insert(blocks.begin(), std::move(resident));
  return blocks;
}

}  // namespace pdl
