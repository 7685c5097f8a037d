// megatron: tensor, pipeline and data parallelism on one grid of ranks.
//
//   start: ranks form a grid tp x dp x pp; cut the layers into pp (interleaved: v pp) stages, as evenly as their costs
//          allow; divide the layers of each stage over tp ranks; dp replicas of all that share a step's samples
//   for each step, on every rank, over the m micro-batches of its replica (1F1B; interleaved: by chunks):
//     a few forwards ahead, as many as stages come behind this one
//     then in turn: receive an activation; forward; send it on; receive a gradient; backward; send its gradient back
//       inside layers, tp ranks all-reduce activations (sequence_parallel: all-gather and reduce-scatter them)
//     then the remaining backwards
//     all-reduce the gradients over dp, once     (overlap_grad_reduce: bucket by bucket under the last backward pass;
//                                                 use_distributed_optimizer: reduce-scatter them)
//     sum the tied embedding's gradient over first and last stage; with sequence_parallel, that of norms and biases
//     over tp
//     norm over everything once, clip, update    (use_distributed_optimizer: this replica's slices; all-gather values)
//
// Papers: Shoeybi et al., "Megatron-LM", 2019; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
// Clusters Using Megatron-LM", SC 2021; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
// Models", 2022.
// Upstream: megatron/core/{parallel_state,pipeline_parallel/schedules,distributed,tensor_parallel} of 2026.
//
// Same as upstream
//   - the order of ranks on the grid, and the other one (use_tp_pp_dp_mapping); dp is what tp and pp leave
//   - 1F1B with flush and interleaved 1F1B, in groups of microbatch_group_size_per_vp_stage micro-batches
//   - gradients are reduced over dp once a step, in buckets of max(40e6, 1e6 dp) elements when that overlaps
//   - the order at the end of a step: dp, tp of replicated parameters, tied embedding, norm, clip, update
// Differs from upstream
//   - losses are divided by the predictions of the global batch and summed: exact for ragged batches and any split
//   - dropout masks and initial weights do not depend on the grid; padded vocabulary entries count nothing: the loss
//     is the same for every tp, pp and dp
//   - layers need not divide by stages: cuts are the best by operation counts, the head with its weight
//   - the distributed optimizer divides buckets that hold whole parameters; the tied embedding and the norms of
//     sequence_parallel have buckets of their own, so that only slices are summed once more
//   - receives are always posted ahead (upstream: overlap_p2p_comm); values are gathered at the end of the step
//   - context and expert parallelism, recompute_granularity are missing (workload.recompute has selective forms)
//
// Knobs (upstream name = default)
//   tensor_model_parallel_size=1  pipeline_model_parallel_size=1  virtual_pipeline_model_parallel_size=1 (upstream:
//   None) microbatch_group_size_per_vp_stage=0 (the pipeline's size)  sequence_parallel=false
//   use_distributed_optimizer=false overlap_grad_reduce=false  ddp_bucket_size=0 (upstream's rule)
//   use_tp_pp_dp_mapping=false training.micro_batch_size, optimizer.clip_grad_norm, loss_scale are the recipe's own:
//   preset: megatron-intra (tp: all ranks), megatron-data (dp: all ranks), the two series of the study

#include <algorithm>
#include <array>

#include "parallel/comm/self_communicator.h"
#include "parallel/pipeline/stage_tables.h"
#include "parallel/pipeline/staged_model.h"
#include "parallel/shard/tensor_parallel.h"

namespace pdl {
namespace {

struct MegatronKnobs {
  std::string preset = "none";
  int tp = 1, pp = 1, chunks = 1, group = 0;
  bool sequence_parallel = false, distributed_optimizer = false, overlap_grad_reduce = false, tp_pp_dp = false;
  std::int64_t bucket_size = 0;
};

MegatronKnobs read_knobs(const ConfigReader& reader) {
  MegatronKnobs knobs;
  knobs.preset = reader.choice("preset", knobs.preset, {"none", "megatron-intra", "megatron-data"},
                               "series of the study: all ranks divide layers, or all ranks divide samples");
  const int everything = knobs.preset == "megatron-intra" ? 0 : 1;
  knobs.tp = reader.get("tensor_model_parallel_size", everything, "ranks that divide each layer; 0: all", {0, 1 << 20});
  knobs.pp = reader.get("pipeline_model_parallel_size", knobs.pp, "stages of the pipeline", {1, 1 << 20});
  knobs.chunks = reader.get("virtual_pipeline_model_parallel_size", knobs.chunks,
                            "stages on each rank, interleaved: a smaller bubble, more messages", {1, 1 << 20});
  knobs.group = reader.get("microbatch_group_size_per_vp_stage", knobs.group,
                           "interleaved: micro-batches that go through one stage of a rank before the next one's turn; "
                           "0: as many as ranks in the pipeline",
                           {0, 1 << 20});
  knobs.sequence_parallel = reader.get("sequence_parallel", knobs.sequence_parallel,
                                       "outside divided layers each tensor-parallel rank has a part of the sequence");
  knobs.distributed_optimizer = reader.get("use_distributed_optimizer", knobs.distributed_optimizer,
                                           "optimizer states divided over data-parallel ranks");
  knobs.overlap_grad_reduce = reader.get("overlap_grad_reduce", knobs.overlap_grad_reduce,
                                         "reduce gradients over data-parallel ranks under the last backward pass");
  knobs.bucket_size = reader.get<std::int64_t>(
      "ddp_bucket_size", knobs.bucket_size,
      "elements of a gradient bucket; 0: max(40e6, 1e6 dp) with overlap_grad_reduce, else one bucket", {0, 1e15});
  knobs.tp_pp_dp = reader.get("use_tp_pp_dp_mapping", knobs.tp_pp_dp,
                              "neighbouring ranks are stages (tp-pp-dp) instead of replicas (tp-dp-pp)");
  return knobs;
}

int tensor_ranks(const MegatronKnobs& knobs, int ranks) {
  return knobs.tp == 0 ? std::max(1, ranks / knobs.pp) : knobs.tp;
}

ProcessGrid grid_of(const MegatronKnobs& knobs, int ranks) {
  const int tp = tensor_ranks(knobs, ranks);
  return ProcessGrid({.tp = tp, .dp = ranks / (tp * knobs.pp), .pp = knobs.pp},
                     knobs.tp_pp_dp ? "tp-pp-dp" : "tp-dp-pp");
}

/// The group size in which so many micro-batches can be interleaved: the wanted one, or the next that can.
int legal_group(int stages, int micro_batches, int wanted) {
  for (int group = std::max(stages, wanted == 0 ? stages : wanted); group < micro_batches; ++group) {
    const int rest = micro_batches % group;
    if (rest == 0 || rest >= stages) return group;
  }
  return micro_batches;
}

Schedule schedule_of(const MegatronKnobs& knobs, int micro_batches) {
  if (knobs.chunks == 1) return one_forward_one_backward(knobs.pp, micro_batches);
  return interleaved(knobs.pp, micro_batches, knobs.chunks, legal_group(knobs.pp, micro_batches, knobs.group));
}

int micro_batches_of(const EngineContext& context, int dp) {
  const std::int64_t share = context.training.global_batch / dp, micro_batch = context.training.micro_batch;
  return static_cast<int>(micro_batch > 0 ? (share + micro_batch - 1) / micro_batch : 1);
}

/// Costs of the whole layers: all ranks cut alike, and division by tp changes no proportion.
std::vector<LayerCost> costs_of(const EngineContext& context, int dp) {
  const std::int64_t samples = cut_step(context.training.global_batch / dp, micro_batches_of(context, dp))[0].count;
  return layer_costs(context.model.build(LayerFactory()), context.model.sample_input, context.training.dtype, samples);
}

PartitionReport cut(const std::vector<LayerCost>& costs, int stages) {
  PartitionReport report{.balance = {}, .criterion = {}, .criterion_name = "operations", .method = "minimax"};
  for (const LayerCost& cost : costs) report.criterion.push_back(cost.time());
  report.balance = minimax_balance(report.criterion, stages);
  return report;
}

class Megatron final : public StepMethod {
 public:
  Megatron(const EngineContext& context, const MegatronKnobs& knobs)
      : context_(context),
        knobs_(knobs),
        grid_(grid_of(knobs, context.world.size())),
        group_{.rank = grid_.coordinate(context.world.rank()).tp, .size = size().tp},
        factory_(group_, spread()),
        costs_(costs_of(context, size().dp)),
        report_(cut(costs_, knobs.pp * knobs.chunks)),
        model_(context, pipeline_options(), update_options()) {}

  StepOutcome train_step(const StepOrder& order, Observer& observer) override {
    return model_.train_step(order, observer);
  }
  void prepare() override {
    model_.prepare();
    group_.ranks = model_.group("tp");
    group_.stream = &context_.device.compute_stream();
  }
  EngineDescription describe() const override;
  Prediction predict() const override;
  HeldModel& model() override { return model_; }
  std::vector<StateTensor> state() override { return model_.state(); }
  void restored() override { model_.restored(); }

 private:
  const GridSize& size() const { return grid_.size(); }
  SpreadOver spread() const {
    return knobs_.sequence_parallel && size().tp > 1 ? SpreadOver::sequence : SpreadOver::none;
  }
  int micro_batches() const { return micro_batches_of(context_, size().dp); }
  std::int64_t bucket_elements() const {
    if (knobs_.bucket_size > 0) return knobs_.bucket_size;
    return knobs_.overlap_grad_reduce ? std::max<std::int64_t>(40000000, 1000000ll * size().dp) : 1ll << 50;
  }
  PipelineOptions pipeline_options() const {
    return {.balance = report_.balance,
            .stages = knobs_.pp,
            .chunks = knobs_.chunks,
            .micro_batches = micro_batches(),
            .schedule = [knobs = knobs_](int micro_batches) { return schedule_of(knobs, micro_batches); },
            .grid = grid_,
            .factory = &factory_};
  }
  StageUpdateOptions update_options() const {
    return {.replica = {.distributed = knobs_.distributed_optimizer,
                        .overlap = knobs_.overlap_grad_reduce,
                        .bucket_elements = bucket_elements()},
            .is_partial = [this](const ParamSpec& spec) { return factory_.is_partial(spec); }};
  }
  CommCounts tensor_traffic_per_step() const;
  PlanTable grid_table() const;
  PlanTable memory_by_tp() const;
  void warn(std::vector<std::string>& warnings) const;

  const EngineContext& context_;
  MegatronKnobs knobs_;
  ProcessGrid grid_;
  TensorGroup group_;
  TensorParallelFactory factory_;
  std::vector<LayerCost> costs_;
  PartitionReport report_;
  StagedModel model_;
};

EngineDescription Megatron::describe() const {
  EngineDescription description;
  description.name = "megatron";
  description.dp = size().dp;
  description.tp = size().tp;
  description.pp = size().pp;
  description.micro_batches = micro_batches();
  const auto flag = [](bool value) { return value ? "true" : "false"; };
  std::string balance;
  for (int count : report_.balance) balance += str(balance.empty() ? "" : ", ", count);
  description.knobs = {{"preset", knobs_.preset},
                       {"tensor_model_parallel_size", str(size().tp)},
                       {"pipeline_model_parallel_size", str(size().pp)},
                       {"virtual_pipeline_model_parallel_size", str(knobs_.chunks)},
                       {"sequence_parallel", flag(spread() == SpreadOver::sequence)},
                       {"use_distributed_optimizer", flag(knobs_.distributed_optimizer)},
                       {"overlap_grad_reduce", flag(knobs_.overlap_grad_reduce)},
                       {"use_tp_pp_dp_mapping", flag(knobs_.tp_pp_dp)},
                       {"layers of each stage", "[" + balance + "]"}};
  if (knobs_.chunks > 1) {
    description.knobs["microbatch_group_size_per_vp_stage"] =
        str(legal_group(knobs_.pp, micro_batches(), knobs_.group));
  }
  description.differences = {"gradients are summed and losses divided by the global count: exact for ragged batches",
                             "dropout masks and initial weights do not depend on the grid",
                             "stages are cut by cost, so the number of layers need not divide by stages"};
  if (knobs_.distributed_optimizer) {
    description.differences.emplace_back("buckets of the distributed optimizer hold whole parameters");
  }
  return description;
}

/// What divided layers send: forward and backward of each micro-batch through this rank's layers.
CommCounts Megatron::tensor_traffic_per_step() const {
  CommCounts counts;
  if (size().tp == 1) return counts;
  const Part share = split_evenly(context_.training.global_batch, size().dp, model_.plan().place().dp);
  for (const Part& piece : cut_step(share.count, micro_batches())) {
    for (const auto& [first, last] : model_.plan().layer_ranges(model_.plan().place().pp)) {
      const TensorTraffic traffic =
          tensor_traffic(context_.model, spread(), size().tp, first, last, piece.count, context_.training.dtype);
      for (const CommCounts& pass : {traffic.forward, traffic.backward}) {
        for (const auto& [operation, count] : pass) {
          counts["tp." + operation].calls += count.calls;
          counts["tp." + operation].bytes += count.bytes;
        }
      }
    }
  }
  return counts;
}

PlanTable Megatron::grid_table() const {
  PlanTable table{.title = str("grid of ", context_.world.size(), " ranks: tp ", size().tp, " x pp ", size().pp,
                               " x dp ", size().dp, knobs_.tp_pp_dp ? ", order tp-pp-dp" : ", order tp-dp-pp"),
                  .columns = {"axis", "groups of ranks"},
                  .rows = {}};
  constexpr std::size_t kMostShown = 8;
  for (const char* axis : {"tp", "dp", "pp"}) {
    const std::vector<std::vector<int>> groups = grid_.groups(axis);
    std::string text;
    for (std::size_t i = 0; i < std::min(groups.size(), kMostShown); ++i) {
      std::string members;
      for (int rank : groups[i]) members += str(members.empty() ? "" : ",", rank);
      text += str(text.empty() ? "{" : " {", members, "}");
    }
    table.rows.push_back({axis, text + (groups.size() > kMostShown ? " ..." : "")});
  }
  return table;
}

/// All ranks divide layers, and the batch grows with them: weights shrink, activations outside divided layers grow.
PlanTable Megatron::memory_by_tp() const {
  PlanTable table{.title = str("memory of rank 0 with tp ranks that divide layers, ",
                               context_.training.global_batch / size().tp, " samples for each"),
                  .columns = {"tp", "weights and moments", "activations", "in all"},
                  .rows = {}};
  for (int tp = 1; tp <= 16; tp *= 2) {
    if (!obstacle_to_tensor_parallel(context_.model, SpreadOver::none, tp).empty()) continue;
    const std::unique_ptr<Communicator> world = make_planning_communicator(0, tp);
    TrainingOptions training = context_.training;
    training.global_batch = std::max<std::int64_t>(1, training.global_batch / size().tp) * tp;
    const EngineContext context{.world = *world,
                                .device = context_.device,
                                .backend = context_.backend,
                                .model = context_.model,
                                .training = training,
                                .data = context_.data,
                                .loader = {},
                                .stop_requested = nullptr};
    MegatronKnobs knobs;
    knobs.tp = tp;
    const MemoryByKind memory = Megatron(context, knobs).model_.predicted_memory();
    table.rows.push_back(
        {str(tp),
         format_bytes(memory[MemoryKind::parameters] + memory[MemoryKind::gradients] + memory[MemoryKind::optimizer]),
         format_bytes(memory[MemoryKind::activations]), format_bytes(memory.total())});
  }
  return table;
}

Prediction Megatron::predict() const {
  Prediction prediction;
  prediction.memory = model_.predicted_memory();
  prediction.comm_per_step = model_.predicted_traffic();
  for (const auto& [key, count] : tensor_traffic_per_step()) {
    prediction.comm_per_step[key].calls += count.calls;
    prediction.comm_per_step[key].bytes += count.bytes;
  }
  const Schedule schedule = model_.plan().training(micro_batches());
  const Timeline timeline = simulate(schedule, model_.plan().stage_costs(costs_));
  prediction.bubble_fraction = timeline.idle_fraction();
  prediction.tables = {grid_table()};
  if (knobs_.pp > 1) {
    prediction.tables.push_back(explain_partition(report_, costs_, context_.training.dtype));
    prediction.tables.push_back(schedule_picture(
        str(schedule.name, ", ", micro_batches(), " micro-batches: idle ", percent(timeline.idle_fraction())), schedule,
        timeline));
  }
  prediction.tables.push_back(
      stage_memory_table(context_, model_.plan(), knobs_.distributed_optimizer ? size().dp : 1));
  prediction.tables.push_back(traffic_table(prediction.comm_per_step));
  if (knobs_.preset == "megatron-intra") prediction.tables.push_back(memory_by_tp());
  warn(prediction.warnings);
  return prediction;
}

void Megatron::warn(std::vector<std::string>& warnings) const {
  if (knobs_.pp > 1 && micro_batches() < knobs_.pp) {
    warnings.push_back(str(micro_batches(), " micro-batches for ", knobs_.pp, " stages: never more than ",
                           micro_batches(), " of them work at a time; take a smaller training.micro_batch_size"));
  }
  if (knobs_.distributed_optimizer && size().dp == 1) {
    warnings.emplace_back("use_distributed_optimizer has no data-parallel ranks to divide the optimizer over");
  }
  if (knobs_.overlap_grad_reduce && size().dp == 1) {
    warnings.emplace_back("overlap_grad_reduce: one data-parallel rank has nothing to reduce");
  }
  if (knobs_.sequence_parallel && size().tp == 1) {
    warnings.emplace_back("sequence_parallel is off: one tensor-parallel rank has the whole sequence");
  }
}

/// Divisors of `ranks` nearest to `wanted`, as words.
std::string nearest_divisors(int ranks, int wanted) {
  int below = std::min(wanted, ranks), above = wanted;
  while (below > 1 && ranks % below != 0) --below;
  while (above < ranks && ranks % above != 0) ++above;
  return below == above || above > ranks ? str(below) : str(below, " or ", above);
}

/// Notes a grid that the ranks do not fill.
bool check_grid(const MegatronKnobs& knobs, int ranks, const ConfigReader& reader) {
  const int tp = tensor_ranks(knobs, ranks), product = tp * knobs.pp;
  if (product <= ranks && ranks % product == 0) return true;
  const char* const key = ranks % knobs.pp != 0 ? "pipeline_model_parallel_size" : "tensor_model_parallel_size";
  const int rest = ranks % knobs.pp != 0 ? ranks : ranks / knobs.pp;
  const int value = ranks % knobs.pp != 0 ? knobs.pp : tp;
  reader.problem(key, str("tp ", tp, " x pp ", knobs.pp, " = ", product, " does not divide ", ranks,
                          " ranks; nearest: ", nearest_divisors(rest, value)));
  return false;
}

/// Notes what cannot be interleaved.
bool check_chunks(const MegatronKnobs& knobs, int micro_batches, int layers, const ConfigReader& reader) {
  bool is_fine = true;
  const auto problem = [&](const char* key, const std::string& message) {
    reader.problem(key, message);
    is_fine = false;
  };
  if (knobs.pp * knobs.chunks > layers) {
    problem(knobs.chunks > 1 ? "virtual_pipeline_model_parallel_size" : "pipeline_model_parallel_size",
            str(knobs.pp * knobs.chunks, " stages, but the model has only ", layers, " layers to divide; at most ",
                knobs.chunks > 1 ? std::max(1, layers / knobs.pp) : layers));
  }
  if (knobs.chunks == 1) {
    if (knobs.group > 0) {
      problem("microbatch_group_size_per_vp_stage", "acts with virtual_pipeline_model_parallel_size above 1 only");
    }
    return is_fine;
  }
  if (knobs.pp == 1) {
    problem("virtual_pipeline_model_parallel_size",
            "needs several stages: set pipeline_model_parallel_size to 2 or more, or this to 1");
  } else if (micro_batches < knobs.pp) {
    problem("virtual_pipeline_model_parallel_size",
            str("needs as many micro-batches as stages, there are ", micro_batches, " for ", knobs.pp,
                "; take 1, or a smaller training.micro_batch_size"));
  } else {
    const int wanted = knobs.group == 0 ? knobs.pp : knobs.group, legal = legal_group(knobs.pp, micro_batches, wanted);
    if (wanted != legal) {
      problem("microbatch_group_size_per_vp_stage",
              str(micro_batches, " micro-batches cannot go in groups of ", wanted, ": the last group needs ", knobs.pp,
                  " at least; nearest: ", legal));
    }
  }
  return is_fine;
}

std::unique_ptr<Engine> make_megatron(const EngineContext& context, const ConfigReader& reader) {
  const MegatronKnobs knobs = read_knobs(reader);
  const int ranks = context.world.size();
  if (!check_grid(knobs, ranks, reader)) return nullptr;
  const GridSize size = grid_of(knobs, ranks).size();
  const int layers = static_cast<int>(context.model.build(LayerFactory()).size()) - 1;
  if (!check_chunks(knobs, micro_batches_of(context, size.dp), layers, reader)) return nullptr;
  const bool spreads = knobs.sequence_parallel && size.tp > 1;
  const std::string obstacle =
      obstacle_to_tensor_parallel(context.model, spreads ? SpreadOver::sequence : SpreadOver::none, size.tp);
  if (!obstacle.empty()) {
    reader.problem(size.tp > 1 ? "tensor_model_parallel_size" : "sequence_parallel", str(size.tp, " ", obstacle));
    return nullptr;
  }
  return make_synchronous_engine(context, std::make_unique<Megatron>(context, knobs));
}

}  // namespace

EngineDefinition megatron_definition() {
  return {
      .name = "megatron",
      .summary = "layers divided over tensor-parallel ranks, stages in a 1F1B pipeline, replicas of both",
      .paper = "Shoeybi et al., Megatron-LM, 2019; Narayanan et al., SC 2021; Korthikanti et al., 2022",
      .reference = "serial",
      .make = make_megatron,
      .document = [](const ConfigReader& reader) { read_knobs(reader); },
      .data_parallel_size =
          [](int ranks, const ConfigReader& reader) {
            const MegatronKnobs knobs = read_knobs(reader);
            return std::max(1, ranks / (tensor_ranks(knobs, ranks) * knobs.pp));
          },
      .takes_data_store = false,
      .variants = {{.name = "two stages", .knobs = {"pipeline_model_parallel_size=2"}, .rank_multiple = 2},
                   {.name = "three stages",
                    .knobs = {"pipeline_model_parallel_size=3", "use_distributed_optimizer=true"},
                    .rank_multiple = 3},
                   {.name = "distributed optimizer",
                    .knobs = {"use_distributed_optimizer=true", "overlap_grad_reduce=true", "ddp_bucket_size=1500"}},
                   {.name = "other order, overlapped all-reduces",
                    .knobs = {"pipeline_model_parallel_size=2", "use_tp_pp_dp_mapping=true", "overlap_grad_reduce=true",
                              "ddp_bucket_size=1500"},
                    .rank_multiple = 2},
                   {.name = "divided heads",
                    .knobs = {"tensor_model_parallel_size=3"},
                    .rank_multiple = 3,  // the model of the tests has that many heads
                    .models = "gpt2"},
                   {.name = "divided channels",
                    .knobs = {"tensor_model_parallel_size=2", "use_distributed_optimizer=true"},
                    .rank_multiple = 2,
                    .models = "vgg"}}};
}

}  // namespace pdl
