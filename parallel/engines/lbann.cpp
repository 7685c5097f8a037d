// lbann: data parallelism weight by weight, with non-blocking all-reduces and updates that do not wait for each other.
//
//   start:  rank 0's parameter shapes are compared and its weights broadcast
//   for each step, on every rank:
//     for each micro-batch of this rank's part of the global batch:
//       forward; backward, adding to the gradients in place      (losses are divided by the count of the global batch)
//       during the last backward, when the gradient of a weight is final:
//         with max_inflight all-reduces in flight, wait for the oldest
//         begin the weight's own all-reduce (sum), non-blocking
//     for each weight, the last one first:
//       wait for its own all-reduce; update it         (late layers are updated while early ones are still being
//       summed)
//   with clipping or loss scaling, the norm and the look for overflow come between the two loops: they wait for all,
//   and
//     that overlap is lost
//   with fc=model the neurons of the fully-connected layers at the end of the model are divided over the ranks, which
//     exchange activations there instead of gradients: parallel/shard/neuron_parallel.h
//   with spatial.height=p groups of p ranks share samples, each with a slice of the rows of an image, as far as
//     convolutions go: parallel/shard/spatial_split.h
//   with procs_per_trainer below N, each trainer is such a group of its own, and every ltfb_batch_interval updates they
//     hold a tournament (LTFB): parallel/sync/tournament.h. An extension beyond the study, and no synchronous SGD:
//     verify says that it differs from serial, and it does
//
// Paper: Van Essen et al., "LBANN: Livermore Big Artificial Neural Network HPC Toolkit", MLHPC 2015; the non-blocking
// all-reduces: Dryden et al., "Aluminum: An Asynchronous, GPU-Aware Communication Library", MLHPC 2018.
// Upstream: src/optimizers/optimizer.cpp and src/execution_algorithms/sgd_training_algorithm.cpp of LLNL/lbann.
//
// Same as upstream
//   - one all-reduce for each weight tensor, in place, no buckets and no copies; a tied weight waits for its last use
//   - losses divided by the samples of the global batch, gradients summed: exact for ragged batches
//   - weights are updated in reverse order, each as soon as its own sum is there; weight decay is part of the update
//   - max_inflight: today's version completes one all-reduce before it begins the next, that of the study (0.101) did
//   not
//   - with loss scaling, all all-reduces are done before anything is updated; one overflow skips the step on every rank
//   - one rank alone communicates nothing
//   - fc=model: weights, their gradients and moments divided, gradients that need no all-reduce (data_layout
//     "model_parallel")
//   - spatial: rows of both neighbours exchanged while a slice is convolved, a shuffle to whole samples behind
//   (distconv)
// Differs from upstream
//   - the all-reduce of a weight begins before its layer computes the data gradient, not after it
//   - a rank has a contiguous part of the global batch, where upstream deals samples out cyclically
//   - gradients may be accumulated over micro-batches and are then reduced once; upstream has no accumulation
//   - small weights are updated together with their larger neighbours (update_group_elements; 0 is upstream's way):
//     the same numbers from fewer kernels
//   - fc=model divides matrices in one dimension, by neurons; upstream in two. Where ranks have unequal parts of a
//   step,
//     samples that count nothing fill up
//   - spatial divides heights only, with one number for the whole model; upstream also widths, depths and channels,
//     layer by layer
//   - LTFB: trainers start from the same weights and share one shuffle of all samples, of which each has its part of
//     every step; moments stay where they are; models are scored on the validation split, and what validation shows is
//     the mean over the trainers' models, each on its part
//
// Knobs (default; upstream has no names for them, data_layout aside)
//   max_inflight=1  update_group_elements=65536  fc=data (upstream: data_layout of these layers)
//   spatial.height=1 (upstream: height_splits in the parallel_strategy of each layer)  spatial.overlap=true
//   procs_per_trainer=0 (all)  ltfb_batch_interval=100  ltfb_tournament_batches=1

#include <algorithm>
#include <optional>

#include "parallel/comm/world.h"
#include "parallel/shard/neuron_parallel.h"
#include "parallel/shard/spatial_split.h"
#include "parallel/sync/bucketed_all_reduce.h"
#include "parallel/sync/replica.h"
#include "parallel/sync/replicated_update.h"
#include "parallel/sync/shard_tables.h"
#include "parallel/sync/startup.h"
#include "parallel/sync/tensor_all_reduce.h"
#include "parallel/sync/tensor_tables.h"
#include "parallel/sync/tournament.h"
#include "parallel/synchronous_engine.h"

namespace pdl {
namespace {

struct LbannKnobs {
  int max_inflight = 1;
  std::int64_t update_group_elements = 65536;
  std::string fc = "data";
  SpatialOptions spatial;
  int procs_per_trainer = 0;
  std::int64_t ltfb_batch_interval = 100, ltfb_tournament_batches = 1;
};

LbannKnobs read_knobs(const ConfigReader& reader) {
  LbannKnobs knobs;
  knobs.max_inflight =
      reader.get("max_inflight", knobs.max_inflight,
                 "all-reduces in flight at once; 0: no limit, as LBANN in 2021; 1: as LBANN today", {0, 1 << 20});
  knobs.update_group_elements =
      reader.get<std::int64_t>("update_group_elements", knobs.update_group_elements,
                               "weights next to each other are updated together until they have so many elements: "
                               "fewer kernels; 0: each by itself, as upstream",
                               {0, 1e12});
  knobs.fc = reader.choice("fc", knobs.fc, {"data", "model"},
                           "fully-connected layers at the end of the model: data parallel like the rest, or with their "
                           "neurons divided over the ranks");
  knobs.spatial = read_spatial_options(reader);
  knobs.procs_per_trainer = reader.get(
      "procs_per_trainer", knobs.procs_per_trainer,
      "ranks that train one model; fewer than there are: several models meet in tournaments; 0: all", {0, 1 << 30});
  knobs.ltfb_batch_interval =
      reader.get<std::int64_t>("ltfb_batch_interval", knobs.ltfb_batch_interval,
                               "updates between two tournaments of several trainers", {1, 1e12});
  knobs.ltfb_tournament_batches =
      reader.get<std::int64_t>("ltfb_tournament_batches", knobs.ltfb_tournament_batches,
                               "global batches of the validation split that a tournament scores models on", {1, 1e12});
  return knobs;
}

class Lbann final : public StepMethod {
 public:
  /// `divided` is null unless fc is "model".
  Lbann(const EngineContext& context, const LbannKnobs& knobs, std::unique_ptr<NeuronParallelFactory> divided)
      : context_(context),
        knobs_(knobs),
        divided_(std::move(divided)),
        split_(context, knobs.spatial, divided_ ? *divided_ : dense_),
        replica_(split_.context(), place(), split_.factory()),
        sums_(replica_.store(), knobs.max_inflight),
        update_(context) {
    if (trainer_size() < context.world.size()) {
      tournament_.emplace(context, replica_,
                          TournamentOptions{.ranks_per_trainer = trainer_size(),
                                            .interval = knobs.ltfb_batch_interval,
                                            .batches = knobs.ltfb_tournament_batches});
    }
    // What waits for all gradients anyway, or for none, is one group.
    const bool in_parts = !alone() && !update_.needs_all_gradients();
    groups_ = update_groups(replica_.store(), in_parts ? knobs.update_group_elements : replica_.store().elements() + 1);
  }

  StepOutcome train_step(const StepOrder& order, Observer& observer) override {
    if (!tournament_) return update_weights(order, observer);
    StepOrder own = order;
    own.global_samples = tournament_->samples_of(order.global_samples);
    const StepOutcome outcome = own.global_samples > 0 ? update_weights(own, observer) : sit_out(observer);
    tournament_->after_update(order.update);
    return outcome;
  }

  void prepare() override {
    if (tournament_) trainer_group_ = context_.world.split(tournament_->trainer(), context_.world.rank(), "trainer");
    Communicator& group = tournament_ ? *trainer_group_ : context_.world;
    split_.prepare();
    replica_.prepare();
    update_.prepare(replica_);
    sums_.prepare(context_.device, group);
    if (tournament_) tournament_->prepare(group);
    check_equal_shapes(replica_.store(), context_.world, context_.device);
    broadcast_weights(replica_.store(), context_.world, context_.device);
    replica_.store().round_master(context_.backend);
  }

  void restored() override { update_.restored(replica_); }

  EngineDescription describe() const override;
  Prediction predict() const override;

  HeldModel& model() override { return replica_; }
  std::vector<StateTensor> state() override { return update_.state(replica_); }

 private:
  StepOutcome update_weights(const StepOrder& order, Observer& observer) {
    sums_.begin();
    replica_.accumulate(order, alone() ? nullptr : &sums_, observer);
    if (!alone()) sums_.begin_rest();
    if (update_.needs_all_gradients()) {
      observer.phase(Phase::communication);
      sums_.wait_for_all();
    }
    observer.phase(Phase::optimizer);
    const GradientScaling scaling = update_.scaling(replica_, order);
    if (scaling.overflow) return {.grad_norm = scaling.norm, .skipped = true};
    for (const UpdateGroup& group : groups_) {
      for (int index = group.first + group.count; index-- > group.first;) sums_.wait(index);
      update_.step(replica_, order, scaling, group.first, group.count);
    }
    return {.grad_norm = scaling.norm};
  }

  /// A trainer without samples in a ragged last step has nothing to learn from it.
  StepOutcome sit_out(Observer& observer) {
    replica_.accumulate({}, nullptr, observer);
    return {};
  }

  /// Ranks that train one model.
  int trainer_size() const { return knobs_.procs_per_trainer == 0 ? context_.world.size() : knobs_.procs_per_trainer; }
  bool alone() const { return trainer_size() == 1; }
  DataParallelPlace place() const {
    return {.rank = split_.group(),
            .size = split_.groups(),
            .in_step = divided_ && !alone(),
            .shared_by = knobs_.spatial.height};
  }
  /// Of one pass with fc=model.
  CommCounts classifier_traffic() const {
    return divided_->traffic(replica_.micro_batch() / knobs_.spatial.height, context_.training.dtype);
  }
  std::int64_t gradient_size() const { return size_of(wide_dtype(context_.training.dtype)); }
  CommCounts comm_per_step() const;
  PlanTable memory_table(const MemoryByKind& own) const;
  void warn(std::vector<std::string>& warnings) const;
  void compare_traffic(std::vector<std::string>& warnings) const;

  const EngineContext& context_;
  LbannKnobs knobs_;
  LayerFactory dense_;
  std::unique_ptr<NeuronParallelFactory> divided_;
  SpatialSplit split_;
  Replica replica_;
  TensorAllReduce sums_;
  ReplicatedUpdate update_;
  std::optional<Tournament> tournament_;         ///< between several trainers
  std::unique_ptr<Communicator> trainer_group_;  ///< likewise
  std::vector<UpdateGroup> groups_;              ///< in the order in which they are updated
};

EngineDescription Lbann::describe() const {
  EngineDescription description;
  description.name = "lbann";
  description.replicated_state = replica_.slices().count() == 0 && !tournament_;
  description.dp = trainer_size() / knobs_.spatial.height;
  description.tp = knobs_.spatial.height;
  description.micro_batches = replica_.micro_batches_per_step();
  description.knobs = {{"max_inflight", str(knobs_.max_inflight)},
                       {"update_group_elements", str(knobs_.update_group_elements)},
                       {"fc", knobs_.fc},
                       {"spatial.height", str(knobs_.spatial.height)},
                       {"spatial.overlap", knobs_.spatial.overlap ? "true" : "false"},
                       {"procs_per_trainer", str(trainer_size())}};
  description.differences = {"an all-reduce begins ahead of its layer's data gradient",
                             "ranks have contiguous parts of the global batch"};
  if (knobs_.update_group_elements > 0) description.differences.push_back("small weights are updated in groups");
  if (divided_) description.differences.push_back("fully-connected layers are divided in one dimension, not in two");
  if (!tournament_) return description;
  description.knobs["ltfb_batch_interval"] = str(knobs_.ltfb_batch_interval);
  description.knobs["ltfb_tournament_batches"] = str(knobs_.ltfb_tournament_batches);
  description.differences.push_back(
      str("LTFB, ", tournament_->trainers(),
          " trainers: models that compete, not synchronous SGD; validation is their mean"));
  return description;
}

/// What a step costs in memory and bytes: all of it is known before the first.
Prediction Lbann::predict() const {
  Prediction prediction;
  prediction.memory = replica_.predicted_memory();
  prediction.memory[MemoryKind::optimizer] += update_.predicted_bytes(replica_);
  prediction.memory[MemoryKind::communication] += split_.predicted_bytes();
  if (!alone()) prediction.comm_per_step = comm_per_step();
  prediction.tables = {all_reduce_table(replica_.store(), sums_.order(), groups_, gradient_size()),
                       memory_table(prediction.memory)};
  if (knobs_.spatial.height > 1) prediction.tables.push_back(split_.table());
  if (!alone()) warn(prediction.warnings);
  if (!tournament_) return prediction;
  if (context_.training.deterministic) {
    prediction.memory[MemoryKind::communication] += deterministic_scratch_bytes(trainer_size());
  }
  prediction.warnings.push_back(str("LTFB: ", tournament_->trainers(), " models of ", trainer_size(),
                                    " ranks train apart; every ", knobs_.ltfb_batch_interval,
                                    " updates each rank sends ", mebibytes(tournament_->bytes_per_meeting()),
                                    " MiB, which the bytes of a step leave out"));
  return prediction;
}

/// Of a full step of several ranks.
CommCounts Lbann::comm_per_step() const {
  const int ranks = trainer_size();
  const char* const axis = tournament_ ? "trainer." : "world.";
  CommCounts counts;
  const auto add = [&](const char* operation, std::int64_t bytes) {
    CommCount& count = counts[str(axis, operation)];
    count.calls += 1;
    count.bytes += ring_bytes(operation, ranks, bytes);
  };
  for (int index : sums_.order()) {
    add("all_reduce", replica_.store().params()[static_cast<std::size_t>(index)].count * gradient_size());
  }
  const auto add_passes = [&](const CommCounts& pass) {
    for (const auto& [operation, count] : pass) {
      counts[operation].calls += count.calls * replica_.micro_batches_per_step();
      counts[operation].bytes += count.bytes * replica_.micro_batches_per_step();
    }
  };
  add_passes(split_.traffic(replica_.micro_batch()));
  if (!divided_) return counts;
  add_passes(classifier_traffic());
  if (update_.needs_all_gradients()) add("all_gather", replica_.slices().predicted_bytes());
  if (context_.training.optimizer.name != "lamb") return counts;
  for (const UpdateGroup& group : groups_) {  // the trust ratio is that of the whole weight
    for (const UpdateSegment& run : replica_.slices().runs(group.first, group.count)) {
      add("all_reduce", 2 * run.count * size_of(DType::fp64));
    }
  }
  return counts;
}

/// Beside DDP with bucket copies, as by default, and with gradients as views into the buckets.
PlanTable Lbann::memory_table(const MemoryByKind& own) const {
  const Replica dense(context_, {context_.world.rank(), context_.world.size()}, dense_);
  MemoryByKind copies = dense.predicted_memory();
  copies[MemoryKind::optimizer] += update_.predicted_bytes(dense);
  MemoryByKind views = copies;
  const auto buckets = [&](bool in_place) {
    return BucketedAllReduce(dense.store(), context_.world, {.in_place = in_place}, gradient_size()).predicted_bytes();
  };
  copies[MemoryKind::communication] = buckets(context_.world.size() == 1);
  views[MemoryKind::communication] = buckets(true);
  return memory_comparison({{"lbann", own}, {"ddp", copies}, {"ddp, gradient_as_bucket_view", views}});
}

void Lbann::warn(std::vector<std::string>& warnings) const {
  if (update_.needs_all_gradients()) {
    warnings.push_back(
        "clipping and loss scaling look at all gradients: no weight is updated before the last all-reduce is done");
  }
  if (knobs_.max_inflight == 1) {
    warnings.push_back(
        "max_inflight=1: the backward pass stops wherever a gradient is final before the all-reduce of the one before "
        "it is done; max_inflight=0 lets it go on");
  }
  if (divided_) compare_traffic(warnings);
  for (std::string& warning : all_reduce_warnings(replica_.store(), sums_.order(), gradient_size())) {
    warnings.push_back(std::move(warning));
  }
}

/// What fc=model saves, or does not.
void Lbann::compare_traffic(std::vector<std::string>& warnings) const {
  const int ranks = context_.world.size();
  std::int64_t activations = 0, gradients = 0;
  for (const auto& [operation, count] : classifier_traffic()) {
    activations += count.bytes * replica_.micro_batches_per_step();
  }
  for (const Param& param : replica_.store().params()) {
    if (param.spec.slice.axis < 0) continue;
    gradients += ring_bytes("all_reduce", ranks, param.spec.global_shape.elements() * gradient_size());
  }
  if (activations > gradients) {
    warnings.push_back(str("fc=model sends ", mebibytes(activations),
                           " MiB of activations in a step, fc=data would send ", mebibytes(gradients),
                           " MiB of gradients: it pays for smaller batches"));
  }
}

/// Notes what several trainers cannot have.
bool check_trainers(const EngineContext& context, const LbannKnobs& knobs, const ConfigReader& reader) {
  const int ranks = context.world.size(), each = knobs.procs_per_trainer;
  const bool several = each > 0 && each < ranks;
  for (const char* key : {"ltfb_batch_interval", "ltfb_tournament_batches"}) {
    if (reader.has(key) && !several)
      reader.problem(key, str("acts between several trainers: set procs_per_trainer below ", ranks));
  }
  if (each > ranks || (each > 0 && ranks % each != 0)) {
    int nearest = std::min(each, ranks);
    while (ranks % nearest != 0) --nearest;
    reader.problem("procs_per_trainer", str(each, " does not divide ", ranks, " ranks; nearest: ", nearest));
    return false;
  }
  if (several && knobs.fc == "model") {
    reader.problem("fc", "model: not with several trainers; take data, or procs_per_trainer=0");
    return false;
  }
  if (several && knobs.spatial.height > 1) {
    reader.section("spatial", "").problem("height", "not with several trainers; take 1, or procs_per_trainer=0");
    return false;
  }
  if (several && LossScaler(context.training.loss_scale, context.training.dtype).active()) {
    reader.problem("procs_per_trainer", "several trainers would overflow at different steps: not with loss scaling");
    return false;
  }
  return true;
}

std::unique_ptr<Engine> make_lbann(const EngineContext& context, const ConfigReader& reader) {
  const LbannKnobs knobs = read_knobs(reader);
  if (!check_trainers(context, knobs, reader) || !check_spatial_options(reader, knobs.spatial, context)) return nullptr;
  std::unique_ptr<NeuronParallelFactory> divided;
  if (knobs.fc == "model") {
    const std::int64_t micro_batch = context.training.micro_batch, height = knobs.spatial.height;
    if (micro_batch % height != 0) {
      const std::int64_t below = micro_batch / height * height;
      reader.problem("fc", str("model: the ", height, " ranks of a group need equally many samples, and ", height,
                               " does not divide training.micro_batch_size (", micro_batch,
                               "); nearest: ", below > 0 ? str(below, " or ") : "", below + height));
    }
    divided = std::make_unique<NeuronParallelFactory>(context.model, context.world, context.device);
    if (divided->layers().empty()) {
      reader.problem("fc", str("model: ", context.model.name, " does not end with fully-connected layers; take data"));
    }
    for (const FullyConnected& layer : divided->layers()) {
      if (layer.out >= context.world.size()) continue;
      reader.problem("fc", str("model: the ", layer.out, " outputs of ", layer.name, " cannot be divided over ",
                               context.world.size(), " ranks; take data, or at most ", layer.out, " ranks"));
      return nullptr;
    }
  }
  return make_synchronous_engine(context, std::make_unique<Lbann>(context, knobs, std::move(divided)));
}

}  // namespace

EngineDefinition lbann_definition() {
  return {.name = "lbann",
          .summary = "replicas on every rank, one non-blocking all-reduce and one update for each weight",
          .paper = "Van Essen et al., LBANN, MLHPC 2015; Dryden et al., Aluminum, MLHPC 2018",
          .reference = "serial",
          .make = make_lbann,
          .document = [](const ConfigReader& reader) { read_knobs(reader); },
          .data_parallel_size = [](int ranks,
                                   const ConfigReader& reader) { return ranks / read_spatial_options(reader).height; },
          .variants = {{.name = "2021", .knobs = {"max_inflight=0", "update_group_elements=0"}},
                       {.name = "three in flight", .knobs = {"max_inflight=3", "update_group_elements=1500"}},
                       {.name = "model-parallel classifier", .knobs = {"fc=model"}, .models = "vgg"}}};
}

}  // namespace pdl
