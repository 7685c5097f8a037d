#pragma once
// Plans of divided models as tables: what `plan` prints of shard maps, buckets and gatherings.

#include "parallel/engine.h"
#include "parallel/sync/parameter_gatherer.h"

namespace pdl {

/// A row for each block; of a single block, a row for each rank's slice.
PlanTable shard_table(const ParamStore& store, const ShardMap& map, std::int64_t element_bytes);

/// A row for each bucket, in launch order.
PlanTable gradient_bucket_table(const ParamStore& store, const GradientShards& gradients, std::int64_t element_bytes);

/// A row for each use of a layer over one micro-batch: what is gathered, ahead and let go, in blocks, and what is held.
PlanTable gather_table(const LayerList& layers, const ParameterGatherer& gatherer, std::int64_t element_bytes);

/// What the same training takes on a rank where nothing is divided and gradients are summed bucket by bucket, in
/// buffers or in place.
MemoryByKind replicated_memory(const EngineContext& context, bool buckets_in_place);

/// One column of MiB for each named plan.
PlanTable memory_comparison(const std::vector<std::pair<std::string, MemoryByKind>>& plans);

}  // namespace pdl
