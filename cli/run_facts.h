#pragma once
// What is recorded about a run besides its measurements: versions, machines, environment, data.

#include <optional>

#include "cli/experiment.h"
#include "engine/record/records.h"

namespace pdl {

/// Collective; complete on rank 0.
RunRecord collect_run_facts(World& world, const Experiment& experiment, const std::string& command_line);

/// What a large product of matrices reaches on all ranks together, measured now: before training takes its memory.
/// Empty when some rank lacks the memory for it. Collective.
std::optional<double> total_gemm_flops_per_s(World& world, Experiment& experiment);

/// Puts what each rank's driver last said into `ranks`, complete on rank 0. Collective.
void collect_end_states(World& world, const DeviceState& mine, std::vector<RankRecord>& ranks);

/// The data sets' identities as one text, for checkpoints.
std::string data_identity(const DatasetPair& data);

}  // namespace pdl
