#pragma once
// What is recorded about a run besides its measurements: versions, machines, environment, data.

#include "cli/experiment.h"
#include "engine/record/records.h"

namespace pdl {

/// Collective; complete on rank 0.
RunRecord collect_run_facts(World& world, const Experiment& experiment, const std::string& command_line);

/// The data sets' identities as one text, for checkpoints.
std::string data_identity(const DatasetPair& data);

/// Resident memory of this process as the system sees it.
std::int64_t resident_bytes();

}  // namespace pdl
