#pragma once
// Divides images over ranks by rows, for an engine that is otherwise data parallel: N = p q ranks are q groups, and the
// p ranks of a group hold the same samples, a slice of rows each, as far as the model's convolutions allow
// (spatial_plan.h); from there on each of them holds whole samples of its own.
//
//   group g of q takes part split_evenly(n, q, g) of the n samples of a step: those of its p ranks together. A
//   micro-batch is one of the group. World rank r is slice r mod p of group r / p.
//
// The engine builds its replica from `context()` and `factory()` with the place {group(), groups()}, and sums all
// gradients over all N ranks as ever: each rank's are a part of the sum over samples and rows. Losses need no care,
// since samples are whole where they come about.

#include <memory>
#include <string>

#include "parallel/engine.h"
#include "parallel/shard/spatial_layers.h"
#include "parallel/shard/spatial_plan.h"

namespace pdl {

/// The "spatial" block of an engine.
struct SpatialOptions {
  int height = 1;       ///< p
  bool overlap = true;  ///< compute while rows are on their way
};

/// Reads the block from the engine's.
SpatialOptions read_spatial_options(const ConfigReader& engine);
/// Notes in the engine's block why `options` are impossible; false when they are.
bool check_spatial_options(const ConfigReader& engine, const SpatialOptions& options, const EngineContext& context);

class SpatialSplit {
 public:
  /// Plans only. `others` makes the layers that are not divided by rows, and outlives this, as `context` does.
  SpatialSplit(const EngineContext& context, const SpatialOptions& options, const LayerFactory& others);
  ~SpatialSplit();
  SpatialSplit(const SpatialSplit&) = delete;
  SpatialSplit& operator=(const SpatialSplit&) = delete;

  /// The engine's context as this rank sees it: images are its rows of them.
  const EngineContext& context() const { return context_; }
  const LayerFactory& factory() const;
  int group() const { return dense_.world.rank() / options_.height; }
  int groups() const { return dense_.world.size() / options_.height; }
  const SpatialPlan& plan() const { return plan_; }

  /// Makes the group's communicator, axis "spatial". Collective, before the first step.
  void prepare();
  /// Bytes of MemoryKind::communication that `prepare` takes.
  std::int64_t predicted_bytes() const;
  /// What one forward and backward pass over a micro-batch of `samples` samples sends.
  CommCounts traffic(std::int64_t samples) const;
  /// The divided layers: rows and the elements that a rank between two others sends for a sample.
  PlanTable table() const;

 private:
  class Factory;
  const EngineContext& dense_;
  SpatialOptions options_;
  SpatialPlan plan_;
  ModelDescription model_;  ///< of slices
  DatasetPair data_;        ///< of slices; null in a plan
  EngineContext context_;
  std::unique_ptr<Communicator> ranks_;
  SpatialGroup slices_;
  std::unique_ptr<Factory> factory_;
};

}  // namespace pdl
