#include "parallel/sync/shard_tables.h"

#include <algorithm>

#include "parallel/sync/bucketed_all_reduce.h"
#include "parallel/sync/replicated_update.h"
#include "parallel/sync/startup.h"

namespace pdl {
namespace {

const std::string& name_of(const ParamStore& store, int param) {
  return store.params()[static_cast<std::size_t>(param)].spec.name;
}

PlanTable slice_table(const ParamStore& store, const ShardMap& map, std::int64_t element_bytes) {
  const ShardBlock& block = map.blocks().front();
  PlanTable table{.title = "shards: one block, a slice for each rank",
                  .columns = {"rank", "elements", "MiB", "parameters", "first", "last"},
                  .rows = {}};
  for (int rank = 0; rank < map.ranks(); ++rank) {
    const std::vector<UpdateSegment> segments = map.segments(store, block, rank, true);
    std::vector<int> held;
    std::int64_t elements = 0;
    for (std::size_t i = 0; i < segments.size(); ++i) {
      elements += segments[i].count;
      if (segments[i].count > 0) held.push_back(block.params[i]);
    }
    table.rows.push_back({str(rank), str(elements), mebibytes(block.slice * element_bytes), str(held.size()),
                          held.empty() ? "padding" : name_of(store, held.front()),
                          held.empty() ? "padding" : name_of(store, held.back())});
  }
  return table;
}

std::string list(const std::vector<int>& gathers, const GatherSchedule& schedule) {
  std::string text;
  for (int gather : gathers) {
    text += str(text.empty() ? "" : " ", schedule.gathers[static_cast<std::size_t>(gather)].block);
  }
  return text;
}

}  // namespace

PlanTable shard_table(const ParamStore& store, const ShardMap& map, std::int64_t element_bytes) {
  if (map.blocks().size() == 1 && map.ranks() > 1) return slice_table(store, map, element_bytes);
  PlanTable table{.title = str("shards: blocks, each cut into ", map.ranks(),
                               " equal slices; gradients come from the last to the first"),
                  .columns = {"block", "parameters", "MiB", "padding", "slice", "first", "last"},
                  .rows = {}};
  for (std::size_t b = 0; b < map.blocks().size(); ++b) {
    const ShardBlock& block = map.blocks()[b];
    table.rows.push_back({str(b), str(block.params.size()), mebibytes(block.elements * element_bytes),
                          str(block.elements - block.used), str(block.slice), name_of(store, block.params.front()),
                          name_of(store, block.params.back())});
  }
  return table;
}

PlanTable gradient_bucket_table(const ParamStore& store, const GradientShards& gradients, std::int64_t element_bytes) {
  PlanTable table{.title = "gradient buckets, in launch order",
                  .columns = {"bucket", "parameters", "MiB", "first", "last"},
                  .rows = {}};
  for (std::size_t b = 0; b < gradients.buckets().size(); ++b) {
    const GradientBucket& bucket = gradients.buckets()[b];
    const auto [least, most] = std::minmax_element(bucket.params.begin(), bucket.params.end());
    table.rows.push_back({str(b), str(bucket.params.size()), mebibytes(bucket.elements * element_bytes),
                          name_of(store, *most), name_of(store, *least)});
  }
  return table;
}

PlanTable gather_table(const LayerList& layers, const ParameterGatherer& gatherer, std::int64_t element_bytes) {
  const GatherSchedule& schedule = gatherer.training();
  PlanTable table{.title = "parameters over one micro-batch: blocks gathered, gathered ahead and let go",
                  .columns = {"pass", "layer", "gathered", "ahead", "let go", "held MiB"},
                  .rows = {}};
  for (std::size_t u = 0; u < schedule.uses.size(); ++u) {
    const GatherSchedule::Use& use = schedule.uses[u];
    const auto layer = static_cast<std::size_t>(gatherer.training_uses()[u].layer);
    table.rows.push_back({2 * u < schedule.uses.size() ? "forward" : "backward", layers[layer]->name(),
                          list(use.gathered, schedule), list(use.ahead, schedule), list(use.released, schedule),
                          mebibytes(use.live_elements * element_bytes)});
  }
  return table;
}

MemoryByKind replicated_memory(const EngineContext& context, bool buckets_in_place) {
  const Replica replica(context, {context.world.rank(), context.world.size()}, LayerFactory());
  BucketOptions buckets;
  buckets.in_place = buckets_in_place || context.world.size() == 1;
  MemoryByKind memory = replica.predicted_memory();
  memory[MemoryKind::optimizer] += ReplicatedUpdate(context).predicted_bytes(replica);
  memory[MemoryKind::communication] +=
      BucketedAllReduce(replica.store(), context.world, buckets, size_of(wide_dtype(context.training.dtype)))
          .predicted_bytes();
  return memory;
}

PlanTable memory_comparison(const std::vector<std::pair<std::string, MemoryByKind>>& plans) {
  PlanTable table{.title = "memory of a rank beside other ways, MiB", .columns = {""}, .rows = {}};
  for (const auto& [name, memory] : plans) table.columns.push_back(name);
  for (int kind = 0; kind < kMemoryKinds; ++kind) {
    std::vector<std::string> row = {std::string(kMemoryKindNames[static_cast<std::size_t>(kind)])};
    for (const auto& [name, memory] : plans) row.push_back(mebibytes(memory[static_cast<MemoryKind>(kind)]));
    table.rows.push_back(std::move(row));
  }
  std::vector<std::string> total = {"total"};
  for (const auto& [name, memory] : plans) total.push_back(mebibytes(memory.total()));
  table.rows.push_back(std::move(total));
  return table;
}

}  // namespace pdl
