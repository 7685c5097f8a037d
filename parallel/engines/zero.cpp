// zero: data parallelism whose optimizer states (stage 1), gradients (2) and parameters (3) are divided over the ranks.
//
//   every block of parameters is cut into N equal slices; rank r holds slice r of moments and master weights
//   for each step, on every rank:
//     for each micro-batch of this rank's part of the global batch:
//       forward, then backward; stage 3: gather a layer's blocks before it runs and the next one's ahead, let go of
//       them after it as gradients become final, bucket by bucket: reduce each rank's slice to that rank
//                     (stage 1: during the last micro-batch, of the sums; stages 2 and 3: in each, added to
//                     accumulators of the rank's slices, so that nobody holds all gradients)
//     norm over all ranks, clip; no update where a scaled gradient of any rank overflowed
//     update this rank's slices, block by block; stages 1 and 2: gather each block again, while the next step begins
//
// Paper: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
// Upstream: deepspeed/runtime/zero/{stage_1_and_2,stage3,partitioned_param_coordinator}.py.
//
// Presets: what the paper describes, and what two versions of DeepSpeed do. Each knob can be set by itself as well.
//                        textbook                    deepspeed (2026)             deepspeed-2021 (0.5.6)
//   gradients, 1 and 2   reduce-scatter of blocks    all-reduce, then copy out    reduce of each slice to its owner
//   under backward       yes                         no (stage 3: yes)            no (stage 3: yes)
//   bucket               25 MiB of fp32              5e8 elements, as buffers     the same
//   gather of weights    under the next forward      waited for                   waited for
//   stage 3              keeps nothing               keeps small parameters whole and what recurs within 1e9 elements
// hf-auto is deepspeed with the values that Hugging Face's "auto" takes from a transformer's hidden size h: buckets of
// h^2 elements, 0.9 h^2 gathered ahead, parameters of up to 10 h whole.
//
// Differs from upstream
//   - losses are divided by the predictions of the global batch and gradients are summed: exact for a ragged last
//     batch, and nothing of prescale_gradients and gradient_predivide_factor is left
//   - gradients, their buckets and reductions are fp32 also beside bf16 weights (communication_data_type)
//   - works with every optimizer, LAMB included: its norms of parameters are summed over slices. Upstream has only Adam
//   - the order of layers is known, not recorded in the first step; transformer blocks are gathered as a whole;
//     parameters that the same layers use are gathered and reduced as one block, without a copy that sorts them by rank
//   - stages 2 and 3 write gradients straight into buckets; a rank without samples takes part with zeros
//   - one flat layout for all parameters: weight decay is a property of a segment, not a group
//   - one rank alone has nothing to divide: no copies, no collectives
//   - missing: offload, allgather_bucket_size (one gather for each flat buffer), round_robin_gradients, sub_group_size,
//     contiguous_gradients=false, stage3_model_persistence_threshold
//
// Knobs (upstream name = default of the textbook preset / of the others)
//   stage=1  reduce_bucket_size=6553600 / 5e8  overlap_comm=true / false, stage 3 true
//   stage3_prefetch_bucket_size=1 / 5e7  stage3_param_persistence_threshold=0 / 1e5
//   stage3_max_live_parameters=1e9  stage3_max_reuse_distance=0 / 1e9
//   own: preset=textbook  reduction (upstream: reduce_scatter, use_multi_rank_bucket_allreduce)
//   reductions_in_flight=2 / 1, stage 3 2  overlap_all_gather=true / false
// Clipping is training.optimizer.clip_grad_norm, off unless asked for (upstream's gradient_clipping is 1.0 since 2026).

#include <algorithm>
#include <memory>

#include "parallel/comm/world.h"
#include "parallel/sync/shard_tables.h"
#include "parallel/sync/sharded_model.h"
#include "parallel/sync/startup.h"

namespace pdl {
namespace {

constexpr std::int64_t kOfHiddenSize = -1;  ///< a knob of hf-auto that is yet to be taken from the model

struct ZeroKnobs {
  std::string preset = "textbook";
  int stage = 1;
  std::string reduction = "reduce_scatter";
  std::int64_t reduce_bucket_size = 6553600;
  bool overlap_comm = true;
  bool overlap_all_gather = true;
  int reductions_in_flight = 2;
  std::int64_t prefetch_bucket_size = 1;
  std::int64_t param_persistence_threshold = 0;
  std::int64_t max_live_parameters = 1000000000;
  std::int64_t max_reuse_distance = 0;
};

/// What a preset says of a stage.
ZeroKnobs preset_knobs(const std::string& preset, int stage) {
  ZeroKnobs knobs;
  knobs.preset = preset;
  knobs.stage = stage;
  if (preset == "textbook") return knobs;
  if (stage < 3) knobs.reduction = preset == "deepspeed-2021" ? "reduce" : "all_reduce";
  knobs.reduce_bucket_size = 500000000;
  knobs.overlap_comm = stage == 3;
  knobs.overlap_all_gather = false;
  knobs.reductions_in_flight = stage == 3 ? 2 : 1;
  knobs.prefetch_bucket_size = 50000000;
  knobs.param_persistence_threshold = 100000;
  knobs.max_reuse_distance = 1000000000;
  if (preset == "hf-auto") {
    knobs.reduce_bucket_size = kOfHiddenSize;
    if (stage == 3) knobs.prefetch_bucket_size = knobs.param_persistence_threshold = kOfHiddenSize;
  }
  return knobs;
}

/// With a number wherever hf-auto leaves it to the model.
ZeroKnobs for_model(ZeroKnobs knobs, const ModelDescription& model) {
  const std::int64_t h = model.hidden_size.value_or(0);
  const auto settle = [](std::int64_t& knob, std::int64_t value) { knob = knob == kOfHiddenSize ? value : knob; };
  settle(knobs.reduce_bucket_size, h * h);
  settle(knobs.prefetch_bucket_size, 9 * h * h / 10);
  settle(knobs.param_persistence_threshold, 10 * h);
  return knobs;
}

ZeroKnobs read_knobs(const ConfigReader& reader) {
  constexpr double kMost = 1e15;
  const std::string preset = reader.choice("preset", "textbook", {"textbook", "deepspeed", "deepspeed-2021", "hf-auto"},
                                           "what knobs default to");
  const int stage =
      reader.get("stage", 1, "what is divided: 1 optimizer states, 2 gradients too, 3 parameters too", {1, 3});
  ZeroKnobs knobs = preset_knobs(preset, stage);
  knobs.reduction = reader.choice(
      "reduction", knobs.reduction, {"reduce_scatter", "all_reduce", "reduce"},
      "how a bucket's gradients reach their owners; all_reduce sends twice as much, reduce takes a call for "
      "each owner");
  const auto count = [&](const char* key, std::int64_t fallback, const char* doc, double least) {
    if (fallback != kOfHiddenSize) return reader.get(key, fallback, doc, {least, kMost});
    return reader.get_optional<std::int64_t>(key, doc, {least, kMost}).value_or(kOfHiddenSize);
  };
  knobs.reduce_bucket_size = count("reduce_bucket_size", knobs.reduce_bucket_size, "elements of a gradient bucket", 1);
  knobs.overlap_comm = reader.get("overlap_comm", knobs.overlap_comm, "reduce gradients under the backward pass");
  knobs.overlap_all_gather = reader.get("overlap_all_gather", knobs.overlap_all_gather,
                                        "stages 1 and 2: gather updated weights under the next forward pass");
  knobs.reductions_in_flight =
      reader.get("reductions_in_flight", knobs.reductions_in_flight,
                 "buckets that are reduced while another one fills; each costs a buffer", {1, 1024});
  const auto of_stage_3 = [&](const char* key, std::int64_t fallback, const char* doc, double least) {
    if (reader.has(key) && stage != 3) reader.problem(key, str("acts in stage 3 only, this is stage ", stage));
    return count(key, fallback, doc, least);
  };
  knobs.prefetch_bucket_size = of_stage_3("stage3_prefetch_bucket_size", knobs.prefetch_bucket_size,
                                          "elements gathered ahead; 1: the next block, 0: none", 0);
  knobs.param_persistence_threshold =
      of_stage_3("stage3_param_persistence_threshold", knobs.param_persistence_threshold,
                 "parameters of up to so many elements stay whole on every rank", 0);
  knobs.max_live_parameters = of_stage_3("stage3_max_live_parameters", knobs.max_live_parameters,
                                         "gathered elements beyond which nothing is gathered ahead", 1);
  knobs.max_reuse_distance =
      of_stage_3("stage3_max_reuse_distance", knobs.max_reuse_distance,
                 "a parameter that is used again within so many elements is kept; 0: let go after every use", 0);
  return knobs;
}

class Zero final : public StepMethod {
 public:
  Zero(const EngineContext& context, const ZeroKnobs& knobs)
      : context_(context),
        knobs_(for_model(knobs, context.model)),
        replica_(context, {context.world.rank(), ranks()}, LayerFactory(),
                 {.values = whole_values(), .gradients = whole_gradients(), .master = false}),
        users_(parameter_users(replica_.layers(), replica_.store())),
        map_(lay_out()),
        weights_(replica_.store(), map_, context.world.rank(), context.training.dtype, values_held()),
        gradients_(replica_.store(), map_, users_, layers(), context.world, gradient_options(), context.training.dtype),
        gatherer_(replica_.store(), map_, users_, layers(), weights_, gradients_,
                  {knobs_.prefetch_bucket_size, knobs_.max_live_parameters, knobs_.max_reuse_distance, is_textbook()},
                  context.training.dtype),
        update_(context, replica_.store(), map_, weights_, gradients_),
        model_(context, replica_, map_, weights_, gradients_, update_) {}

  StepOutcome train_step(const StepOrder& order, Observer& observer) override {
    if (whole_gradients()) {
      gradients_.begin(true);
      replica_.accumulate(order, ranks() > 1 ? &gradients_ : nullptr, observer);
      gradients_.end_pass();
    } else {
      const std::int64_t rounds = replica_.begin_step(observer);
      for (std::int64_t round = 0; round < rounds; ++round) {
        gradients_.begin(round == 0);
        replica_.run_round(round, order, &gradients_, observer);
        gradients_.end_pass();
      }
    }
    observer.phase(Phase::communication);
    gradients_.collect_all();
    observer.phase(Phase::optimizer);
    const StepOutcome outcome = update_.apply(order, [this](int block) { gatherer_.regather(block); });
    observer.phase(Phase::communication);
    if (!knobs_.overlap_all_gather) gatherer_.wait_for_regathers();
    return outcome;
  }

  void finish_epoch() override { gatherer_.wait_for_regathers(); }

  void prepare() override {
    check_equal_plans(plan_in_words(), context_.world, context_.device);
    check_equal_shapes(replica_.store(), context_.world, context_.device);
    if (gathers_beside_reductions()) parameter_group_ = context_.world.split(0, context_.world.rank(), "parameters");
    if (!is_plain_replica()) replica_.use(gatherer_);
    replica_.prepare();
    weights_.prepare(context_.device);
    gradients_.prepare(context_.device, context_.backend);
    gatherer_.prepare(context_.device, parameter_group_ ? *parameter_group_ : context_.world);
    update_.prepare();
    weights_.initialise(context_.device, context_.backend, context_.training.seed);
    gather_whole_blocks();
  }

  void restored() override {
    weights_.round(context_.backend);
    gather_whole_blocks();
  }

  EngineDescription describe() const override;
  Prediction predict() const override;
  MemoryByKind predicted_memory() const;

  HeldModel& model() override { return model_; }
  std::vector<StateTensor> state() override { return update_.state(); }

 private:
  int ranks() const { return context_.world.size(); }
  int layers() const { return static_cast<int>(replica_.layers().size()); }
  // One rank has nothing to divide: it is a replica whatever the stage.
  bool whole_values() const { return knobs_.stage < 3 || ranks() == 1; }
  bool whole_gradients() const { return knobs_.stage == 1 || ranks() == 1; }
  bool gathers_beside_reductions() const { return !whole_values(); }
  /// Nothing has to be brought to layers: passes can then be replayed.
  bool is_plain_replica() const {
    return whole_values() && whole_gradients() && (ranks() == 1 || !knobs_.overlap_all_gather);
  }
  bool is_textbook() const { return knobs_.preset == "textbook"; }

  ShardMap lay_out();
  ShardedWeights::Values values_held() const;
  GradientShardOptions gradient_options() const;
  std::string plan_in_words() const;
  void gather_whole_blocks();
  void add_warnings(Prediction& prediction) const;

  const EngineContext& context_;
  ZeroKnobs knobs_;
  Replica replica_;
  std::vector<std::vector<int>> users_;  ///< of each parameter: the layers that use it
  ShardMap map_;
  ShardedWeights weights_;
  GradientShards gradients_;
  ParameterGatherer gatherer_;
  ShardedUpdate update_;
  ShardedModel model_;
  std::unique_ptr<Communicator> parameter_group_;
};

/// Blocks decide what can be reduced, gathered and let go by itself.
ShardMap Zero::lay_out() {
  ParamStore& store = replica_.store();
  std::vector<std::vector<int>> blocks = one_block(store);
  if (!whole_values()) {
    blocks = layer_blocks(store, users_, knobs_.param_persistence_threshold);
  } else if (ranks() > 1 && knobs_.reduction == "reduce_scatter") {
    blocks = bucket_blocks(store, knobs_.reduce_bucket_size);
  }
  // Upstream pads to twice the number of ranks; 8 elements keep slices on the 16 bytes that NCCL and kernels like.
  ShardMap map(store, std::move(blocks), ranks(), ranks() == 1 ? 1 : is_textbook() ? 8 : 2);
  map.place(store);
  return map;
}

ShardedWeights::Values Zero::values_held() const {
  if (whole_values()) return ShardedWeights::Values::whole;
  const auto is_resident = [this](const Param& param) { return param.count <= knobs_.param_persistence_threshold; };
  return std::ranges::any_of(replica_.store().params(), is_resident) ? ShardedWeights::Values::first_resident
                                                                     : ShardedWeights::Values::sharded;
}

GradientShardOptions Zero::gradient_options() const {
  GradientShardOptions options;
  options.reduction = knobs_.reduction == "reduce_scatter" ? ShardReduction::reduce_scatter
                      : knobs_.reduction == "all_reduce"   ? ShardReduction::all_reduce
                                                           : ShardReduction::reduce;
  options.whole = whole_gradients();
  options.copies = !is_textbook();
  options.overlap = knobs_.overlap_comm;
  options.in_flight = knobs_.reductions_in_flight;
  options.bucket_elements = knobs_.reduce_bucket_size;
  // Upstream's buffers have the bucket's full size, two in stages 1 and 2 with overlap, however small the model.
  if (!is_textbook()) {
    options.least_buffer_elements = knobs_.reduce_bucket_size * (knobs_.overlap_comm && knobs_.stage < 3 ? 2 : 1);
  }
  return options;
}

std::string Zero::plan_in_words() const {
  return str("stage ", knobs_.stage, ", ", map_.describe(), ", ", knobs_.reduction, " of ", gradients_.buckets().size(),
             " buckets of up to ", knobs_.reduce_bucket_size, " elements, ", gatherer_.training().gathers.size(),
             " gathers, micro-batches of ", replica_.micro_batch());
}

void Zero::gather_whole_blocks() {
  for (int block = 0; block < static_cast<int>(map_.blocks().size()); ++block) gatherer_.regather(block);
  gatherer_.wait_for_regathers();
}

EngineDescription Zero::describe() const {
  EngineDescription description;
  description.name = "zero";
  description.dp = ranks();
  description.micro_batches = replica_.micro_batches_per_step();
  const auto flag = [](bool value) { return value ? "true" : "false"; };
  description.knobs = {{"preset", knobs_.preset},
                       {"stage", str(knobs_.stage)},
                       {"reduction", knobs_.reduction},
                       {"reduce_bucket_size", str(knobs_.reduce_bucket_size)},
                       {"overlap_comm", flag(knobs_.overlap_comm)},
                       {"overlap_all_gather", flag(knobs_.overlap_all_gather)},
                       {"reductions_in_flight", str(knobs_.reductions_in_flight)}};
  description.differences = {
      "gradients are summed and losses divided by the global count: exact for ragged batches",
      "gradients, buckets and reductions have the wide type (upstream: communication_data_type, the model's type)",
      "works with every optimizer; upstream's partitioning takes Adam only",
      "no offload, round_robin_gradients, sub_group_size, allgather_bucket_size: weights are gathered block by block"};
  if (knobs_.stage > 1) description.differences.emplace_back("gradients are written into buckets, not copied there");
  if (knobs_.stage == 3) {
    description.knobs.insert({{"stage3_prefetch_bucket_size", str(knobs_.prefetch_bucket_size)},
                              {"stage3_param_persistence_threshold", str(knobs_.param_persistence_threshold)},
                              {"stage3_max_live_parameters", str(knobs_.max_live_parameters)},
                              {"stage3_max_reuse_distance", str(knobs_.max_reuse_distance)}});
    description.differences.emplace_back("the order of layers is known from the start, not recorded in the first step");
    description.differences.emplace_back(
        "parameters that the same layers use are gathered and reduced as one block, a transformer block's together; a "
        "bucket's blocks are reduced one by one, without sorting them by rank");
  }
  if (is_textbook()) description.differences.emplace_back("true reduce-scatter, buffers as large as the model needs");
  if (is_textbook() && knobs_.stage < 3) {
    description.differences.emplace_back("blocks of a bucket each are divided, not one flat range");
  }
  if (ranks() == 1) description.differences.emplace_back("one rank: nothing is divided, copied or sent");
  return description;
}

MemoryByKind Zero::predicted_memory() const {
  MemoryByKind memory = replica_.predicted_memory();
  memory += weights_.predicted_memory();
  memory += gradients_.predicted_memory();
  memory += gatherer_.predicted_memory();
  memory += update_.predicted_memory();
  if (context_.training.deterministic && gathers_beside_reductions()) {
    memory[MemoryKind::communication] += deterministic_scratch_bytes(ranks());
  }
  return memory;
}

Prediction Zero::predict() const {
  const std::int64_t value_bytes = size_of(context_.training.dtype);
  const std::int64_t gradient_bytes = size_of(wide_dtype(context_.training.dtype));
  Prediction prediction;
  prediction.memory = predicted_memory();

  const std::int64_t rounds = replica_.micro_batches_per_step();
  const auto add = [&](const std::string& operation, const CommCount& count, std::int64_t times) {
    if (count.calls == 0) return;
    prediction.comm_per_step[operation].calls += times * count.calls;
    prediction.comm_per_step[operation].bytes += times * count.bytes;
  };
  for (const auto& [operation, count] : gradients_.predicted_comm())
    add(operation, count, whole_gradients() ? 1 : rounds);
  const std::string gather = gathers_beside_reductions() ? "parameters.all_gather" : "world.all_gather";
  add(gather, gatherer_.predicted_pass(), rounds);
  add(gather, gatherer_.predicted_regathers(), 1);
  add("world.all_reduce", update_.predicted_all_reduces(), 1);

  prediction.tables.push_back(shard_table(replica_.store(), map_, gradient_bytes));
  if (gradients_.buckets().size() < map_.blocks().size() || map_.blocks().size() == 1) {  // else they are the same
    prediction.tables.push_back(gradient_bucket_table(replica_.store(), gradients_, gradient_bytes));
  }
  if (gathers_beside_reductions()) {
    prediction.tables.push_back(gather_table(replica_.layers(), gatherer_, value_bytes));
  }
  std::vector<std::pair<std::string, MemoryByKind>> ways = {{"ddp", replicated_memory(context_, false)}};
  for (int stage = 1; stage <= 3; ++stage) {
    const ZeroKnobs other = preset_knobs(knobs_.preset, stage);
    ways.emplace_back(str("stage ", stage),
                      stage == knobs_.stage ? prediction.memory : Zero(context_, other).predicted_memory());
  }
  prediction.tables.push_back(memory_comparison(ways));
  if (ranks() == 1) return prediction;
  add_warnings(prediction);
  for (int less = 0; less < knobs_.stage; ++less) {
    const auto& [name, memory] = ways[static_cast<std::size_t>(less)];
    if (prediction.memory.total() < memory.total()) continue;
    prediction.warnings.push_back(str("stage ", knobs_.stage, " needs no less memory here than ", name, ": ",
                                      format_bytes(prediction.memory.total()), " against ",
                                      format_bytes(memory.total()), ", ",
                                      format_bytes(prediction.memory[MemoryKind::communication]), " of it in buffers"));
  }
  return prediction;
}

/// Settings that defeat themselves.
void Zero::add_warnings(Prediction& prediction) const {
  const std::vector<GradientBucket>& buckets = gradients_.buckets();
  const std::int64_t all = map_.elements();
  if (knobs_.overlap_comm && buckets.size() == 1) {
    prediction.warnings.push_back(str("reduce_bucket_size (", knobs_.reduce_bucket_size, ") holds all ", all,
                                      " gradients: nothing is reduced while the backward pass runs"));
  } else if (knobs_.overlap_comm && 10 * buckets.back().elements > all) {
    prediction.warnings.push_back(str("the last bucket (", 100 * buckets.back().elements / all,
                                      " % of all gradients) is complete only when the backward pass ends: it cannot "
                                      "overlap"));
  }
  const GatherSchedule& schedule = gatherer_.training();
  const bool lets_go_early =
      std::any_of(schedule.uses.begin(), schedule.uses.begin() + static_cast<std::ptrdiff_t>(schedule.uses.size() / 2),
                  [](const GatherSchedule::Use& use) { return !use.released.empty(); });
  if (!schedule.gathers.empty() && !lets_go_early) {
    prediction.warnings.push_back(str("stage3_max_reuse_distance (", knobs_.max_reuse_distance,
                                      ") keeps every gathered parameter from the forward to the backward pass: at the "
                                      "turn all of them are held"));
  }
  if (!schedule.gathers.empty() && knobs_.prefetch_bucket_size == 0)
    prediction.warnings.emplace_back("nothing is gathered ahead: every layer waits for its parameters");
}

std::unique_ptr<Engine> make_zero(const EngineContext& context, const ConfigReader& reader) {
  const ZeroKnobs knobs = read_knobs(reader);
  if (knobs.preset == "hf-auto" && !context.model.hidden_size) {
    reader.problem("preset", str("hf-auto: needs a hidden size, ", context.model.name, " has none; take deepspeed"));
    return nullptr;
  }
  return make_synchronous_engine(context, std::make_unique<Zero>(context, knobs));
}

}  // namespace

EngineDefinition zero_definition() {
  return {.name = "zero",
          .summary = "optimizer states, gradients and parameters divided over the ranks",
          .paper = "Rajbhandari et al., ZeRO, SC 2020",
          .reference = "serial",
          .make = make_zero,
          .document = [](const ConfigReader& reader) { read_knobs(reader); },
          .data_parallel_size = [](int ranks, const ConfigReader&) { return ranks; },
          .variants =
              {{"stage 1, small buckets", {"reduce_bucket_size=1500"}},
               {"stage 2", {"stage=2", "reduce_bucket_size=1500"}},
               {"stage 3", {"stage=3", "reduce_bucket_size=1500"}},
               {"stage 3, nothing ahead", {"stage=3", "stage3_prefetch_bucket_size=0", "overlap_comm=false"}},
               {"stage 1, deepspeed", {"preset=deepspeed", "reduce_bucket_size=4000"}},
               {"stage 2, deepspeed", {"preset=deepspeed", "stage=2", "reduce_bucket_size=4000", "overlap_comm=true"}},
               {"stage 3, deepspeed",
                {"preset=deepspeed", "stage=3", "reduce_bucket_size=4000", "stage3_param_persistence_threshold=100"}},
               {"stage 3, deepspeed, letting go",
                {"preset=deepspeed", "stage=3", "reduce_bucket_size=4000", "stage3_param_persistence_threshold=100",
                 "stage3_max_reuse_distance=3000", "stage3_prefetch_bucket_size=2000"}},
               {.name = "stage 3, hf-auto", .knobs = {"preset=hf-auto", "stage=3"}, .models = "gpt2"},
               {"stage 1, deepspeed 2021", {"preset=deepspeed-2021", "reduce_bucket_size=4000", "overlap_comm=true"}},
               {"stage 2, deepspeed 2021", {"preset=deepspeed-2021", "stage=2", "reduce_bucket_size=4000"}}}};
}

}  // namespace pdl
