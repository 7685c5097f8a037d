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
//       wait for its own all-reduce; update it         (late layers while early ones are still being summed)
//   with clipping or loss scaling, the norm and the look for overflow come between the two loops: they wait for all,
//     and that overlap is lost
//   with fc=model the neurons of the fully-connected layers at the end of the model are divided over the ranks, which
//     exchange activations there instead of gradients: parallel/shard/neuron_parallel.h
//   with spatial.height=p groups of p ranks share samples, each with a slice of the rows of an image, as far as
//     convolutions go: parallel/shard/spatial_split.h
//   with sharded=true a rank holds 1/N of each weight and of its moments; weights are gathered ahead of their layer,
//     forward and backward, and let go of behind it; each rank updates its slice: parallel/sync/tensor_shards.h
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
//   - max_inflight: today's version completes one all-reduce before it begins the next, the study's (0.101) did not
//   - with loss scaling, all all-reduces are done before anything is updated; one overflow skips the step on every rank
//   - one rank alone communicates nothing
//   - fc=model: weights, their gradients and moments divided, gradients that need no all-reduce (data_layout
//     "model_parallel")
//   - sharded: weights are gathered before use, nothing ahead, and let go after forward and backward; gradients are
//     summed in full on every rank (ShardingStrategy FULL)
//   - spatial (distconv): rows of neighbours exchanged while a slice is convolved, a shuffle to whole samples behind
// Differs from upstream
//   - the all-reduce of a weight begins before its layer computes the data gradient, not after it
//   - a rank has a contiguous part of the global batch, where upstream deals samples out cyclically
//   - gradients may be accumulated over micro-batches and are then reduced once; upstream has no accumulation
//   - small weights are updated together with their larger neighbours (update_group_elements; 0 is upstream's way):
//     the same numbers from fewer kernels
//   - fc=model divides matrices in one dimension, by neurons; upstream in two. Samples that count nothing fill up where
//     ranks have unequal parts of a step
//   - spatial divides heights only, with one number for the whole model; upstream also widths, depths and channels,
//     layer by layer
//   - sharded=true divides every weight; upstream marks them one by one, and also knows GRID_ROWS and GRID_COLS
//   - LTFB: trainers start from the same weights and share one shuffle of all samples, of which each has its part of
//     every step; moments stay where they are; models are scored on the validation split, and what validation shows is
//     the mean over the trainers' models, each on its part
//
// Knobs (default; upstream has no names for most of them)
//   max_inflight=1  update_group_elements=65536  fc=data (upstream: data_layout of these layers)
//   spatial.height=1 (upstream: height_splits in the parallel_strategy of each layer)  spatial.overlap=true
//   sharded=false (upstream: sharded of each of the Weights)
//   procs_per_trainer=0 (all)  ltfb_batch_interval=100  ltfb_tournament_batches=1

#include <algorithm>
#include <optional>

#include "parallel/comm/world.h"
#include "parallel/shard/neuron_parallel.h"
#include "parallel/shard/spatial_split.h"
#include "parallel/sync/replica.h"
#include "parallel/sync/replicated_update.h"
#include "parallel/sync/shard_tables.h"
#include "parallel/sync/startup.h"
#include "parallel/sync/tensor_all_reduce.h"
#include "parallel/sync/tensor_shards.h"
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
  bool sharded = false;
  TournamentOptions tournament;
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
  knobs.sharded = reader.get("sharded", knobs.sharded,
                             "each rank holds a slice of every weight; weights are gathered before a layer runs");
  knobs.tournament = read_tournament_options(reader);
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
        replica_(split_.context(), place(), split_.factory(), sharded() ? TensorShards::store_parts() : StoreParts{}),
        sums_(replica_.store(), knobs.max_inflight),
        update_(context) {
    if (sharded()) shards_.emplace(split_.context(), replica_);
    if (trainer_size() < context.world.size()) tournament_.emplace(context, replica_, knobs.tournament);
    // What waits for all gradients anyway, or for none, is one group; slices are updated one by one.
    const bool in_parts = !alone() && !update_.needs_all_gradients();
    const std::int64_t group_elements = sharded() ? 0 : knobs.update_group_elements;
    groups_ = update_groups(replica_.store(), in_parts ? group_elements : replica_.store().elements() + 1);
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
    check_equal_plans(plan_in_words(), context_.world, context_.device);
    split_.prepare();
    replica_.prepare();
    sums_.prepare(context_.device, group);
    if (tournament_) tournament_->prepare(group);
    check_equal_shapes(replica_.store(), context_.world, context_.device);
    if (shards_) return shards_->prepare();
    update_.prepare(replica_);
    broadcast_weights(replica_.store(), context_.world, context_.device);
    replica_.store().round_master(context_.backend);
  }

  void restored() override { shards_ ? shards_->restored() : update_.restored(replica_); }

  EngineDescription describe() const override;
  Prediction predict() const override;
  MemoryByKind predicted_memory() const;

  HeldModel& model() override { return shards_ ? shards_->model() : replica_; }
  std::vector<StateTensor> state() override { return shards_ ? shards_->state() : update_.state(replica_); }

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
      for (int index = group.first + group.count; index-- > group.first;) {
        sums_.wait(index);
        if (shards_) shards_->step(order, scaling, index);
      }
      if (!shards_) update_.step(replica_, order, scaling, group.first, group.count);
    }
    return {.grad_norm = scaling.norm};
  }

  /// A trainer without samples in a ragged last step has nothing to learn from it.
  StepOutcome sit_out(Observer& observer) {
    replica_.accumulate({}, nullptr, observer);
    return {};
  }

  /// Ranks that train one model.
  int trainer_size() const { return knobs_.tournament.ranks_of(context_.world.size()); }
  bool alone() const { return trainer_size() == 1; }
  bool sharded() const { return knobs_.sharded && !alone(); }
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
  MemoryByKind otherwise() const;
  std::string plan_in_words() const;
  std::vector<std::string> warnings() const;
  void warn_of_gathers(std::vector<std::string>& warnings) const;
  void compare_traffic(std::vector<std::string>& warnings) const;

  const EngineContext& context_;
  LbannKnobs knobs_;
  LayerFactory dense_;
  std::unique_ptr<NeuronParallelFactory> divided_;
  SpatialSplit split_;
  Replica replica_;
  TensorAllReduce sums_;
  ReplicatedUpdate update_;
  std::optional<TensorShards> shards_;           ///< of sharded weights
  std::optional<Tournament> tournament_;         ///< between several trainers
  std::unique_ptr<Communicator> trainer_group_;  ///< likewise
  std::vector<UpdateGroup> groups_;              ///< in the order in which they are updated
};

EngineDescription Lbann::describe() const {
  EngineDescription description;
  description.name = "lbann";
  description.replicated_state = replica_.slices().count() == 0 && !shards_ && !tournament_;
  description.dp = trainer_size() / knobs_.spatial.height;
  description.tp = knobs_.spatial.height;
  description.micro_batches = replica_.micro_batches_per_step();
  description.knobs = {{"max_inflight", str(knobs_.max_inflight)},
                       {"update_group_elements", str(knobs_.update_group_elements)},
                       {"fc", knobs_.fc},
                       {"spatial.height", str(knobs_.spatial.height)},
                       {"spatial.overlap", knobs_.spatial.overlap ? "true" : "false"},
                       {"sharded", knobs_.sharded ? "true" : "false"},
                       {"procs_per_trainer", str(trainer_size())}};
  description.differences = {"an all-reduce begins ahead of its layer's data gradient",
                             "ranks have contiguous parts of the global batch"};
  if (shards_) {
    description.differences.push_back("all weights are sharded, in slices padded to 8 elements; upstream marks them");
  } else if (knobs_.update_group_elements > 0) {
    description.differences.push_back("small weights are updated in groups");
  }
  if (divided_) description.differences.push_back("fully-connected layers are divided in one dimension, not in two");
  if (!tournament_) return description;
  description.knobs["ltfb_batch_interval"] = str(knobs_.tournament.interval);
  description.knobs["ltfb_tournament_batches"] = str(knobs_.tournament.batches);
  description.differences.push_back(
      str("LTFB, ", tournament_->trainers(),
          " trainers: models that compete, not synchronous SGD; validation is their mean"));
  return description;
}

MemoryByKind Lbann::predicted_memory() const {
  MemoryByKind memory = replica_.predicted_memory();
  memory[MemoryKind::communication] += split_.predicted_bytes();
  if (tournament_ && context_.training.deterministic) {
    memory[MemoryKind::communication] += deterministic_scratch_bytes(trainer_size());
  }
  if (!shards_) memory[MemoryKind::optimizer] += update_.predicted_bytes(replica_);
  if (shards_) memory += shards_->predicted_memory();
  return memory;
}

std::string Lbann::plan_in_words() const {
  return str(shards_ ? str("sharded weights, ", shards_->map().describe()) : "whole weights", ", ", trainer_size(),
             " ranks per trainer, fc=", knobs_.fc, ", spatial.height=", knobs_.spatial.height,
             ", max_inflight=", knobs_.max_inflight, ", micro-batches of ", replica_.micro_batch());
}

/// What a step costs in memory and bytes: all of it is known before the first.
Prediction Lbann::predict() const {
  Prediction prediction;
  prediction.memory = predicted_memory();
  if (!alone()) prediction.comm_per_step = comm_per_step();
  prediction.tables = {all_reduce_table(replica_.store(), sums_.order(), groups_, gradient_size()),
                       memory_table(prediction.memory)};
  if (shards_) {
    for (PlanTable& table : shards_->tables()) prediction.tables.push_back(std::move(table));
  }
  if (knobs_.spatial.height > 1) prediction.tables.push_back(split_.table());
  if (!alone()) prediction.warnings = warnings();
  if (!tournament_) return prediction;
  prediction.warnings.push_back(str("LTFB: ", tournament_->trainers(), " models of ", trainer_size(),
                                    " ranks train apart; every ", knobs_.tournament.interval,
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
  const std::int64_t passes = replica_.micro_batches_per_step();
  const auto add_all = [&counts](const CommCounts& more, std::int64_t times) {
    for (const auto& [operation, count] : more) {
      counts[operation].calls += count.calls * times;
      counts[operation].bytes += count.bytes * times;
    }
  };
  add_all(split_.traffic(replica_.micro_batch()), passes);
  if (shards_) add_all(shards_->predicted_comm(passes), 1);
  if (!divided_) return counts;
  add_all(classifier_traffic(), passes);
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
  std::vector<std::pair<std::string, MemoryByKind>> ways = {{shards_ ? "lbann, sharded" : "lbann", own}};
  if (!alone() && !divided_ && !tournament_) ways.emplace_back(shards_ ? "lbann" : "lbann, sharded", otherwise());
  ways.emplace_back("ddp", replicated_memory(context_, false));
  ways.emplace_back("ddp, gradient_as_bucket_view", replicated_memory(context_, true));
  return memory_comparison(ways);
}

/// The memory of sharded weights where these are whole, and the other way round.
MemoryByKind Lbann::otherwise() const {
  LbannKnobs knobs = knobs_;
  knobs.sharded = !knobs.sharded;
  return Lbann(context_, knobs, nullptr).predicted_memory();
}

/// Settings that defeat themselves, on several ranks.
std::vector<std::string> Lbann::warnings() const {
  std::vector<std::string> warnings =
      all_reduce_warnings(replica_.store(), sums_, update_.needs_all_gradients(), gradient_size());
  if (shards_) warn_of_gathers(warnings);
  if (divided_) compare_traffic(warnings);
  return warnings;
}

/// What sharded=true costs, and whether it saves anything.
void Lbann::warn_of_gathers(std::vector<std::string>& warnings) const {
  const std::int64_t rounds = replica_.micro_batches_per_step();
  if (rounds > 1) {
    warnings.push_back(
        str("sharded=true gathers all weights forward and backward in each of ", rounds,
            " micro-batches: ", mebibytes(shards_->predicted_comm(rounds)["parameters.all_gather"].bytes),
            " MiB in a step; larger micro-batches send less"));
  }
  const std::int64_t own = predicted_memory().total(), whole = otherwise().total();
  if (own >= whole) {
    warnings.push_back(str("sharded=true needs no less memory here than whole weights: ", format_bytes(own),
                           " against ", format_bytes(whole)));
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

/// Notes which options exclude each other.
bool check_combination(const LbannKnobs& knobs, bool several_trainers, const ConfigReader& reader) {
  const bool by_neurons = knobs.fc == "model";
  if (several_trainers && by_neurons) {
    reader.problem("fc", "model: not with several trainers; take data, or procs_per_trainer=0");
  } else if (several_trainers && knobs.spatial.height > 1) {
    reader.section("spatial", "").problem("height", "not with several trainers; take 1, or procs_per_trainer=0");
  } else if (knobs.sharded && (several_trainers || by_neurons)) {
    reader.problem("sharded", str("true: not with ", by_neurons ? "fc=model" : "several trainers", "; take false"));
  } else if (knobs.sharded && reader.has("update_group_elements")) {
    reader.problem("update_group_elements", "acts on whole weights; slices are updated one by one (sharded=true)");
  } else {
    return true;
  }
  return false;
}

std::unique_ptr<Engine> make_lbann(const EngineContext& context, const ConfigReader& reader) {
  const LbannKnobs knobs = read_knobs(reader);
  const bool several_trainers = knobs.tournament.ranks_of(context.world.size()) < context.world.size();
  if (!check_tournament_options(reader, knobs.tournament, context) ||
      !check_combination(knobs, several_trainers, reader) || !check_spatial_options(reader, knobs.spatial, context)) {
    return nullptr;
  }
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
    const std::string obstacle = divided->obstacle(context.model.name);
    if (!obstacle.empty()) {
      reader.problem("fc", str("model: ", obstacle));
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
                       {.name = "sharded", .knobs = {"sharded=true"}},
                       {.name = "model-parallel classifier", .knobs = {"fc=model"}, .models = "vgg"}}};
}

}  // namespace pdl
