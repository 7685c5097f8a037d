#pragma once
// Where a model is cut into pipeline stages: from what each layer costs to how many layers each stage gets, and why.
//
// The loss always stays with the layer before it, so a model of L layers has L - 1 places. A balance lists how many of
// these each stage has; it adds up to L - 1.

#include <cstdint>
#include <string>
#include <vector>

#include "engine/nn/model.h"
#include "parallel/engine.h"

namespace pdl {

/// What a layer costs for one micro-batch. The loss is part of the last one.
struct LayerCost {
  std::string name;
  double forward = 0.0, backward = 0.0;  ///< in one unit for all layers: operations or seconds
  std::int64_t output_bytes = 0;         ///< what it would hand on at a cut behind it
  std::int64_t saved_bytes = 0;          ///< kept from forward to backward, output included
  std::int64_t parameters = 0;           ///< elements that are its own
  double time() const { return forward + backward; }
};

/// Costs from operation counts, for micro-batches of `samples`.
std::vector<LayerCost> layer_costs(const LayerList& layers, const TensorSpec& sample_input, DType dtype,
                                   std::int64_t samples);

/// Layers per stage.
using Balance = std::vector<int>;

/// The cut whose largest stage is smallest: exact, by dynamic programming. `stages` is at most the number of costs,
/// none of which is negative. With `forbidden` in (0, layers) no stage begins there.
Balance minimax_balance(const std::vector<double>& costs, int stages, int forbidden = 0);

/// The cut that torchgpipe.balance makes: Barany and Grinberg's block partition over costs that are scaled to 0..1 from
/// smallest to largest. It stops once the largest block is at most one largest layer above the smallest.
Balance block_partition(const std::vector<double>& costs, int stages);

/// Sum of each stage's costs.
std::vector<double> stage_sums(const std::vector<double>& costs, const Balance& balance);
/// The first layer of each stage, and behind them the number of layers.
std::vector<int> stage_begins(const Balance& balance);

/// What is wrong with a balance that a user gave, with the nearest one that is legal; "" when nothing is.
std::string balance_fault(const Balance& balance, int stages, int layers);

/// How a cut came about.
struct PartitionReport {
  Balance balance;
  std::vector<double> criterion;  ///< per layer: what was balanced
  std::string criterion_name;     ///< "operations", "seconds", "bytes"
  std::string method;             ///< "minimax", "blockpartition", "explicit"
};

/// One line a stage: layers, time, criterion, parameters, activations, what it hands on; imbalance and the next best
/// cut in the title.
PlanTable explain_partition(const PartitionReport& report, const std::vector<LayerCost>& costs, DType dtype);

}  // namespace pdl
