// pdlbench run: train, evaluate and record, epoch by epoch.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <vector>

#include "cli/checkpoint.h"
#include "cli/commands/commands.h"
#include "cli/experiment.h"
#include "cli/memory_advice.h"
#include "cli/progress.h"
#include "cli/run_facts.h"
#include "cli/tracing.h"
#include "engine/data/sample_staging.h"
#include "engine/record/range_observer.h"
#include "engine/record/recorder.h"
#include "engine/record/run_writer.h"

namespace pdl {
namespace {

/// A run on this rank, from its directory to its RESULT line.
class Run {
 public:
  Run(World& world, const Args& args)
      : world_(world),
        args_(args),
        first_rank_(world.info().rank == 0),
        experiment_(make_experiment(world, args.config, args.overrides)),
        directory_(args.out.empty() ? "results/" + experiment_->config.name : args.out),
        identity_{experiment_->document->effective_hash(), data_identity(experiment_->data)},
        measure_(experiment_->config.measure),
        clock_(measure_.warmup_steps + measure_.trace_steps, experiment_->device->make_stopwatch()),
        progress_(first_rank_, experiment_->config.training.epochs),
        tracer_(measure_.warmup_steps, measure_.trace_steps, *experiment_->device, clock_, experiment_->ledger),
        ranges_(experiment_->device->ranges()),
        observers_({&tracer_, &ranges_, &progress_, &clock_, &experiment_->ledger}) {
    experiment_->ledger.tell_waits_to(&clock_);
  }
  ~Run() { experiment_->ledger.tell_waits_to(nullptr); }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  int execute() {
    start();
    try {
      train();
    } catch (const Error& error) {
      if (writer_)
        writer_->finish(error.code() == ExitCode::numeric ? RunStatus::diverged : RunStatus::failed, error.what());
      throw;
    }
    return finish();
  }

 private:
  void start();
  void announce_start(const Prediction& prediction) const;
  void check_memory(const Prediction& prediction) const;
  void train();
  void finish_epoch(const EpochPlan& plan, const PassResult& trained);
  void check_clocks(double device_s) const;
  void write_trace(std::int64_t epoch);
  PassResult evaluate(std::int64_t& eval_steps, std::int64_t& full_eval_steps);
  std::vector<RankEpoch> gather(RankEpoch mine);
  void print_epoch(const EpochRecord& record) const;
  int finish();

  World& world_;
  const Args& args_;
  bool first_rank_;
  std::unique_ptr<Experiment> experiment_;
  std::string directory_;
  CheckpointIdentity identity_;
  std::unique_ptr<RunWriter> writer_;  ///< rank 0 only
  const MeasureOptions& measure_;
  PhaseClock clock_;
  Progress progress_;
  StepTracer tracer_;
  RangeObserver ranges_;
  Observers observers_;
  double trace_zero_s_ = 0.0;
  MemoryByKind predicted_;
  std::int64_t first_epoch_ = 0;
  double elapsed_before_s_ = 0.0, start_s_ = 0.0, epoch_start_s_ = 0.0;
  std::optional<double> peak_flops_per_s_, gemm_flops_per_s_;  ///< of all devices
  std::vector<RankRecord> ranks_;                              ///< complete on rank 0
  DeviceState device_state_;                                   ///< after the last epoch's training
  EpochRecord last_;
  bool stopped_ = false, trace_written_ = false;
};

/// Directory, memory, initial weights or checkpoint.
void Run::start() {
  if (args_.resume) {
    const std::int64_t found = first_rank_ ? checkpoint_epochs(directory_) : 0;
    first_epoch_ = std::stoll(world_.broadcast(str(found), 0));
    if (first_epoch_ < 0) throw ConfigError("--resume: " + directory_ + " holds no whole checkpoint");
  }
  if (first_rank_) {
    const Existing existing = args_.resume ? Existing::resume : args_.force ? Existing::overwrite : Existing::refuse;
    writer_ = std::make_unique<RunWriter>(directory_, existing, first_epoch_);
    elapsed_before_s_ = writer_->resumed_elapsed_s();
    if (args_.force && !args_.resume) remove_checkpoint(directory_);
  }
  const Prediction prediction = experiment_->engine->predict();
  predicted_ = prediction.memory;
  if (measure_.gemm_rate) world_.announce("measuring a large matrix product");
  gemm_flops_per_s_ = measure_.gemm_rate ? total_gemm_flops_per_s(world_, *experiment_) : std::nullopt;
  RunRecord facts = collect_run_facts(world_, *experiment_, args_.command_line);
  facts.gemm_flops_per_s = gemm_flops_per_s_;
  ranks_ = facts.ranks;
  peak_flops_per_s_ = facts.peak_flops_per_s;
  if (first_rank_) {
    writer_->begin(facts);
    announce_start(prediction);
  }
  check_memory(prediction);
  world_.announce("setting up");
  experiment_->device->reserve(predicted_.total());
  experiment_->engine->prepare();
  if (args_.resume) load_checkpoint(world_, *experiment_->device, *experiment_->engine, directory_, identity_);
  experiment_->silent = measure_.without_communication;
  if (measure_.trace_steps > 0) trace_zero_s_ = common_zero_s(world_);
  start_s_ = PhaseClock::steady_seconds();
}

void Run::announce_start(const Prediction& prediction) const {
  const ExperimentConfig& config = experiment_->config;
  const DatasetInfo train = experiment_->data.train->info();
  std::fprintf(stderr, "%s: %s with %s on %d rank%s (%s, %s), %lld training samples of %s, global batch %lld\n",
               config.name.c_str(), experiment_->model.name.c_str(), config.engine->name.c_str(), world_.info().size,
               world_.info().size == 1 ? "" : "s", experiment_->backend->name().c_str(),
               experiment_->communicator->transport().c_str(), static_cast<long long>(train.samples),
               train.name.c_str(), static_cast<long long>(config.training.global_batch));
  const double unigram = experiment_->data.validation->info().unigram_perplexity;
  if (unigram > 0.0) std::fprintf(stderr, "unigram perplexity of the validation split: %.2f\n", unigram);
  std::fprintf(stderr, "memory of a rank, predicted: %s; records in %s\n",
               format_bytes(prediction.memory.total()).c_str(), directory_.c_str());
  for (const std::string& warning : prediction.warnings) std::fprintf(stderr, "warning: %s\n", warning.c_str());
}

/// Before any memory is taken: what will not fit is refused with the table and the cheapest ways out.
void Run::check_memory(const Prediction& prediction) const {
  // Ranks of a host share its memory, or take turns on its GPUs.
  const DeviceInfo device = experiment_->device->info();
  const int devices = device_count(device.kind), local = world_.info().local_size;
  const std::int64_t share = device.memory_bytes / ((local + devices - 1) / devices);
  const std::int64_t available =
      experiment_->config.limits.memory_limit_mb > 0 ? experiment_->device->memory_limit_bytes() : share;
  if (available <= 0 || prediction.memory.total() <= available) return;
  std::string advice;
  for (const std::string& change :
       changes_that_fit(*experiment_, args_.config, args_.overrides, world_.info().size, available)) {
    advice += "\n    " + change;
  }
  throw Error(
      str("a rank needs ", format_bytes(prediction.memory.total()), " and has ", format_bytes(available), "\n",
          memory_table(prediction.memory, nullptr),
          advice.empty() ? "  neither smaller micro-batches nor recomputation would do: take a smaller model or "
                           "more memory"
                         : "  would fit, cheapest first:" + advice),
      ExitCode::out_of_memory);
}

void Run::train() {
  const ExperimentConfig& config = experiment_->config;
  for (std::int64_t epoch = first_epoch_; epoch < config.training.epochs && !stopped_; ++epoch) {
    world_.announce(str("epoch ", epoch + 1));
    const EpochPlan plan(experiment_->data.train->size(), config.training.global_batch, config.training.seed, epoch,
                         true, config.training.drop_last, config.measure.max_steps_per_epoch);
    progress_.epoch_begin(epoch);
    epoch_start_s_ = PhaseClock::steady_seconds();
    clock_.epoch_begin();
    experiment_->ledger.take();
    experiment_->ledger.take_steps();
    experiment_->device->memory().reset_peak();
    const PassResult trained = experiment_->engine->run_epoch(plan, observers_);
    progress_.epoch_end();
    stopped_ = trained.stopped;
    if (stopped_) return;
    finish_epoch(plan, trained);
    experiment_->device->seal();
    if (config.checkpoint_epochs > 0 && (epoch + 1) % config.checkpoint_epochs == 0) {
      world_.announce("writing a checkpoint");
      save_checkpoint(world_, *experiment_->device, *experiment_->engine, directory_, epoch + 1, identity_);
    }
  }
}

PassResult Run::evaluate(std::int64_t& eval_steps, std::int64_t& full_eval_steps) {
  const ExperimentConfig& config = experiment_->config;
  const EpochPlan plan(experiment_->data.validation->size(), config.training.global_batch, config.training.seed, 0,
                       false, false, config.measure.max_eval_steps);
  eval_steps = plan.steps();
  full_eval_steps = plan.full_steps();
  world_.announce("evaluating");
  return experiment_->engine->evaluate(plan);
}

/// The device's clock says how long training took; the host's must agree, or no time of this run can be trusted.
void Run::check_clocks(double device_s) const {
  constexpr double kShare = 0.01, kSlack_s = 0.05;
  if (experiment_->device->info().kind == "cpu") return;  // one and the same clock
  const double host_s = PhaseClock::steady_seconds() - epoch_start_s_;
  if (std::fabs(host_s - device_s) <= kShare * host_s + kSlack_s) return;
  std::fprintf(stderr,
               "warning: rank %d: an epoch's training took %.3f s by the device's clock, %.3f s by the host's\n",
               world_.info().rank, device_s, host_s);
}

void Run::finish_epoch(const EpochPlan& plan, const PassResult& trained) {
  RankEpoch mine = clock_.epoch_end();
  check_clocks(mine.train_s);
  device_state_ = experiment_->device->state();  // while it is still warm from training
  for (const auto& [operation, count] : experiment_->ledger.take()) {
    mine.comm[operation] = {
        .calls = count.calls, .bytes = count.bytes, .busy_s = count.busy_s, .exposed_s = count.exposed_s};
  }
  for (const double exposed_s : experiment_->ledger.take_steps()) mine.step_exposed_ms.push_back(1000.0 * exposed_s);
  write_trace(plan.epoch());
  mine.memory_peak = experiment_->device->memory().peak();
  mine.memory_peak_total = experiment_->device->memory().peak_total();
  mine.memory_predicted = predicted_;
  mine.device_memory_used = experiment_->device->used_bytes();
  mine.library_bytes = experiment_->device->library_bytes();
  mine.staleness = trained.staleness;
  for (const Dataset* split : {experiment_->data.train.get(), experiment_->data.validation.get()}) {
    if (split->staging() != nullptr) mine.data_store += split->staging()->held_bytes();
  }

  EpochFacts facts;
  facts.epoch = plan.epoch();
  facts.steps = trained.steps;
  const std::int64_t per_sample = experiment_->model.predictions_per_sample;
  facts.samples = trained.predictions / per_sample;
  facts.tokens = per_sample > 1 ? trained.predictions : 0;
  facts.full_steps = plan.full_steps();
  facts.train_loss = trained.loss();
  facts.lr = clock_.last_step().lr;
  facts.loss_scale = clock_.last_step().loss_scale;
  facts.skipped_steps = trained.skipped_steps;
  facts.step_samples = experiment_->config.training.global_batch;
  facts.flops_per_sample = experiment_->model.training_flops_per_sample;
  facts.palm_flops_per_sample = experiment_->model.palm_flops_per_sample;
  facts.recomputed_flops_per_sample = experiment_->model.recomputed_flops_per_sample;
  facts.peak_flops_per_s = peak_flops_per_s_;
  facts.gemm_flops_per_s = gemm_flops_per_s_;
  facts.val_loss = facts.val_metric = NAN;
  const bool text = per_sample > 1;
  facts.val_metric_name = text ? "perplexity" : "accuracy";
  if (experiment_->config.measure.evaluate) {
    const double before_s = PhaseClock::steady_seconds();
    const PassResult validation = evaluate(facts.eval_steps, facts.full_eval_steps);
    mine.eval_s = PhaseClock::steady_seconds() - before_s;
    facts.val_loss = validation.loss();
    facts.val_metric =
        text ? std::exp(validation.loss()) : validation.correct / static_cast<double>(validation.predictions);
  }
  facts.elapsed_s = elapsed_before_s_ + PhaseClock::steady_seconds() - start_s_;
  const std::vector<RankEpoch> ranks = gather(std::move(mine));
  if (!first_rank_) return;
  last_ = merge(ranks, facts);
  if (last_.pipeline) experiment_->engine->explain_pipeline(plan, *last_.pipeline);
  if (measure_.raw_steps) writer_->steps(facts.epoch, slowest_step_ms(ranks), mean_exposed_ms(ranks));
  writer_->epoch(last_);
  print_epoch(last_);
}

/// Once, when its steps are over, or when there are no more steps.
void Run::write_trace(std::int64_t epoch) {
  if (measure_.trace_steps == 0 || trace_written_) return;
  if (!tracer_.complete() && epoch + 1 < experiment_->config.training.epochs) return;
  world_.announce("writing the trace");
  const std::string text = tracer_.write(world_, trace_zero_s_);
  if (first_rank_) writer_->trace(text);
  trace_written_ = true;
}

std::vector<RankEpoch> Run::gather(RankEpoch mine) {
  const std::vector<double> numbers = encode(mine);
  std::string bytes(numbers.size() * sizeof(double), '\0');
  std::memcpy(bytes.data(), numbers.data(), bytes.size());
  std::vector<RankEpoch> ranks;
  for (const std::string& text : world_.gather(bytes)) {
    std::vector<double> received(text.size() / sizeof(double));
    std::memcpy(received.data(), text.data(), text.size());
    ranks.push_back(decode(received));
  }
  return ranks;
}

void Run::print_epoch(const EpochRecord& record) const {
  const bool text = record.tokens > 0;
  std::fprintf(stderr, "epoch %lld: train loss %.4f", static_cast<long long>(record.epoch + 1), record.train_loss);
  if (experiment_->config.measure.evaluate) {
    std::fprintf(stderr, ", validation loss %.4f, %s %.4g", record.val_loss, record.val_metric_name.c_str(),
                 record.val_metric);
  }
  std::fprintf(stderr, ", %.1f s%s (%.4g %s/s", record.epoch_s, record.extrapolated ? " extrapolated" : "",
               text ? record.tokens_per_s_median : record.samples_per_s_median, text ? "tokens" : "images");
  if (record.mfu) std::fprintf(stderr, ", %.1f %% of peak", 100.0 * *record.mfu);
  if (record.of_gemm) std::fprintf(stderr, ", %.1f %% of a large product", 100.0 * *record.of_gemm);
  std::fprintf(stderr, "), memory peak %s",
               format_bytes(static_cast<std::int64_t>(record.memory_peak_total_bytes.max)).c_str());
  if (record.pipeline) {
    std::fprintf(stderr, ", pipeline idle %.1f %% (%.1f %% with these passes", 100.0 * record.pipeline->idle_fraction,
                 100.0 * record.pipeline->simulated_idle_fraction);
    const std::optional<double> ideal = record.pipeline->closed_form_idle_fraction;
    std::fprintf(stderr, ideal ? ", %.1f %% with equal ones)" : ")", 100.0 * ideal.value_or(0.0));
  }
  if (record.skipped_steps > 0) {
    std::fprintf(stderr, ", %lld of %lld steps skipped, loss scale %.4g", static_cast<long long>(record.skipped_steps),
                 static_cast<long long>(record.steps), record.loss_scale);
  }
  std::fputc('\n', stderr);
}

int Run::finish() {
  collect_end_states(world_, device_state_, ranks_);
  if (!first_rank_) return stopped_ ? static_cast<int>(ExitCode::interrupted) : 0;
  writer_->ranks(ranks_);
  const std::string engine = experiment_->config.engine->name;
  const int ranks = world_.info().size;
  if (stopped_) {
    writer_->finish(RunStatus::interrupted, "stopped on request");
    std::fprintf(stderr, "stopped on request; continue with --resume --out %s\n", directory_.c_str());
    std::printf("RESULT INVALID reason=interrupted engine=%s ranks=%d out=%s\n", engine.c_str(), ranks,
                directory_.c_str());
  } else if (measure_.without_communication) {
    writer_->finish(RunStatus::benchmark, "measure.without_communication: nothing was exchanged; only times count");
    std::printf("RESULT INVALID reason=without_communication engine=%s ranks=%d step_ms=%.4g out=%s\n", engine.c_str(),
                ranks, last_.step_ms.median, directory_.c_str());
  } else {
    writer_->finish(RunStatus::success, "");
    std::printf(
        "RESULT VALID engine=%s ranks=%d epochs=%lld epoch_s=%.4g step_ms=%.4g train_loss=%.6f val_loss=%.6f %s=%.6g "
        "out=%s\n",
        engine.c_str(), ranks, static_cast<long long>(experiment_->config.training.epochs), last_.epoch_s,
        last_.step_ms.median, last_.train_loss, last_.val_loss, last_.val_metric_name.c_str(), last_.val_metric,
        directory_.c_str());
  }
  std::fflush(stdout);
  return stopped_ ? static_cast<int>(ExitCode::interrupted) : 0;
}

}  // namespace

int run_command(World& world, const Args& args) { return Run(world, args).execute(); }

}  // namespace pdl
