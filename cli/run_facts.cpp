#include "cli/run_facts.h"

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/backend/gemm_rate.h"
#include "engine/device/peak_flops.h"
#include "engine/record/json_lines.h"
#include "pdl_build_info.h"

extern char** environ;

namespace pdl {
namespace {

using Json = nlohmann::ordered_json;

/// Variables that change how fast or how right a run is; never the whole environment, which may hold secrets.
std::map<std::string, std::string> relevant_environment() {
  std::map<std::string, std::string> kept;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos) continue;
    for (const char* prefix :
         {"OMP_", "CUDA_", "NCCL_", "MPIR_", "MPICH_", "OMPI_MCA_", "UCX_", "FI_", "DNNL_", "ONEDNN_"}) {
      if (text.starts_with(prefix)) kept[text.substr(0, equals)] = text.substr(equals + 1);
    }
    for (const char* name : {"SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION"}) {
      if (text.starts_with(std::string(name) + "=")) kept[name] = text.substr(equals + 1);
    }
  }
  return kept;
}

Json describe_rank(const RankInfo& rank, Device& device) {
  const DeviceInfo info = device.info();
  return {{"rank", rank.rank},
          {"local_rank", rank.local_rank},
          {"host", rank.host},
          {"device", info.name},
          {"uuid", info.uuid},
          {"threads", info.threads},
          {"state", to_json(device.state())}};
}

std::string knobs_json(const EngineDescription& description) {
  Json json = {{"name", description.name}, {"micro_batches", description.micro_batches}};
  json["knobs"] = description.knobs;
  json["differences"] = description.differences;
  return json.dump();
}

std::map<std::string, std::string> describe_data(const DatasetPair& data) {
  std::map<std::string, std::string> facts;
  for (const Dataset* split : {data.train.get(), data.validation.get()}) {
    const DatasetInfo info = split->info();
    facts["name"] = info.name;
    facts["source"] = info.source;
    facts[info.split + "_samples"] = str(info.samples);
    facts[info.split + "_dropped"] = str(info.dropped);
    facts[info.split + "_identity"] = info.identity;
    if (info.unigram_perplexity > 0.0) facts[info.split + "_unigram_perplexity"] = str(info.unigram_perplexity);
  }
  return facts;
}

/// How many ranks sit on the fullest device. CPU ranks of one host share it as devices share their host.
int most_ranks_per_device(const std::vector<RankRecord>& ranks, const std::string& backend) {
  if (backend == "cpu") return 1;
  std::map<std::string, int> counts;
  for (const RankRecord& rank : ranks) ++counts[rank.host + rank.device_uuid];
  int most = 1;
  for (const auto& [device, count] : counts) most = std::max(most, count);
  return most;
}

/// Of all devices of the run together; ranks that share one count it once. Empty when some device's is not known.
std::optional<double> total_peak_flops_per_s(const RunRecord& run) {
  std::set<std::string> seen;
  double total = 0.0;
  for (const RankRecord& rank : run.ranks) {
    if (!seen.insert(rank.host + rank.device_uuid).second) continue;
    const double peak = peak_flops_per_s(rank.device, run.dtype);
    if (peak <= 0.0) return std::nullopt;
    total += peak;
  }
  return total > 0.0 ? std::optional(total) : std::nullopt;
}

int different_gpus(const std::vector<RankRecord>& ranks, const std::string& backend) {
  std::set<std::string> gpus;
  for (const RankRecord& rank : ranks) gpus.insert(rank.host + rank.device_uuid);
  return backend == "cpu" ? 0 : static_cast<int>(gpus.size());
}

std::map<std::string, std::string> describe_versions(const World& world, const Experiment& experiment) {
  std::map<std::string, std::string> versions = {{"pdlbench", str(kVersion)},
                                                 {"git_sha", str(kGitSha)},
                                                 {"git_dirty", kGitDirty ? "true" : "false"},
                                                 {"compiler", str(kCompiler)},
                                                 {"build_type", str(kBuildType)},
                                                 {"flags", str(kFlags)},
                                                 {"mpi", world.info().mpi_library},
                                                 {"backend_library", experiment.backend->library()}};
  if (const std::string library = experiment.communicator->library(); !library.empty()) {
    versions["comm_library"] = library;
  }
  return versions;
}

}  // namespace

RunRecord collect_run_facts(World& world, const Experiment& experiment, const std::string& command_line) {
  const ExperimentConfig& config = experiment.config;
  const EngineDescription description = experiment.engine->describe();
  RunRecord run;
  for (const std::string& text : world.gather(describe_rank(world.info(), *experiment.device).dump())) {
    const Json rank = Json::parse(text);
    run.ranks.push_back({.rank = rank["rank"],
                         .local_rank = rank["local_rank"],
                         .host = rank["host"],
                         .device = rank["device"],
                         .device_uuid = rank["uuid"],
                         .threads = rank["threads"],
                         .gpu_start = device_state_from_json(rank["state"])});
  }
  run.name = config.name;
  run.engine = config.engine->name;
  run.model = experiment.model.name;
  run.command = command_line;
  run.start_utc = utc_now();
  run.config_json = experiment.document->effective_json();
  run.config_hash = experiment.document->effective_hash();
  run.engine_description_json = knobs_json(description);
  run.versions = describe_versions(world, experiment);
  run.environment = relevant_environment();
  run.data = describe_data(experiment.data);
  run.data["data_store"] = !config.data_store.enabled  ? "off"
                           : config.data_store.preload ? "preloaded"
                                                       : "filled when first used";
  run.epochs_planned = config.training.epochs;
  run.dp = description.dp;
  run.tp = description.tp;
  run.pp = description.pp;
  run.backend = experiment.backend->name();
  run.ranks_per_device = most_ranks_per_device(run.ranks, run.backend);
  run.gpus = different_gpus(run.ranks, run.backend);
  run.comm = experiment.communicator->transport();
  run.launcher = world.info().launcher;
  run.dtype = config.training.tf32 ? "tf32" : std::string(name_of(config.training.dtype));
  run.flops_formula = experiment.model.flops_formula;
  run.palm_formula = experiment.model.palm_formula;
  run.peak_flops_per_s = total_peak_flops_per_s(run);
  run.synthetic_data = experiment.data.train->info().synthetic;
  return run;
}

std::optional<double> total_gemm_flops_per_s(World& world, Experiment& experiment) {
  const std::int64_t extent = experiment.device->info().kind == "cpu" ? kCpuGemmExtent : kGpuGemmExtent;
  std::vector<double> rate = {0.0}, unmeasured = {0.0};
  try {
    rate[0] =
        measured_gemm_flops_per_s(*experiment.device, *experiment.backend, experiment.config.training.dtype, extent);
  } catch (const Error& error) {
    if (error.code() != ExitCode::out_of_memory) throw;
    unmeasured[0] = 1.0;
  }
  world.reduce(rate, ReduceOp::sum);
  world.reduce(unmeasured, ReduceOp::sum);
  return unmeasured[0] > 0.0 ? std::nullopt : std::optional(rate[0]);
}

void collect_end_states(World& world, const DeviceState& mine, std::vector<RankRecord>& ranks) {
  const std::vector<std::string> states = world.gather(to_json(mine));
  for (std::size_t rank = 0; rank < std::min(states.size(), ranks.size()); ++rank) {
    ranks[rank].gpu_end = device_state_from_json(states[rank]);
  }
}

std::string data_identity(const DatasetPair& data) {
  return data.train->info().identity + "+" + data.validation->info().identity;
}

}  // namespace pdl
