#include "cli/experiment.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <thread>

#include "parallel/comm/self_communicator.h"
#include "parallel/comm/silent_communicator.h"

namespace pdl {
namespace {

std::unique_ptr<Experiment> read(const std::string& path, const std::vector<std::string>& overrides, int ranks) {
  auto experiment = std::make_unique<Experiment>();
  experiment->document = std::make_unique<ConfigDocument>(ConfigDocument::load(path, overrides));
  experiment->config = read_experiment(*experiment->document, ranks);
  experiment->document->finish();
  return experiment;
}

/// Local rank r takes device r of its host, and again from the first when there are more ranks than devices.
void open_device(Experiment& experiment, int threads, int local_rank) {
  const ExperimentConfig& config = experiment.config;
  experiment.device = make_device({.kind = config.device,
                                   .threads = threads,
                                   .ordinal = local_rank % std::max(1, device_count(config.device)),
                                   .memory_limit_bytes = config.limits.memory_limit_mb << 20,
                                   // A replay passes no layer, so that none could be named.
                                   .record_work = config.cuda_graphs && !config.measure.nvtx});
  experiment.backend = make_backend(*experiment.device, {.deterministic = config.training.deterministic,
                                                         .tf32 = config.training.tf32,
                                                         .sm_margin = config.gemm_sm_margin});
  experiment.backend->set_stream(experiment.device->compute_stream());
}

void name_ranges(Experiment& experiment) {
  if (!experiment.config.measure.nvtx || experiment.device->name_ranges()) return;
  throw ConfigError("/measure/nvtx: this build was made without NVTX; set it to false", ExitCode::unsupported);
}

/// Rules between the data and the ranks, known only once the data is open.
void check_sizes(const Experiment& experiment, int ranks) {
  const std::int64_t samples = experiment.data.train->size();
  const std::int64_t validation = experiment.data.validation->size();
  if (samples < ranks) {
    throw ConfigError(str("more ranks than samples: ", ranks, " ranks, ", samples, " training samples; start at most ",
                          samples, " ranks"),
                      ExitCode::unsupported);
  }
  if (samples < experiment.config.training.global_batch) {
    throw ConfigError(str("/training/global_batch_size: ", experiment.config.training.global_batch,
                          " is more than the ", samples, " training samples of ", experiment.data.train->info().name));
  }
  if (validation == 0 && experiment.config.measure.evaluate) {
    throw ConfigError("the validation split is empty; set measure.evaluate=false or give more data");
  }
}

/// Deals the samples of both splits out over the ranks. They travel between host memories, whatever the device is.
void deal_out_samples(World& world, Experiment& experiment) {
  const ExperimentConfig& config = experiment.config;
  const RankInfo& rank = world.info();
  if (config.device != "cpu")
    experiment.host = make_device({.kind = "cpu", .threads = threads_per_rank(config.limits, rank)});
  Device& host = experiment.host ? *experiment.host : *experiment.device;
  const std::unique_ptr<Communicator> ranks = make_counting_communicator(
      world.make_communicator(host, {.kind = rank.size > 1 ? "mpi" : "self", .timeout_s = config.limits.timeout_s}),
      experiment.ledger);
  world.announce("filling the data store");
  for (std::unique_ptr<Dataset>* split : {&experiment.data.train, &experiment.data.validation}) {
    *split = std::make_unique<DataStore>(std::move(*split), ranks->split(0, rank.rank, "data_store"), host,
                                         config.data_store);
  }
}

void build_engine(Experiment& experiment, std::function<bool()> stop_requested) {
  const ExperimentConfig& config = experiment.config;
  const auto size_of_split = [](const std::unique_ptr<Dataset>& split) {
    return split ? split->size() : std::int64_t{0};
  };
  experiment.context =
      std::make_unique<EngineContext>(EngineContext{.world = *experiment.communicator,
                                                    .device = *experiment.device,
                                                    .backend = *experiment.backend,
                                                    .model = experiment.model,
                                                    .training = config.training,
                                                    .data = experiment.data,
                                                    .train_samples = size_of_split(experiment.data.train),
                                                    .validation_samples = size_of_split(experiment.data.validation),
                                                    .loader = config.loader,
                                                    .max_steps_per_epoch = config.measure.max_steps_per_epoch,
                                                    .stop_requested = std::move(stop_requested)});
  experiment.engine = config.engine->make(*experiment.context, engine_block(*experiment.document));
  experiment.document->finish();
}

CommOptions comm_options(const ExperimentConfig& config) {
  return {.kind = config.comm,
          .deterministic = config.training.deterministic,
          .timeout_s = config.limits.timeout_s,
          .nccl = config.nccl};
}

/// What is not sent is not counted: the silent communicator comes last.
void connect(Experiment& experiment, World& world) {
  Device& device = *experiment.device;
  experiment.ledger.measure_on(device);
  experiment.communicator =
      make_counting_communicator(world.make_communicator(device, comm_options(experiment.config)), experiment.ledger);
  if (experiment.config.measure.without_communication) {
    experiment.communicator = make_silent_communicator(std::move(experiment.communicator), device, experiment.silent);
  }
}

}  // namespace

Experiment::~Experiment() {
  if (std::uncaught_exceptions() == 0 || !device || device->host_wait() == nullptr) return;
  device->host_wait()->abandon();
}

int threads_per_rank(const LimitOptions& limits, const RankInfo& rank) {
  if (limits.threads_per_rank > 0) return limits.threads_per_rank;
  if (const char* wanted = std::getenv("OMP_NUM_THREADS"); wanted != nullptr && std::atoi(wanted) > 0) {
    return std::atoi(wanted);
  }
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  // A launcher may have bound this rank to fewer cores than its share; threads that take turns on one core are far
  // slower.
  cpu_set_t mine;
  const int bound = ::sched_getaffinity(0, sizeof mine, &mine) == 0 ? CPU_COUNT(&mine) : cores;
  return std::max(1, std::min(cores / rank.local_size, bound));
}

std::unique_ptr<Experiment> make_experiment(World& world, const std::string& path,
                                            const std::vector<std::string>& overrides) {
  const RankInfo& rank = world.info();
  std::unique_ptr<Experiment> experiment = read(path, overrides, rank.size);
  const ExperimentConfig& config = experiment->config;
  world.set_timeout(config.limits.timeout_s);
  open_device(*experiment, threads_per_rank(config.limits, rank), rank.local_rank);
  name_ranges(*experiment);
  world.announce("opening the data");
  experiment->data = open_datasets(config.data, config.model, config.training.seed);
  check_sizes(*experiment, rank.size);
  if (config.data_store.enabled) deal_out_samples(world, *experiment);
  experiment->model = make_model(config.model, experiment->data.train->info().classes);
  connect(*experiment, world);
  build_engine(*experiment, [&world] { return world.stop_requested(); });
  return experiment;
}

std::unique_ptr<Experiment> make_planned_experiment(int ranks, const std::string& path,
                                                    const std::vector<std::string>& overrides) {
  std::unique_ptr<Experiment> experiment = read(path, overrides, ranks);
  experiment->config.device = "cpu";
  experiment->config.limits.memory_limit_mb = 0;
  open_device(*experiment, 1, 0);
  experiment->model =
      make_model(experiment->config.model, planned_classes(experiment->config.data, experiment->config.model));
  experiment->communicator = make_planning_communicator(0, ranks);
  build_engine(*experiment, nullptr);
  return experiment;
}

namespace {

/// The engine's knobs that the reference has as well, as they are in force: "engine.key=value".
std::vector<std::string> shared_knobs(const Engine& engine, const EngineDefinition& reference) {
  const ConfigDocument document = ConfigDocument::parse("{}", "reference");
  const ConfigReader reader = engine_block(document);
  reference.document(reader);
  const std::map<std::string, std::string> in_force = engine.describe().knobs;
  std::vector<std::string> overrides;
  for (const KeyDoc& knob : reader.docs()) {
    if (const auto found = in_force.find(knob.key); found != in_force.end()) {
      overrides.push_back("engine." + knob.key + "=" + found->second);
    }
  }
  return overrides;
}

}  // namespace

std::unique_ptr<Experiment> make_reference_experiment(const Experiment& of) {
  auto reference = std::make_unique<Experiment>();
  reference->config = of.config;
  reference->config.engine = find_engine(of.config.engine->reference);
  PDL_CHECK(reference->config.engine != nullptr, "no engine is called ", of.config.engine->reference);
  reference->document = std::make_unique<ConfigDocument>(
      ConfigDocument::parse("{}", "reference", shared_knobs(*of.engine, *reference->config.engine)));
  if (of.config.device == "cuda") {  // the oracle is the CPU in fp64, whatever the GPU computes in
    reference->config.device = "cpu";
    reference->config.training.dtype = reference->config.loader.image_dtype = DType::fp64;
  }
  const int threads =
      of.config.device == "cuda" ? static_cast<int>(std::thread::hardware_concurrency()) : of.device->info().threads;
  open_device(*reference, std::max(1, threads), 0);
  reference->data = open_datasets(of.config.data, of.config.model, of.config.training.seed);
  reference->model = of.model;
  reference->communicator = make_self_communicator(*reference->device);
  build_engine(*reference, nullptr);
  return reference;
}

std::string memory_table(const MemoryByKind& predicted, const MemoryTracker* measured) {
  std::string text = measured ? "  memory            predicted    measured peak\n" : "  memory            predicted\n";
  const auto row = [&](std::string_view name, std::int64_t foreseen, std::int64_t peak) {
    char line[128];
    std::snprintf(line, sizeof line, "  %-16s %11s", std::string(name).c_str(), format_bytes(foreseen).c_str());
    text += line;
    if (measured) {
      std::snprintf(line, sizeof line, " %16s", format_bytes(peak).c_str());
      text += line;
    }
    text += "\n";
  };
  for (int kind = 0; kind < kMemoryKinds; ++kind) {
    const auto tag = static_cast<MemoryKind>(kind);
    row(kMemoryKindNames[static_cast<std::size_t>(kind)], predicted[tag], measured ? measured->peak()[tag] : 0);
  }
  row("total", predicted.total(), measured ? measured->peak_total() : 0);
  return text;
}

}  // namespace pdl
