// Puts the parts of divided models together as LBANN's sharded weights: blocks of one tensor, nothing gathered ahead,
// nothing kept from one use to the next.
#include "parallel/sync/tensor_shards.h"

#include "parallel/comm/world.h"
#include "parallel/sync/shard_tables.h"

namespace pdl {

TensorShards::TensorShards(const EngineContext& context, Replica& replica)
    : context_(context),
      replica_(replica),
      users_(parameter_users(replica.layers(), replica.store())),
      map_(lay_out(replica.store(), context.world.size())),
      weights_(replica.store(), map_, context.world.rank(), context.training.dtype, ShardedWeights::Values::sharded),
      gradients_(replica.store(), map_, users_, layers(), context.world, {.bucket_elements = 1},
                 context.training.dtype),
      gatherer_(replica.store(), map_, users_, layers(), weights_, gradients_, {.prefetch_elements = 0},
                context.training.dtype),
      update_(context, replica.store(), map_, weights_, gradients_),
      model_(context, replica, map_, weights_, gradients_, update_) {}

ShardMap TensorShards::lay_out(ParamStore& store, int ranks) {
  constexpr std::int64_t kAlignment = 8;  // keeps slices on the 16 bytes that NCCL and kernels like
  ShardMap map(store, tensor_blocks(store), ranks, kAlignment);
  map.place(store);
  return map;
}

void TensorShards::prepare() {
  group_ = context_.world.split(0, context_.world.rank(), "parameters");
  replica_.use(gatherer_);
  weights_.prepare(context_.device);
  gatherer_.prepare(context_.device, *group_);
  update_.prepare();
  weights_.initialise(context_.device, context_.backend, context_.training.seed);
}

MemoryByKind TensorShards::predicted_memory() const {
  MemoryByKind memory = weights_.predicted_memory();
  memory += gatherer_.predicted_memory();
  memory += update_.predicted_memory();
  if (context_.training.deterministic) {
    memory[MemoryKind::communication] += deterministic_scratch_bytes(context_.world.size());
  }
  return memory;
}

CommCounts TensorShards::predicted_comm(std::int64_t micro_batches) const {
  const CommCount pass = gatherer_.predicted_pass();
  CommCounts counts = {{"parameters.all_gather", {micro_batches * pass.calls, micro_batches * pass.bytes}}};
  const CommCount norms = update_.predicted_in_steps();
  if (norms.calls > 0) counts["world.all_reduce"] = norms;
  return counts;
}

std::vector<PlanTable> TensorShards::tables() const {
  return {shard_table(replica_.store(), map_, size_of(context_.training.dtype)),
          gather_table(replica_.layers(), gatherer_, size_of(context_.training.dtype))};
}

}  // namespace pdl
