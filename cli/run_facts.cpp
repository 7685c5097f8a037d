#include "cli/run_facts.h"

#include <unistd.h>
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

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

Json describe_rank(const RankInfo& rank, const DeviceInfo& device) {
  return {{"rank", rank.rank},     {"local_rank", rank.local_rank}, {"host", rank.host},
          {"device", device.name}, {"uuid", device.uuid},           {"threads", device.threads}};
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

}  // namespace

RunRecord collect_run_facts(World& world, const Experiment& experiment, const std::string& command_line) {
  const ExperimentConfig& config = experiment.config;
  const EngineDescription description = experiment.engine->describe();
  RunRecord run;
  for (const std::string& text : world.gather(describe_rank(world.info(), experiment.device->info()).dump())) {
    const Json rank = Json::parse(text);
    run.ranks.push_back({.rank = rank["rank"],
                         .local_rank = rank["local_rank"],
                         .host = rank["host"],
                         .device = rank["device"],
                         .device_uuid = rank["uuid"],
                         .threads = rank["threads"]});
  }
  run.name = config.name;
  run.engine = config.engine->name;
  run.model = experiment.model.name;
  run.command = command_line;
  run.start_utc = utc_now();
  run.config_json = experiment.document->effective_json();
  run.config_hash = experiment.document->effective_hash();
  run.engine_description_json = knobs_json(description);
  run.versions = {{"pdlbench", str(kVersion)},
                  {"git_sha", str(kGitSha)},
                  {"git_dirty", kGitDirty ? "true" : "false"},
                  {"compiler", str(kCompiler)},
                  {"build_type", str(kBuildType)},
                  {"flags", str(kFlags)},
                  {"mpi", world.info().mpi_library},
                  {"backend_library", experiment.backend->library()}};
  run.environment = relevant_environment();
  run.data = describe_data(experiment.data);
  run.epochs_planned = config.training.epochs;
  run.dp = description.dp;
  run.tp = description.tp;
  run.pp = description.pp;
  run.backend = experiment.backend->name();
  run.ranks_per_device = most_ranks_per_device(run.ranks, run.backend);
  run.comm = experiment.communicator->transport();
  run.launcher = world.info().launcher;
  run.dtype = std::string(name_of(config.training.dtype));
  run.synthetic_data = experiment.data.train->info().synthetic;
  return run;
}

std::string data_identity(const DatasetPair& data) {
  return data.train->info().identity + "+" + data.validation->info().identity;
}

std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<std::int64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace pdl
