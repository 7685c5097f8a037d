#include "parallel/sync/shard_map.h"

#include <set>

#include "tests/parallel/sync/model_stores.h"
#include "tests/support/catch.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

/// Every element of every parameter lies in exactly one rank's slice, inside the shard of that rank.
void check_partition(ParamStore& store, const ShardMap& map) {
  map.place(store);
  std::vector<std::int64_t> covered(store.params().size(), 0);
  std::int64_t shard = 0;
  for (const ShardBlock& block : map.blocks()) {
    CHECK(block.shard_offset == shard);
    shard += block.slice;
    CHECK(block.slice * map.ranks() == block.elements);
    for (int rank = 0; rank < map.ranks(); ++rank) {
      const std::vector<UpdateSegment> segments = map.segments(store, block, rank, false);
      REQUIRE(segments.size() == block.params.size());
      std::int64_t last = 0;
      for (std::size_t i = 0; i < segments.size(); ++i) {
        const Param& param = store.params()[static_cast<std::size_t>(block.params[i])];
        CHECK(segments[i].decay == param.spec.decay);
        if (segments[i].count == 0) continue;
        CHECK(segments[i].offset >= last);
        last = segments[i].offset + segments[i].count;
        CHECK(last <= block.slice);
        // What comes before on lower ranks ends where this begins.
        CHECK(map.slice_begin(block, rank) + segments[i].offset ==
              param.offset + covered[static_cast<std::size_t>(block.params[i])]);
        covered[static_cast<std::size_t>(block.params[i])] += segments[i].count;
      }
    }
  }
  CHECK(shard == map.shard_elements());
  for (std::size_t i = 0; i < covered.size(); ++i) CHECK(covered[i] == store.params()[i].count);
}

std::int64_t padding(const ParamStore& store, int ranks) {
  return ShardMap(store, one_block(store), ranks, 2).elements() - store.elements();
}

}  // namespace

TEST_CASE("slices cover every element once, also where ranks outnumber a parameter's elements") {
  ParamStore store = plain_store({7, 1, 30, 2, 5, 64});
  for (int ranks : {1, 2, 3, 4, 7, 64}) {
    for (std::int64_t alignment : {1, 2, 8}) {
      INFO(ranks << " ranks, alignment " << alignment);
      check_partition(store, ShardMap(store, one_block(store), ranks, alignment));
      check_partition(store, ShardMap(store, tensor_blocks(store), ranks, alignment));
      check_partition(store, ShardMap(store, bucket_blocks(store, 31), ranks, alignment));
      check_partition(store,
                      ShardMap(store, layer_blocks(store, {{0}, {0}, {1, 3}, {2}, {2}, {3}}, 5), ranks, alignment));
    }
  }
}

TEST_CASE("padding of the flat layout is upstream's") {
  const ModelStore vgg = vgg16(), gpt2 = gpt2_medium();
  CHECK(padding(vgg.store, 3) == 2);
  CHECK(padding(gpt2.store, 3) == 2);
  CHECK(padding(vgg.store, 64) == 88);
  CHECK(padding(gpt2.store, 64) == 0);
}

TEST_CASE("bucket blocks are filled from the last parameter on and lie in registration order") {
  const ParamStore store = plain_store({10, 4, 3, 50, 2, 2});
  CHECK(bucket_blocks(store, 8) == std::vector<std::vector<int>>{{0}, {1, 2}, {3}, {4, 5}});
  CHECK(bucket_blocks(store, 1000) == one_block(store));
}

TEST_CASE("layer blocks hold what the same layers use, and first what is small") {
  const ParamStore store = plain_store({10, 4, 3, 50, 20, 2});
  const std::vector<std::vector<int>> users = {{0, 2}, {0}, {0}, {1}, {1}, {2}};
  CHECK(layer_blocks(store, users, 0) == std::vector<std::vector<int>>{{0}, {1, 2}, {3, 4}, {5}});
  CHECK(layer_blocks(store, users, 4) == std::vector<std::vector<int>>{{1, 2, 5}, {0}, {3, 4}});
}

TEST_CASE("a tied embedding has a block of its own in GPT-2, and persistent parameters are upstream's") {
  const ModelStore gpt2 = gpt2_medium(), vgg = vgg16();
  CHECK(gpt2.users[0] == std::vector<int>{0, gpt2.layer_count() - 2});
  const std::vector<std::vector<int>> blocks = layer_blocks(gpt2.store, gpt2.users, 100000);
  CHECK(blocks[1] == std::vector<int>{0});
  const auto elements = [](const ModelStore& model, const std::vector<int>& block) {
    std::int64_t sum = 0;
    for (int param : block) sum += model.store.params()[static_cast<std::size_t>(param)].count;
    return sum;
  };
  CHECK(blocks[0].size() == 194);
  CHECK(elements(gpt2, blocks[0]) == 321536);
  CHECK(elements(vgg, layer_blocks(vgg.store, vgg.users, 100000)[0]) == 125736);
}

TEST_CASE("descriptions tell maps apart") {
  const ParamStore store = plain_store({7, 1, 30, 2, 5, 64});
  std::set<std::string> seen;
  for (std::int64_t capacity : {1, 10, 40, 1000}) {
    for (int ranks : {2, 3}) {
      const ShardMap map(store, bucket_blocks(store, capacity), ranks, 2);
      CHECK(map.describe() == ShardMap(store, bucket_blocks(store, capacity), ranks, 2).describe());
      CHECK(seen.insert(map.describe()).second);
    }
  }
  CHECK_THAT(*seen.begin(), StartsWith("2 ranks, 1 block, "));
  CHECK_THROWS_AS(ShardMap(store, {{0, 1, 2}, {2, 3, 4, 5}}, 2, 1), Error);
  CHECK_THROWS_AS(ShardMap(store, {{0, 1, 2}}, 2, 1), Error);
}
