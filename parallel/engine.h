#pragma once
// The contract of the six parallel engines. An engine owns how training is spread over ranks, and nothing else:
// kernels, data order, random numbers, optimizer and clocks are given to it.
//
// The contract is an epoch, not a step, because PipeDream never drains its pipeline between steps. Engines that do
// finish each step before the next implement the smaller StepMethod (synchronous_engine.h).

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/base/config_reader.h"
#include "engine/data/batch_plan.h"
#include "engine/data/data_loader.h"
#include "engine/data/dataset.h"
#include "engine/nn/model.h"
#include "engine/optim/loss_scaler.h"
#include "engine/optim/lr_schedule.h"
#include "engine/optim/optimizer.h"
#include "engine/record/observer.h"
#include "engine/record/records.h"
#include "parallel/comm/counting_communicator.h"

namespace pdl {

/// The recipe, shared by all engines: the "training" block.
struct TrainingOptions {
  std::int64_t epochs = 1;
  std::int64_t global_batch = 0;  ///< samples per optimizer update over all ranks
  std::int64_t micro_batch =
      0;  ///< samples per forward pass on one data-parallel rank; 0: all of the rank's part at once
  std::uint64_t seed = 1234;
  DType dtype = DType::fp32;  ///< type that layers compute in
  bool tf32 = false;          ///< with fp32: matrix products on tensor cores
  bool deterministic = false;
  bool drop_last = false;
  OptimizerOptions optimizer;
  LrScheduleOptions lr_schedule;
  LossScaleOptions loss_scale;
};

/// Everything an engine is given. References outlive the engine. For a plan there is no data and the communicator only
/// knows its shape: constructors must neither allocate device memory nor communicate; `prepare` does.
struct EngineContext {
  Communicator& world;
  Device& device;
  Backend& backend;
  const ModelDescription& model;
  const TrainingOptions& training;
  const DatasetPair& data;  ///< both null in a plan
  std::int64_t train_samples = 0;
  std::int64_t validation_samples = 0;
  DataLoaderOptions loader;
  std::int64_t max_steps_per_epoch = 0;  ///< 0: all
  std::function<bool()> stop_requested;  ///< this rank was asked to stop
};

/// A table that `plan` prints: buckets, shards, schedules.
struct PlanTable {
  std::string title;
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;
};

/// What an engine foresees before it takes any memory. Memory and bytes are this rank's.
struct Prediction {
  MemoryByKind memory;       ///< peak of each kind in a training step
  CommCounts comm_per_step;  ///< calls and bytes of a full step after the first
  double bubble_fraction = 0.0;
  std::vector<PlanTable> tables;
  std::vector<std::string> warnings;  ///< settings that defeat themselves
};

/// What an engine says of itself, for the record.
struct EngineDescription {
  std::string name;
  int dp = 1, tp = 1, pp = 1;
  std::int64_t micro_batches = 1;            ///< per rank and step
  bool replicated_state = false;             ///< every rank's state() is rank 0's: one copy makes a checkpoint
  std::map<std::string, std::string> knobs;  ///< effective values
  std::vector<std::string> differences;      ///< from upstream, in force in this run
};

/// What came out of one pass over a plan, the same on every rank but for `staleness`.
struct PassResult {
  double loss_sum = 0.0;         ///< sum over predictions
  double correct = 0.0;          ///< predictions whose most likely class was right
  std::int64_t predictions = 0;  ///< exact count
  std::int64_t steps = 0;
  std::int64_t skipped_steps = 0;                 ///< of them without update: a gradient overflowed
  std::optional<StalenessRecord> staleness = {};  ///< of this rank's stage, where weights are older than gradients
  bool stopped = false;  ///< a rank was asked to stop; the pass ended early, at a step boundary
  double loss() const { return predictions == 0 ? 0.0 : loss_sum / static_cast<double>(predictions); }
};

/// Where training stands, besides its tensors; the same on every rank.
struct TrainingPosition {
  std::int64_t updates = 0;  ///< done, skipped steps not among them: what learning rate and bias correction count
  LossScaleState loss_scale;
};

/// A named tensor of this rank's state (weights, moments), in device memory; its order is fixed.
struct StateTensor {
  std::string name;
  Tensor tensor;
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual EngineDescription describe() const = 0;
  virtual Prediction predict() const = 0;

  /// Takes memory, sets the initial weights and agrees with the other ranks. Collective, once.
  virtual void prepare() = 0;
  /// Trains over the plan. Throws Error(numeric), alike on every rank, when the loss stops being finite or loss scaling
  /// is exhausted.
  virtual PassResult run_epoch(const EpochPlan& plan, Observer& observer) = 0;
  virtual PassResult evaluate(const EpochPlan& plan) = 0;

  /// Adds to what ranks measured over a trained plan what follows from the schedule: their stages, idle time in theory
  /// and by simulation. An engine without a pipeline is never asked.
  virtual void explain_pipeline(const EpochPlan&, PipelineRecord&) {}

  /// Calls `visit` on world rank 0 with every parameter of the dense model, whole, in host memory, in registration
  /// order. Collective.
  using ParameterVisitor = std::function<void(const ParamSpec& spec, int id, const Tensor& values)>;
  virtual void visit_parameters(const ParameterVisitor& visit) = 0;

  /// This rank's state, for checkpoints; restoring it and the position continues the same run bit for bit.
  virtual std::vector<StateTensor> state() = 0;
  virtual TrainingPosition position() const = 0;
  virtual void set_position(const TrainingPosition& position) = 0;  ///< once the state is restored; collective
};

/// Knob settings that make an engine work in another way: tests hold each of them against the reference, `list` shows
/// them.
struct EngineVariant {
  std::string name;                ///< unique within the engine: "stage 2"
  std::vector<std::string> knobs;  ///< "key=value", as after "engine." on the command line
  int rank_multiple = 1;           ///< needs a number of ranks that this divides
  std::string models = {};         ///< only for models whose name begins so; empty: for all
};

/// One entry of engines.def.
struct EngineDefinition {
  std::string name;
  std::string summary;  ///< one line
  std::string paper;    ///< what it implements
  /// The engine it must equal, on one rank: "serial" for all synchronous ones. It gets the settings in force of the
  /// knobs that it reads too (EngineDescription::knobs).
  std::string reference;
  /// Reads the engine's knobs from its block (plans them against `context`) and builds it. Problems are noted in the
  /// reader.
  std::unique_ptr<Engine> (*make)(const EngineContext& context, const ConfigReader& knobs);
  /// Reads the knobs only, for `list`.
  void (*document)(const ConfigReader& knobs);
  /// Samples that one update consumes per data-parallel rank count: the number of data-parallel ranks for `ranks` ranks
  /// and these knobs. Decides what `batch_size_per_rank` means and which global batches divide.
  int (*data_parallel_size)(int ranks, const ConfigReader& knobs);
  /// Whether all ranks read samples through BatchFeeder, as a data store (sync/data_store.h) asks of them.
  bool takes_data_store = true;
  /// Whether all ranks finish a step together. Only then do they skip one together, as a loss scale asks of them, and
  /// is a step's part on a rank cut by training.micro_batch_size whatever the knobs.
  bool synchronous = true;
  std::vector<EngineVariant> variants = {};  ///< besides the defaults, which are always tested
};

/// All engines, in the order of engines.def.
const std::vector<EngineDefinition>& engine_definitions();
/// Among them and the references that only serve comparisons; nullptr when there is none of that name.
const EngineDefinition* find_engine(const std::string& name);

}  // namespace pdl
