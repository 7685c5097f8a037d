#pragma once
// From a configuration to an engine that is ready to train: reads like a table of contents.

#include <memory>
#include <string>
#include <vector>

#include "cli/config.h"
#include "engine/base/log.h"

namespace pdl {

/// Everything a run, a verification or a plan works with. Members are in the order in which they depend on each other.
struct Experiment {
  Experiment() = default;
  /// While an exception is in flight, first ends what the device still does together with other ranks: memory could not
  /// be given back without them.
  ~Experiment();
  Experiment(const Experiment&) = delete;
  Experiment& operator=(const Experiment&) = delete;

  std::unique_ptr<ConfigDocument> document;
  ExperimentConfig config;
  std::unique_ptr<Device> device;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Device> host;  ///< memory of the data store when the device is no CPU
  CommLedger ledger;
  DatasetPair data;
  ModelDescription model;
  bool silent = false;  ///< set after `prepare` when measure.without_communication asks for it
  std::unique_ptr<Communicator> communicator;
  std::unique_ptr<EngineContext> context;
  std::unique_ptr<Engine> engine;
};

/// Reads, checks and builds everything for this rank of `world`; takes no device memory yet. Throws ConfigError with
/// every problem at once, Error(data) for data that is missing or broken.
std::unique_ptr<Experiment> make_experiment(World& world, const std::string& path,
                                            const std::vector<std::string>& overrides);

/// The same for rank 0 of `ranks` imagined ranks, without data: for plans.
std::unique_ptr<Experiment> make_planned_experiment(int ranks, const std::string& path,
                                                    const std::vector<std::string>& overrides);

/// The serial-side twin of an experiment for `verify`: the reference engine on a communicator of this rank alone.
std::unique_ptr<Experiment> make_reference_experiment(const Experiment& of);

/// Memory by kind as a table, predicted beside measured where there is any.
std::string memory_table(const MemoryByKind& predicted, const MemoryTracker* measured);

/// Compute threads that a rank gets: the configured number, else OMP_NUM_THREADS, else cores / ranks on this host but
/// at most the cores that it is bound to.
int threads_per_rank(const LimitOptions& limits, const RankInfo& rank);

}  // namespace pdl
