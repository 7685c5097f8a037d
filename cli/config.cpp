#include "cli/config.h"

#include <algorithm>

namespace pdl {
namespace {

std::vector<std::string> engine_names() {
  std::vector<std::string> names;
  for (const EngineDefinition& definition : engine_definitions()) names.push_back(definition.name);
  return names;
}

DType dtype_of(const std::string& name) {
  for (const DType dtype : {DType::fp64, DType::bf16, DType::fp16}) {
    if (name == name_of(dtype)) return dtype;
  }
  return DType::fp32;  // tf32 too
}

bool needs_gpu(const std::string& dtype) { return dtype == "tf32" || dtype == "bf16" || dtype == "fp16"; }

/// CPUs compute in fp64 and fp32, GPUs in everything but fp64.
void check_dtype(const ConfigReader& training, const std::string& device, const std::string& dtype) {
  if (device == "cuda" && dtype == "fp64") {
    training.problem("dtype", "fp64 is the oracle, on CPUs: set device=cpu, or take fp32, tf32, bf16 or fp16");
  }
  if (device == "cpu" && needs_gpu(dtype)) {
    training.problem("dtype", str(dtype, " needs a GPU: this run computes on the CPU; take fp32 or fp64"));
  }
}

/// Global batch, part of each rank and micro-batch have to fit: global = micro-batch x accumulation x data-parallel
/// ranks.
void read_batch(const ConfigReader& reader, int dp_size, TrainingOptions& training) {
  const auto global =
      reader.get_optional<std::int64_t>("global_batch_size", "samples per optimizer update over all ranks", {1, 1e12});
  const auto per_rank = reader.get_optional<std::int64_t>(
      "batch_size_per_rank", "samples per update on each data-parallel rank, in place of global_batch_size", {1, 1e12});
  training.micro_batch =
      reader.get<std::int64_t>("micro_batch_size", 0, "samples per forward pass; 0: the rank's whole part", {0, 1e12});
  if (global && per_rank) {
    reader.problem("batch_size_per_rank", "stands beside global_batch_size; give one of the two");
  } else if (!global && !per_rank) {
    reader.problem("global_batch_size", "missing; give it or batch_size_per_rank");
  }
  training.global_batch = global ? *global : per_rank.value_or(1) * dp_size;
  if (training.global_batch % dp_size != 0) {
    const std::int64_t below = training.global_batch / dp_size * dp_size;
    reader.problem("global_batch_size",
                   str(training.global_batch, " samples do not divide by ", dp_size,
                       " data-parallel ranks; nearest: ", below > 0 ? str(below, " or ") : "", below + dp_size));
    return;
  }
  const std::int64_t local = training.global_batch / dp_size;
  if (training.micro_batch > 0 && local % training.micro_batch != 0) {
    std::int64_t nearest = std::min(training.micro_batch, local);
    while (local % nearest != 0) --nearest;
    reader.problem("micro_batch_size", str(training.micro_batch, " does not divide the ", local, " samples of a rank (",
                                           training.global_batch, " / ", dp_size, "); nearest: ", nearest));
  }
}

TrainingOptions read_training(const ConfigReader& reader, int dp_size, const std::string& device,
                              std::int64_t& checkpoint_epochs) {
  TrainingOptions training;
  training.epochs = reader.get<std::int64_t>("epochs", 1, "passes over the training data", {1, 1e9});
  read_batch(reader, dp_size, training);
  training.seed = static_cast<std::uint64_t>(
      reader.get<std::int64_t>("seed", 1234, "of initial weights, order of samples and dropout", {0, 9e18}));
  const std::string dtype = reader.choice(
      "dtype", "fp32", {"fp64", "fp32", "tf32", "bf16", "fp16"},
      "arithmetic: fp64 on CPUs; tf32 (fp32 with rounded products), bf16 and fp16 (fp32 master weights) on GPUs");
  check_dtype(reader, device, dtype);
  training.dtype = dtype_of(dtype);
  training.tf32 = dtype == "tf32";
  training.deterministic = reader.get("deterministic", false, "fixed-order reductions: two runs are bit-equal");
  training.drop_last = reader.get("drop_last", false, "leave out a ragged last batch; otherwise it is trained exactly");
  checkpoint_epochs = reader.get<std::int64_t>("checkpoint_every_epochs", 1,
                                               "write a checkpoint every so many epochs; 0: none", {0, 1e9});
  training.optimizer = read_optimizer_options(reader.section("optimizer", "update rule"));
  training.lr_schedule = read_lr_schedule_options(reader.section("lr_schedule", "learning rate over time"));
  training.loss_scale = read_loss_scale_options(
      reader.section("loss_scale", "factor that keeps small gradients from vanishing"), training.dtype);
  return training;
}

MeasureOptions read_measure(const ConfigReader& reader, const std::string& device) {
  MeasureOptions measure;
  measure.warmup_steps =
      reader.get<std::int64_t>("warmup_steps", 3, "first steps of the run, left out of step statistics", {0, 1e9});
  measure.max_steps_per_epoch = reader.get<std::int64_t>(
      "max_steps_per_epoch", 0, "measure so many steps and extrapolate the epoch; 0: whole epochs", {0, 1e12});
  measure.max_eval_steps =
      reader.get<std::int64_t>("max_eval_steps", 0, "validation steps; 0: the whole split", {0, 1e12});
  measure.evaluate = reader.get("evaluate", true, "evaluate on the validation split after each epoch");
  measure.raw_steps = reader.get("raw_steps", false, "write every step's times to steps.csv");
  measure.gemm_rate = reader.get("gemm_rate", device == "cuda",
                                 "measure a large matrix product at the start, to which speed is then related");
  measure.without_communication =
      reader.get("without_communication", false,
                 "exchange nothing after the set-up: times show what communication costs, results are invalid");
  measure.nvtx = reader.get("nvtx", false,
                            "name steps, phases, tasks and layers to NVIDIA's profilers (GPUs); no pass is replayed");
  measure.trace_steps = reader.get<std::int64_t>(
      "trace", 0, "steps after the warm-up to draw in trace.json; they are slower and count as warm-up", {0, 100});
  if (measure.nvtx && device != "cuda") {
    reader.problem("nvtx", "names ranges to NVIDIA's profilers, but this run computes on the CPU; set it to false");
  }
  return measure;
}

LimitOptions read_limits(const ConfigReader& reader) {
  LimitOptions limits;
  limits.timeout_s = reader.get("timeout_s", 60.0, "longest wait for another rank, in seconds; 0: for ever", {0, 1e9});
  limits.memory_limit_mb =
      reader.get<std::int64_t>("memory_limit_mb", 0, "MiB that a rank may take; 0: what the device has", {0, 1e9});
  limits.threads_per_rank =
      reader.get("threads_per_rank", 0,
                 "compute threads of a rank (CPU); 0: OMP_NUM_THREADS, or cores / ranks on the host", {0, 4096});
  return limits;
}

/// What NCCL and the matrix products beside it may take of a GPU.
void read_nccl(const ConfigReader& reader, ExperimentConfig& config) {
  constexpr double kMostCtas = 64;  // NCCL's own limit
  NcclOptions& nccl = config.nccl;
  nccl.min_ctas = reader.get("min_ctas", 0, "fewest thread blocks of an operation; 0: NCCL's choice", {0, kMostCtas});
  nccl.max_ctas = reader.get(
      "max_ctas", 0, "most thread blocks of an operation, each on a multiprocessor; 0: NCCL's choice", {0, kMostCtas});
  if (nccl.max_ctas > 0 && nccl.min_ctas > nccl.max_ctas) {
    reader.problem("min_ctas",
                   str(nccl.min_ctas, " is more than max_ctas, ", nccl.max_ctas, "; at most ", nccl.max_ctas));
  }
  config.gemm_sm_margin =
      reader.get("gemm_sm_margin", 0, "multiprocessors that matrix products leave free for NCCL; 0: none", {0, 1024});
}

DataLoaderOptions read_loader(const ConfigReader& reader, DType dtype) {
  DataLoaderOptions loader;
  loader.threads = reader.get("threads", 1, "loader threads of a rank; 0: read on the compute thread", {0, 256});
  loader.prefetch = reader.get("prefetch", 2, "micro-batches read ahead", {1, 1024});
  loader.image_dtype = wide_dtype(dtype);
  return loader;
}

DataStoreOptions read_data_store(const ConfigReader& reader, const DataLoaderOptions& loader) {
  DataStoreOptions store;
  store.enabled = reader.get("enabled", store.enabled,
                             "keep each sample in the memory of one rank; ranks exchange those of the next steps");
  store.preload = reader.get("preload", store.preload,
                             "read all samples before training starts; false: each when a step first needs it");
  store.loader_threads = loader.threads;
  return store;
}

/// What "auto" means for this configuration on this machine.
std::string usual_device(const ConfigDocument& document) {
  const std::string dtype = document.root().section("training", "").get<std::string>("dtype", "fp32", "");
  if (dtype == "fp64") return "cpu";
  return needs_gpu(dtype) || device_count("cuda") > 0 ? "cuda" : "cpu";
}

/// The keys below `reader` that have been asked for, those of plug-ins left out.
void collect_docs(const ConfigReader& reader, const std::string& prefix, std::vector<KeyDoc>& docs) {
  for (KeyDoc key : reader.docs()) {
    if (prefix.empty() && (key.key == "workload" || key.key == "engine")) continue;
    if (key.type == "section") {
      collect_docs(reader.section(key.key, key.doc), prefix + key.key + ".", docs);
    } else {
      key.key = prefix + key.key;
      docs.push_back(std::move(key));
    }
  }
}

}  // namespace

ConfigReader engine_block(const ConfigDocument& document) {
  return document.root().section("engine", "the parallel engine and its knobs");
}

std::vector<KeyDoc> setting_docs() {
  const ConfigDocument document = ConfigDocument::parse("{}", "list");
  static_cast<void>(read_experiment(document, 1));  // an empty file will not do, but all keys are asked for
  std::vector<KeyDoc> docs;
  collect_docs(document.root(), "", docs);
  return docs;
}

ExperimentConfig read_experiment(const ConfigDocument& document, int ranks) {
  ExperimentConfig config;
  const ConfigReader root = document.root();
  config.name = root.get<std::string>("name", "experiment", "names the run and its directory");

  config.device = root.choice("device", "auto", {"auto", "cpu", "cuda"},
                              "where the ranks compute; auto: on GPUs where there are any, except in fp64");
  config.cuda_graphs = root.get("cuda_graphs", true, "replay passes that repeat as CUDA graphs; nothing on CPUs");
  const ConfigReader workload = root.section("workload", "model and data");
  config.model = read_model_options(workload);
  config.data = read_data_options(workload);

  const ConfigReader engine = engine_block(document);
  config.engine = find_engine(engine.require_choice("name", engine_names(), "one of `pdlbench list engines`"));
  int dp_size = 1;
  if (config.engine != nullptr) {
    config.engine->document(engine);
    dp_size = std::max(1, config.engine->data_parallel_size(ranks, engine));
  }
  if (config.device == "auto") config.device = usual_device(document);
  config.training = read_training(root.section("training", "recipe: how long, on what batches, which update"), dp_size,
                                  config.device, config.checkpoint_epochs);
  config.comm = root.choice("comm", "auto", {"auto", "self", "mpi", "nccl"}, "how the ranks talk");
  read_nccl(root.section("nccl", "what NCCL and the products beside it may take of a GPU"), config);
  config.measure = read_measure(root.section("measure", "what is measured"), config.device);
  config.limits = read_limits(root.section("limits", "time and memory that a rank may take"));
  const ConfigReader loader = root.section("loader", "reading samples");
  config.loader = read_loader(loader, config.training.dtype);
  const ConfigReader store = loader.section("data_store", "samples in memory, dealt out over the ranks");
  config.data_store = read_data_store(store, config.loader);
  if (config.data_store.enabled && config.engine != nullptr && !config.engine->takes_data_store) {
    store.problem("enabled", str(config.engine->name, " reads samples on its first and last stage only and takes no ",
                                 "data store; set it to false"));
  }
  return config;
}

}  // namespace pdl
