#pragma once
// The typed view of an experiment file: what is common to all engines and workloads. Each plug-in reads its own block.

#include <string>
#include <vector>

#include "engine/base/config_reader.h"
#include "parallel/comm/world.h"
#include "parallel/engine.h"
#include "parallel/sync/data_store.h"
#include "workloads/datasets.h"
#include "workloads/models.h"

namespace pdl {

/// How a run is measured, the "measure" block.
struct MeasureOptions {
  std::int64_t warmup_steps = 3;         ///< first steps of the run, left out of step statistics
  std::int64_t max_steps_per_epoch = 0;  ///< 0: whole epochs; else the epoch's time is extrapolated
  std::int64_t max_eval_steps = 0;       ///< 0: the whole validation split
  bool evaluate = true;
  bool raw_steps = false;              ///< steps.csv with every step's time
  bool gemm_rate = false;              ///< measure a large matrix product at the start
  bool without_communication = false;  ///< train without exchanging anything: for times only
  bool nvtx = false;                   ///< name ranges to NVIDIA's profilers
  std::int64_t trace_steps = 0;        ///< steps in trace.json, after the warm-up
};

/// What a rank may use, the "limits" block.
struct LimitOptions {
  double timeout_s = 60.0;           ///< longest wait for other ranks; 0: for ever
  std::int64_t memory_limit_mb = 0;  ///< arena of one rank; 0: what the device has
  int threads_per_rank = 0;          ///< 0: cores / ranks on this host
};

struct ExperimentConfig {
  std::string name;
  const EngineDefinition* engine = nullptr;
  ModelOptions model;
  DataOptions data;
  TrainingOptions training;
  std::int64_t checkpoint_epochs = 1;  ///< a checkpoint every so many epochs; 0: none
  std::string device = "auto";
  bool cuda_graphs = true;  ///< passes that repeat are recorded and replayed, on devices that can
  std::string comm = "auto";
  NcclOptions nccl;
  int gemm_sm_margin = 0;  ///< multiprocessors of a GPU that matrix products leave to NCCL
  MeasureOptions measure;
  LimitOptions limits;
  DataLoaderOptions loader;
  DataStoreOptions data_store;
};

/// Reads everything for a run on `ranks` ranks; what is wrong is noted in the document, for `finish`.
ExperimentConfig read_experiment(const ConfigDocument& document, int ranks);

/// The keys that every run understands whatever its engine, model and data, as "training.epochs", for `list`.
std::vector<KeyDoc> setting_docs();

/// The engine's own block.
ConfigReader engine_block(const ConfigDocument& document);

}  // namespace pdl
