#pragma once
// What the megatron engine is told, and which of it fits together.

#include <memory>
#include <string>

#include "parallel/grid/process_grid.h"
#include "parallel/pipeline/partition.h"
#include "parallel/pipeline/recomputation.h"
#include "parallel/shard/tensor_parallel.h"
#include "parallel/synchronous_engine.h"

namespace pdl {

struct MegatronKnobs {
  std::string preset = "none";
  int tp = 1;  ///< 0: all ranks that the stages leave
  int pp = 1, chunks = 1, group = 0;
  bool sequence_parallel = false, distributed_optimizer = false, overlap_grad_reduce = false, tp_pp_dp = false;
  std::int64_t bucket_size = 0;
  std::string granularity = "none", method = "uniform";  ///< of recomputation; method acts with granularity full
  int recomputed_blocks = 1;

  int tensor_ranks(int ranks) const;
  ProcessGrid grid(int ranks) const;
  SpreadOver spread(int ranks) const {
    return sequence_parallel && tensor_ranks(ranks) > 1 ? SpreadOver::sequence : SpreadOver::none;
  }
  Recomputation recomputation() const;
};

MegatronKnobs read_megatron_knobs(const ConfigReader& reader);

/// The group size in which so many micro-batches can be interleaved: the wanted one, or the next that can.
int legal_group(int stages, int micro_batches, int wanted);

/// Micro-batches of a step on each of `dp` replicas.
int micro_batches_of(const EngineContext& context, int dp);

/// Costs of the whole layers for a micro-batch: all ranks cut alike, and division by tp changes no proportion.
std::vector<LayerCost> megatron_costs(const EngineContext& context, int dp);
PartitionReport cut_evenly(const std::vector<LayerCost>& costs, int stages);

/// Notes what does not fit ranks, model or recipe in the reader, each under its key and with the nearest values that
/// do; false when there is any.
bool check_megatron(const EngineContext& context, const MegatronKnobs& knobs, const ConfigReader& reader);

/// For each number of stages that the ranks and the model's layers allow: tensor-parallel ranks and interleaving that
/// do.
PlanTable legal_grids(const EngineContext& context);

/// The engine without its loop over steps; its model is a StagedModel. The knobs fit.
std::unique_ptr<StepMethod> make_megatron_method(const EngineContext& context, const MegatronKnobs& knobs);

}  // namespace pdl
