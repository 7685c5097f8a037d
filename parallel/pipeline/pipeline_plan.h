#pragma once
// All that follows from a cut and a schedule before anything is allocated: which rank has which layers, how large its
// buffers are, how many bytes it sends, and which parameters two stages share. Plans only; every rank makes the same
// one.

#include <functional>
#include <string>
#include <vector>

#include "parallel/engine.h"
#include "parallel/grid/process_grid.h"
#include "parallel/pipeline/partition.h"
#include "parallel/pipeline/pipeline_executor.h"
#include "parallel/pipeline/recomputation.h"
#include "parallel/pipeline/schedule_timeline.h"
#include "parallel/pipeline/stage_feeder.h"

namespace pdl {

struct PipelineOptions {
  Balance balance;                 ///< layers of each virtual stage
  int stages = 1, chunks = 1;      ///< and virtual stages on each rank
  std::vector<int> replicas = {};  ///< ranks of each stage; empty: one each. Ranks count stage by stage
  int micro_batches = 1;           ///< of a step, where a replica of the pipeline has as many samples
  /// Micro-batches of the schedule from which follows what a rank must hold, where steps overlap; 0: those of a step.
  int scheduled = 0;
  Recomputation recomputation = {};  ///< of layers, within their backward passes; a schedule's is of whole stages
  bool gathered_loss = false;        ///< the loss is left out of the last stage and computed once all outputs are there
  std::function<Schedule(int micro_batches)> schedule;  ///< of a training step, or of so many micro-batches in a row
  /// Where ranks stand: along pp the ranks of one pipeline, dp replicas of the pipeline, tp divide the layers of a
  /// stage.
  ProcessGrid grid{GridSize{}};
  std::vector<LayerCost> layer_seconds = {};  ///< for a micro-batch, where the cut was made by times; else empty
  const LayerFactory* factory = nullptr;      ///< makes this rank's layers; null: dense ones. Outlives the plan
};

/// A parameter that two stages hold, each in its own store: equal at the start, and equal for ever when both are
/// updated with the sum of their gradients.
struct TiedPair {
  std::string name, copy_name;  ///< of the parameter, and of what is tied to it
  int rank = 0, copy_rank = 0;  ///< the first ones of the two stages
  std::int64_t elements = 0;    ///< on each
};

/// "rank" is a rank of one pipeline; without replicas of stages, the number of its stage.
class PipelinePlan {
 public:
  /// Checks the schedules. Throws Error(internal) when one cannot be run.
  PipelinePlan(const EngineContext& context, PipelineOptions options);

  const PipelineOptions& options() const { return options_; }
  const ProcessGrid& grid() const { return options_.grid; }
  /// Where this world rank stands.
  const GridCoordinate& place() const { return place_; }
  const LayerList& layers() const { return layers_; }
  int ranks() const { return static_cast<int>(stage_of_.size()); }
  int stage_of(int rank) const { return stage_of_[static_cast<std::size_t>(rank)]; }
  int first_rank_of(int stage) const { return first_rank_[static_cast<std::size_t>(stage)]; }
  int replicas_of(int stage) const { return options_.replicas[static_cast<std::size_t>(stage)]; }
  Schedule training(int micro_batches) const { return options_.schedule(micro_batches); }
  Schedule evaluation(int micro_batches) const;

  /// The rank's virtual stages, and the loss behind them where it is gathered.
  std::vector<std::unique_ptr<StagePart>> make_parts(int rank) const;
  ExecutorSize executor_size(int rank) const;
  std::unique_ptr<StageFeeder> make_feeder(int rank, const Dataset& dataset, bool training) const;
  const std::vector<TiedPair>& tied() const { return tied_; }
  /// The dense model's parameters, in registration order, and the first rank that has each.
  const ParamStore& dense() const { return dense_; }
  int owner_of(int dense_index) const;
  /// Layers [first, last) of each virtual stage of a rank, the loss with the last one.
  std::vector<LayerRange> layer_ranges(int rank) const;
  /// The layers among them that run again in a backward pass.
  std::vector<LayerRange> recomputed(int rank) const;
  /// Elements of other ranks' parameters that world rank 0 receives at a time when it visits all; 0 when it has all.
  std::int64_t visit_elements() const;

  /// Of a rank at its peak, parameters, gradients and optimizer left out; and what it sends and receives in a full
  /// step.
  MemoryByKind predicted_memory(int rank) const;
  CommCounts predicted_messages(int rank) const;
  /// Costs of the virtual stages for one micro-batch, from the costs of the layers.
  std::vector<StageCost> stage_costs(const std::vector<LayerCost>& layers) const;

 private:
  LayerRange layer_range(int virtual_stage) const;
  std::vector<LayerRange> recomputed_in(const LayerRange& range) const {
    return recomputed_layers(layers_, range.first, range.second, options_.recomputation);
  }
  StageNeeds data_needs(int rank) const;
  int held(int rank, bool training) const;
  int scheduled() const { return options_.scheduled > 0 ? options_.scheduled : options_.micro_batches; }
  /// Numbers of micro-batches that a step may have and whose schedules may need most room: the full step's, and few,
  /// which interleave otherwise.
  std::vector<int> typical_steps() const;
  std::int64_t largest_share() const;  ///< samples of a step on a replica
  std::int64_t largest_micro_batch() const;

  const EngineContext& context_;
  PipelineOptions options_;
  std::vector<int> stage_of_, first_rank_;  ///< by rank, by stage
  GridCoordinate place_;
  LayerList layers_;
  ParamStore dense_;
  std::vector<TiedPair> tied_;
};

}  // namespace pdl
