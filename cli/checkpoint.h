#pragma once
// Checkpoints at epoch ends: the state of every rank that has one of its own, and a manifest written last.
//
//   DIR/checkpoint/rank-00000.bin ...   this rank's tensors, end to end, in the engine's fixed order
//   DIR/checkpoint/manifest.json        what it belongs to, where training stands, sizes and checksums; without it the
//                                       folder is no checkpoint
//
// A new one is built beside the old as checkpoint.new and takes its place by renaming, so that a kill at any moment
// leaves a whole one. What ran after the last epoch end is run again on resume, which gives the same numbers.

#include <cstdint>
#include <string>

#include "parallel/comm/world.h"
#include "parallel/engine.h"

namespace pdl {

/// What must be the same for a resume to continue the same run.
struct CheckpointIdentity {
  std::string config_hash, data_identity;
};

/// Collective. Throws Error with path and errno on the rank that fails.
void save_checkpoint(World& world, Device& device, Engine& engine, const std::string& directory,
                     std::int64_t epochs_done, const CheckpointIdentity& identity);

/// Collective; the engine is prepared. Returns the epochs that are done. Throws ConfigError naming what differs
/// (configuration, data, ranks), Error(data) for a damaged file.
std::int64_t load_checkpoint(World& world, Device& device, Engine& engine, const std::string& directory,
                             const CheckpointIdentity& identity);

/// Whether DIR holds a whole checkpoint, and of how many epochs; -1 when it does not.
std::int64_t checkpoint_epochs(const std::string& directory);

/// Removes what an earlier run left, for one that starts anew in its place.
void remove_checkpoint(const std::string& directory);

}  // namespace pdl
