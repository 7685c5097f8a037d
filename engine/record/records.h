#pragma once
// What is measured, as plain structs. How it reaches a file is in run_writer.h; what the fields mean is in
// results/README.md.

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/device/device_state.h"
#include "engine/device/memory_tracker.h"
#include "engine/record/observer.h"

namespace pdl {

inline constexpr int kSchemaVersion = 1;

/// How a run ended, or that it has not. A benchmark has ended well but is no result: something was left out on purpose.
enum class RunStatus { running, success, failed, diverged, interrupted, benchmark };
std::string_view name_of(RunStatus status);

/// Minimum, mean and maximum over ranks.
struct Spread {
  double min = 0.0, mean = 0.0, max = 0.0;
};

struct StepPercentiles {
  double median = 0.0, p5 = 0.0, p95 = 0.0, p99 = 0.0, min = 0.0, max = 0.0;  ///< milliseconds, nearest rank
};

/// One kind of communication over one epoch: calls and bytes of the rank that has most of them, times as the mean over
/// ranks.
struct CommRecord {
  std::int64_t calls = 0, bytes = 0;
  double busy_s = 0.0, exposed_s = 0.0;
};

/// How old the weights were that gradients were computed with, on one stage of a pipeline that does not wait for its
/// updates, in one epoch.
struct StalenessRecord {
  int stage = 0;
  std::int64_t updates = 0;
  double samples_per_update = 0.0;
  std::vector<std::int64_t> updates_behind;  ///< [i]: updates whose gradients belong to weights of i updates before
  int versions = 1;                          ///< different weights that the stage held at the end
  double weight_drift = 0.0;  ///< |newest - oldest| / |oldest| of these weights, Euclidean; 0 with one version
};

/// How often a rank made one kind of pass over a virtual stage, and how long that took in all, with what it waited for.
struct PassTotal {
  std::int64_t count = 0;
  double s = 0.0;
  double mean_s() const { return count > 0 ? s / static_cast<double>(count) : 0.0; }
};
struct StagePasses {
  PassTotal forward{}, recompute{}, backward{}, loss{};  ///< loss: computed apart, over outputs that were gathered
};

/// Where one rank's training time of an epoch went in a pipeline: seconds that add up to train_s.
struct PipelineRankRecord {
  int rank = 0, stage = 0, replica = 0;
  double train_s = 0.0;
  double forward_s = 0.0, backward_s = 0.0, recompute_s = 0.0;  ///< of passes, without what they waited for
  std::array<double, kScheduleParts> wait_s{};  ///< for neighbours in the pipeline, by part of the schedule
  double comm_passes_s = 0.0;                   ///< waiting for other communication within passes
  double comm_s = 0.0;                          ///< likewise outside, with phases that do nothing else
  double optimizer_s = 0.0, other_s = 0.0;
  std::vector<StagePasses> passes = {};  ///< by virtual stage of the rank

  double idle_s() const { return wait_s[0] + wait_s[1] + wait_s[2] + comm_s; }
};

/// A pipeline's epoch as measured, and what its schedule says about it.
struct PipelineRecord {
  double idle_fraction = 0.0;    ///< of the ranks' time: waiting outside passes
  double useful_fraction = 0.0;  ///< forward and backward: what a single rank would have to do too
  /// Idle in theory, if all stages took the same time and nothing else any. Empty where there is no formula.
  std::optional<double> closed_form_idle_fraction;
  /// The schedule with the passes and updates that each stage had on average, messages taking no time.
  double simulated_idle_fraction = 0.0, simulated_useful_fraction = 0.0, simulated_s = 0.0;
  std::optional<double> planned_s;  ///< the same with the costs that the stages were cut by, where these are times
  std::vector<PipelineRankRecord> ranks = {};
};

/// One line of epochs.jsonl.
struct EpochRecord {
  std::int64_t epoch = 0, steps = 0, samples = 0, tokens = 0;
  double epoch_s = 0.0;  ///< train_s.max + eval_s, or the extrapolated whole epoch
  double eval_s = 0.0;   ///< of the slowest rank
  Spread train_s, data_s, forward_s, backward_s, comm_exposed_s, optimizer_s;
  double bubble_fraction = 0.0;
  StepPercentiles step_ms;                     ///< of the slowest rank in each step, warm-up steps excluded
  std::optional<double> comm_exposed_step_ms;  ///< median step's mean over ranks; empty when not measured
  double samples_per_s = 0.0, tokens_per_s = 0.0, flops_per_s = 0.0;
  double samples_per_s_median = 0.0, tokens_per_s_median = 0.0;  ///< of the median step; 0 in older records
  /// Shares of the devices' peak: flops_per_s, the same by PaLM's formula, and recomputation counted in. Empty when the
  /// peak is not known, the model has no such formula, or nothing is recomputed.
  std::optional<double> mfu, mfu_palm, hfu;
  std::optional<double> of_gemm;  ///< flops_per_s over the measured rate of a large matrix product
  double train_loss = 0.0, val_loss = 0.0;
  std::string val_metric_name;  ///< "perplexity" or "accuracy" (a fraction)
  double val_metric = 0.0;
  double lr = 0.0;
  double loss_scale = 1.0;         ///< of the last step
  std::int64_t skipped_steps = 0;  ///< of `steps`: without update, as a scaled gradient overflowed
  double elapsed_s = 0.0;          ///< since training began, time before a resume included
  std::array<Spread, kMemoryKinds> memory_peak_bytes;
  Spread memory_peak_total_bytes;
  MemoryByKind memory_predicted_bytes;        ///< of the rank with the largest prediction
  std::int64_t device_memory_used_bytes = 0;  ///< as the driver or the system sees it, of the fullest rank
  std::int64_t library_bytes = 0;             ///< device memory of libraries and reductions, outside the arena
  std::optional<Spread> data_store_bytes;     ///< host memory of samples; empty without a data store
  std::vector<StalenessRecord> staleness;     ///< by stage; empty when no weights are ever stale
  std::optional<PipelineRecord> pipeline;     ///< empty without a pipeline of several stages
  std::map<std::string, CommRecord> comm;     ///< keyed by "axis.operation"
  bool extrapolated = false;                  ///< epoch_s was extrapolated from measured steps
};

/// Facts about one rank, gathered once.
struct RankRecord {
  int rank = 0, local_rank = 0;
  std::string host, device, device_uuid;
  int threads = 1;
  DeviceState gpu_start{}, gpu_end{};  ///< before any memory is taken; after the last epoch's training. Empty on CPUs
};

/// run.json without its status.
struct RunRecord {
  std::string name, engine, model, command;
  std::string start_utc;
  std::string config_json;  ///< effective configuration
  std::string config_hash;
  std::string engine_description_json;             ///< effective knobs as the engine reports them
  std::map<std::string, std::string> versions;     ///< pdlbench, git_sha, git_dirty, compiler, mpi, libraries
  std::map<std::string, std::string> environment;  ///< allow-listed variables only
  std::map<std::string, std::string> data;         ///< name, source, identity, samples of both splits
  std::vector<RankRecord> ranks;
  std::int64_t epochs_planned = 0;  ///< how many epochs a successful run has
  int dp = 1, tp = 1, pp = 1;
  int ranks_per_device = 1;
  std::string comm, launcher, backend, dtype;
  int gpus = 0;                            ///< different ones; 0 on CPUs
  std::string flops_formula;               ///< how operations of the model are counted
  std::string palm_formula;                ///< likewise for mfu_palm; empty when there is none
  std::optional<double> peak_flops_per_s;  ///< of all devices together, in this dtype; empty when not known
  std::optional<double> gemm_flops_per_s;  ///< of all ranks together, measured at the start; empty when it was not
  bool synthetic_data = false;
};

/// Percentiles by nearest rank (the median too: the lower middle one of an even number). Empty input gives zeros.
StepPercentiles percentiles(std::vector<double> step_ms);

/// Empty input gives zeros.
Spread spread_of(const std::vector<double>& values);

/// Now as "2026-03-14T09:26:53Z": how start and end of a run are written.
std::string utc_now();

}  // namespace pdl
