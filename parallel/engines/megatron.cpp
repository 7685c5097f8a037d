// megatron: tensor, pipeline and data parallelism on one grid of ranks.
//
//   start: ranks form a grid tp x dp x pp; cut the layers into pp (interleaved: v pp) stages, as evenly as their costs
//          allow; divide the layers of each stage over tp ranks; dp replicas of all that share a step's samples
//   for each step, on every rank, over the m micro-batches of its replica (1F1B; interleaved: by chunks):
//     a few forwards ahead, as many as stages come behind this one
//     then in turn: receive an activation; forward; send it on; receive a gradient; backward; send its gradient back
//         (recompute_granularity=full: each transformer block goes forward again just before it goes backward)
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
//   - recompute_granularity=selective changes nothing: attention never keeps its scores (workload.recompute drops
//     more); full takes recompute_method=uniform unless told, where upstream demands a method
//   - context and expert parallelism are missing
//
// Knobs (upstream name = default)
//   tensor_model_parallel_size=1  pipeline_model_parallel_size=1  virtual_pipeline_model_parallel_size=1 (upstream:
//   None) microbatch_group_size_per_vp_stage=0 (the pipeline's size)  sequence_parallel=false
//   use_distributed_optimizer=false overlap_grad_reduce=false  ddp_bucket_size=0 (upstream's rule)
//   use_tp_pp_dp_mapping=false  recompute_granularity=none (upstream: None)  recompute_method=uniform (upstream: None)
//   recompute_num_layers=1 (upstream: None)
//   training.micro_batch_size, optimizer.clip_grad_norm, loss_scale are the recipe's own
//   preset: megatron-intra (tp: all ranks), megatron-data (dp: all ranks), the two series of the study

#include <algorithm>
#include <array>

#include "parallel/comm/self_communicator.h"
#include "parallel/engines/megatron.h"
#include "parallel/pipeline/stage_tables.h"
#include "parallel/pipeline/staged_model.h"

namespace pdl {
namespace {

Schedule schedule_of(const MegatronKnobs& knobs, int micro_batches) {
  if (knobs.chunks == 1) return one_forward_one_backward(knobs.pp, micro_batches);
  return interleaved(knobs.pp, micro_batches, knobs.chunks, legal_group(knobs.pp, micro_batches, knobs.group));
}

class Megatron final : public StepMethod {
 public:
  Megatron(const EngineContext& context, const MegatronKnobs& knobs)
      : context_(context),
        knobs_(knobs),
        grid_(knobs.grid(context.world.size())),
        group_{.rank = grid_.coordinate(context.world.rank()).tp, .size = size().tp},
        factory_(group_, spread()),
        costs_(megatron_costs(context, size().dp)),
        report_(cut_evenly(costs_, knobs.pp * knobs.chunks)),
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
  SpreadOver spread() const { return knobs_.spread(context_.world.size()); }
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
            .recomputation = knobs_.recomputation(),
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
                       {"recompute_granularity", knobs_.granularity},
                       {"layers of each stage", "[" + balance + "]"}};
  if (knobs_.chunks > 1) {
    description.knobs["microbatch_group_size_per_vp_stage"] =
        str(legal_group(knobs_.pp, micro_batches(), knobs_.group));
  }
  if (knobs_.granularity == "full") {
    description.knobs["recompute_method"] = knobs_.method;
    description.knobs["recompute_num_layers"] = str(knobs_.recomputed_blocks);
  }
  description.differences = {"gradients are summed and losses divided by the global count: exact for ragged batches",
                             "dropout masks and initial weights do not depend on the grid",
                             "stages are cut by cost, so the number of layers need not divide by stages"};
  if (knobs_.distributed_optimizer) {
    description.differences.emplace_back("buckets of the distributed optimizer hold whole parameters");
  }
  if (knobs_.granularity == "selective") {
    description.differences.emplace_back("selective recomputes what none does: attention never keeps its scores");
  }
  return description;
}

/// What divided layers send: forward, forward again and backward of each micro-batch through this rank's layers.
CommCounts Megatron::tensor_traffic_per_step() const {
  CommCounts counts;
  if (size().tp == 1) return counts;
  const auto add = [&counts](const CommCounts& pass) {
    for (const auto& [operation, count] : pass) {
      counts["tp." + operation].calls += count.calls;
      counts["tp." + operation].bytes += count.bytes;
    }
  };
  const Part share = split_evenly(context_.training.global_batch, size().dp, model_.plan().place().dp);
  for (const Part& piece : cut_step(share.count, micro_batches())) {
    const auto traffic = [&](const LayerRange& layers) {
      return tensor_traffic(context_.model, spread(), size().tp, layers.first, layers.second, piece.count,
                            context_.training.dtype);
    };
    for (const LayerRange& layers : model_.plan().layer_ranges(model_.plan().place().pp)) {
      add(traffic(layers).forward);
      add(traffic(layers).backward);
    }
    for (const LayerRange& again : model_.plan().recomputed(model_.plan().place().pp)) add(traffic(again).forward);
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
    MegatronKnobs knobs = knobs_;
    knobs.tp = tp;
    knobs.pp = knobs.chunks = 1;
    if (!obstacle_to_tensor_parallel(context_.model, knobs.spread(tp), tp).empty()) continue;
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
  prediction.tables = {grid_table(), legal_grids(context_)};
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

std::unique_ptr<Engine> make_megatron(const EngineContext& context, const ConfigReader& reader) {
  const MegatronKnobs knobs = read_megatron_knobs(reader);
  if (!check_megatron(context, knobs, reader)) return nullptr;
  return make_synchronous_engine(context, make_megatron_method(context, knobs));
}

}  // namespace

std::unique_ptr<StepMethod> make_megatron_method(const EngineContext& context, const MegatronKnobs& knobs) {
  return std::make_unique<Megatron>(context, knobs);
}

EngineDefinition megatron_definition() {
  return {
      .name = "megatron",
      .summary = "layers divided over tensor-parallel ranks, stages in a 1F1B pipeline, replicas of both",
      .paper = "Shoeybi et al., Megatron-LM, 2019; Narayanan et al., SC 2021; Korthikanti et al., 2022",
      .reference = "serial",
      .make = make_megatron,
      .document = [](const ConfigReader& reader) { read_megatron_knobs(reader); },
      .data_parallel_size =
          [](int ranks, const ConfigReader& reader) {
            const MegatronKnobs knobs = read_megatron_knobs(reader);
            return std::max(1, ranks / (knobs.tensor_ranks(ranks) * knobs.pp));
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
                   {.name = "recomputed blocks",
                    .knobs = {"pipeline_model_parallel_size=2", "recompute_granularity=full"},
                    .rank_multiple = 2,
                    .models = "gpt2"},
                   {.name = "divided channels",
                    .knobs = {"tensor_model_parallel_size=2", "use_distributed_optimizer=true"},
                    .rank_multiple = 2,
                    .models = "vgg"}}};
}

}  // namespace pdl
