// torchgpipe: GPipe's pipeline, one stage of consecutive layers on each rank.
//
//   start: cut the layers into as many stages as ranks, so that the slowest stage is as quick as possible
//   for each step, on every rank:
//     for each micro-batch i = 0 .. m-1 of the mini-batch:
//       receive its activation; forward; send the output on            (last stage: its loss)
//         unless i is to be kept: let go of everything but the activation that was received
//     for i = m-1 .. 0:
//       unless i was kept: forward again                               (while the gradient is on its way)
//       receive the gradient of its output; backward, adding to the gradients; send the gradient of its input back
//     sum the gradients of parameters that two stages share
//     norm over all stages, clip, update the stage's weights; no update where a scaled gradient overflowed
//
// Papers: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019;
// Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", 2020.
// Upstream: torchgpipe/{gpipe,pipeline,checkpoint}.py and torchgpipe/balance/ of v0.0.7.
//
// Same as upstream
//   - the order of forwards, recomputations and backwards on every stage; a recomputation starts before its gradient is
//     there
//   - the three checkpoint modes; nothing is recomputed in evaluation
//   - loss_in_pipeline=false: all outputs come together on the last device, where the loss is computed over all of them
//   - partition=blockpartition: the same cuts from the same costs; balance_by=size counts latents and param_scale
// Differs from upstream
//   - ranks in place of threads of one process: several hosts are no different from one
//   - the loss is computed micro-batch by micro-batch in the last stage, divided by the mini-batch's predictions: the
//     same numbers without keeping all outputs
//   - micro-batches differ by at most one sample, where upstream's last may be small, or missing; except_last keeps the
//     last one that there is
//   - cuts are exact by default, not a heuristic, and by operation counts; times come from a file that `pdlbench
//     profile` measures, after a warm-up, so that all ranks cut alike and a run can be repeated
//   - parameters that two stages share are legal: their gradients are summed between the two
//   - stages may not divide a layer: a transformer block is one; there are no skip connections, so no portals
//   - deferred_batch_norm is missing: the models here have no batch norm
//
// Knobs (upstream name = default)
//   chunks=1  checkpoint=except_last  balance=[] (upstream: required; here one is found)
//   own: balance_by=flops (upstream: the functions balance_by_time and balance_by_size)  partition=minimax
//   profile=""  param_scale=2 (upstream's argument of balance_by_size)  loss_in_pipeline=true

#include <algorithm>

#include "parallel/pipeline/layer_profile.h"
#include "parallel/pipeline/stage_tables.h"
#include "parallel/pipeline/staged_model.h"

namespace pdl {
namespace {

struct TorchgpipeKnobs {
  int chunks = 1;
  std::string checkpoint = "except_last";
  Balance balance;  ///< empty: found
  std::string balance_by = "flops", partition = "minimax", profile;
  double param_scale = 2.0;
  bool loss_in_pipeline = true;
};

TorchgpipeKnobs read_knobs(const ConfigReader& reader) {
  TorchgpipeKnobs knobs;
  knobs.chunks =
      reader.get("chunks", knobs.chunks,
                 "micro-batches of a step; more when training.micro_batch_size asks for smaller ones", {1, 1 << 20});
  knobs.checkpoint =
      reader.choice("checkpoint", knobs.checkpoint, {"always", "except_last", "never"},
                    "which micro-batches' forwards are computed again in the backward pass, to keep only their inputs");
  for (std::int64_t count :
       reader.get_list("balance", {}, "layers of each stage; empty: balanced by balance_by", {0, 1 << 20})) {
    knobs.balance.push_back(static_cast<int>(count));
  }
  knobs.balance_by = reader.choice("balance_by", knobs.balance_by, {"flops", "time", "size"},
                                   "what stages are balanced by: operations, measured times (profile), or memory");
  knobs.partition = reader.choice("partition", knobs.partition, {"minimax", "blockpartition"},
                                  "how: the best cut, or upstream's heuristic");
  knobs.profile = reader.get<std::string>("profile", "", "file of `pdlbench profile` for balance_by=time");
  knobs.param_scale = reader.get("param_scale", knobs.param_scale,
                                 "balance_by=size: copies of each parameter; SGD 2 to 3, Adam 4 to 5", {0, 1e3});
  knobs.loss_in_pipeline =
      reader.get("loss_in_pipeline", knobs.loss_in_pipeline,
                 "loss of each micro-batch in the last stage; false: once all outputs are gathered there, as upstream");
  return knobs;
}

Checkpoint checkpoint_of(const std::string& name) {
  if (name == "always") return Checkpoint::always;
  return name == "never" ? Checkpoint::never : Checkpoint::except_last;
}

/// Pieces of a step: `chunks`, or more where a micro-batch may not be that large; never more than samples.
int micro_batches_of(const TorchgpipeKnobs& knobs, const TrainingOptions& training) {
  const std::int64_t batch = training.global_batch;
  const std::int64_t wanted = training.micro_batch > 0 ? (batch + training.micro_batch - 1) / training.micro_batch : 1;
  return static_cast<int>(std::min(batch, std::max<std::int64_t>(knobs.chunks, wanted)));
}

/// The layers' costs for one micro-batch, in seconds where they were measured.
std::vector<LayerCost> costs_of(const EngineContext& context, const TorchgpipeKnobs& knobs) {
  const std::int64_t samples =
      cut_step(context.training.global_batch, micro_batches_of(knobs, context.training))[0].count;
  std::vector<LayerCost> costs =
      layer_costs(context.model.build(LayerFactory()), context.model.sample_input, context.training.dtype, samples);
  return knobs.profile.empty() ? costs : measured_costs(std::move(costs), knobs.profile, samples);
}

PartitionReport cut(const TorchgpipeKnobs& knobs, const std::vector<LayerCost>& costs, DType dtype, int stages) {
  PartitionReport report;
  report.criterion_name =
      knobs.balance_by == "size" ? "bytes" : (knobs.balance_by == "time" ? "seconds" : "operations");
  for (const LayerCost& cost : costs) {
    const double bytes = static_cast<double>(cost.saved_bytes) +
                         knobs.param_scale * static_cast<double>(cost.parameters * size_of(dtype));
    report.criterion.push_back(knobs.balance_by == "size" ? bytes : cost.time());
  }
  report.method = knobs.balance.empty() ? knobs.partition : "explicit";
  report.balance = !knobs.balance.empty()                ? knobs.balance
                   : knobs.partition == "blockpartition" ? block_partition(report.criterion, stages)
                                                         : minimax_balance(report.criterion, stages);
  return report;
}

class Torchgpipe final : public StepMethod {
 public:
  Torchgpipe(const EngineContext& context, const TorchgpipeKnobs& knobs)
      : context_(context),
        knobs_(knobs),
        costs_(costs_of(context, knobs)),
        report_(cut(knobs, costs_, context.training.dtype, context.world.size())),
        model_(context, pipeline_options()) {}

  StepOutcome train_step(const StepOrder& order, Observer& observer) override {
    return model_.train_step(order, observer);
  }
  void prepare() override { model_.prepare(); }
  EngineDescription describe() const override;
  Prediction predict() const override;
  HeldModel& model() override { return model_; }
  std::vector<StateTensor> state() override { return model_.state(); }
  void restored() override { model_.restored(); }

 private:
  int stages() const { return context_.world.size(); }
  int micro_batches() const { return micro_batches_of(knobs_, context_.training); }
  PipelineOptions pipeline_options() const {
    return {
        .balance = report_.balance,
        .stages = stages(),
        .micro_batches = micro_batches(),
        .gathered_loss = !knobs_.loss_in_pipeline,
        .schedule = [stages = stages(), mode = checkpoint_of(knobs_.checkpoint), gathered = !knobs_.loss_in_pipeline](
                        int micro_batches) { return fill_drain(stages, micro_batches, mode, gathered); },
        .grid = ProcessGrid({.pp = stages()}),
        .layer_seconds = knobs_.profile.empty() ? std::vector<LayerCost>() : costs_};
  }

  const EngineContext& context_;
  TorchgpipeKnobs knobs_;
  std::vector<LayerCost> costs_;
  PartitionReport report_;
  StagedModel model_;
};

EngineDescription Torchgpipe::describe() const {
  EngineDescription description;
  description.name = "torchgpipe";
  description.pp = stages();
  description.micro_batches = micro_batches();
  std::string balance;
  for (int count : report_.balance) balance += str(balance.empty() ? "" : ", ", count);
  description.knobs = {
      {"chunks", str(micro_batches())}, {"checkpoint", knobs_.checkpoint},
      {"balance", "[" + balance + "]"}, {"balance_by", knobs_.balance.empty() ? knobs_.balance_by : "explicit"},
      {"partition", report_.method},    {"loss_in_pipeline", knobs_.loss_in_pipeline ? "true" : "false"}};
  description.differences = {"micro-batches differ by at most one sample; losses are divided by the global count",
                             "parameters that two stages share have their gradients summed (upstream refuses them)"};
  if (knobs_.loss_in_pipeline) description.differences.push_back("the loss is computed inside the last stage");
  return description;
}

Prediction Torchgpipe::predict() const {
  Prediction prediction;
  prediction.memory = model_.predicted_memory();
  prediction.comm_per_step = model_.predicted_traffic();
  const Schedule schedule = model_.plan().training(micro_batches());
  const Timeline timeline = simulate(schedule, model_.plan().stage_costs(costs_));
  prediction.bubble_fraction = timeline.idle_fraction();

  prediction.tables = {explain_partition(report_, costs_, context_.training.dtype),
                       stage_memory_table(context_, model_.plan()),
                       schedule_picture(str(micro_batches(), " micro-batches, checkpoint ", knobs_.checkpoint,
                                            ": idle ", percent(timeline.idle_fraction()), ", recomputation ",
                                            percent(1.0 - timeline.idle_fraction() - timeline.useful_fraction())),
                                        schedule, timeline)};

  if (knobs_.chunks > micro_batches()) {
    prediction.warnings.push_back(str("a step has ", context_.training.global_batch, " samples, so it has ",
                                      micro_batches(), " micro-batches, not ", knobs_.chunks));
  }
  if (stages() > 1 && micro_batches() < stages()) {
    prediction.warnings.push_back(
        str(micro_batches(), " micro-batches for ", stages(), " stages: never more than ", micro_batches(),
            " of them work at a time; set engine.chunks to a few times the number of stages"));
  }
  return prediction;
}

/// Whether the engine can be built; what cannot be is noted in the reader.
bool check(const TorchgpipeKnobs& knobs, const EngineContext& context, const ConfigReader& reader) {
  bool is_fine = true;
  const auto problem = [&](const char* key, const std::string& message) {
    reader.problem(key, message);
    is_fine = false;
  };
  const int layers = static_cast<int>(context.model.build(LayerFactory()).size()) - 1, ranks = context.world.size();
  if (ranks > layers) {
    problem("name", str(ranks, " ranks are ", ranks, " stages, but ", context.model.name, " has only ", layers,
                        " layers to divide; start at most ", layers, " ranks"));
  } else if (!knobs.balance.empty()) {
    const std::string fault = balance_fault(knobs.balance, ranks, layers);
    if (!fault.empty()) problem("balance", fault);
  }
  if (!knobs.balance.empty() && reader.has("balance_by")) {
    problem("balance_by", "does not act beside an explicit balance; leave one of the two out");
  }
  const bool by_time = knobs.balance_by == "time";
  if (by_time && knobs.profile.empty()) {
    problem("profile", "missing: balance_by=time needs the file that `pdlbench profile` writes");
  }
  if (!by_time && !knobs.profile.empty()) {
    problem("profile", str("acts with balance_by=time only, this is ", knobs.balance_by));
  }
  if (knobs.balance_by != "size" && reader.has("param_scale")) {
    problem("param_scale", str("acts with balance_by=size only, this is ", knobs.balance_by));
  }
  return is_fine;
}

std::unique_ptr<Engine> make_torchgpipe(const EngineContext& context, const ConfigReader& reader) {
  const TorchgpipeKnobs knobs = read_knobs(reader);
  if (!check(knobs, context, reader)) return nullptr;
  return make_synchronous_engine(context, std::make_unique<Torchgpipe>(context, knobs));
}

}  // namespace

EngineDefinition torchgpipe_definition() {
  return {.name = "torchgpipe",
          .summary = "a pipeline of stages: all micro-batches forward, then all backward, then one update",
          .paper = "Huang et al., GPipe, NeurIPS 2019; Kim et al., torchgpipe, 2020",
          .reference = "serial",
          .make = make_torchgpipe,
          .document = [](const ConfigReader& reader) { read_knobs(reader); },
          .data_parallel_size = [](int, const ConfigReader&) { return 1; },
          .takes_data_store = false,
          .variants = {{"checkpoint always", {"chunks=4", "checkpoint=always"}},
                       {"checkpoint except_last", {"chunks=3", "checkpoint=except_last"}},
                       {"checkpoint never", {"chunks=8", "checkpoint=never"}},
                       {"gathered loss", {"chunks=4", "loss_in_pipeline=false"}},
                       {"by size", {"chunks=5", "balance_by=size", "partition=blockpartition"}}}};
}

}  // namespace pdl
