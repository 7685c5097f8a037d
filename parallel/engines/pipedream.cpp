// pipedream: a pipeline that never stops. Stages update after each mini-batch, or round of mini-batches.
//
//   start: cut the layers into stages; stage s has r[s] ranks, its replicas, which take turns: mini-batch t is replica
//          t mod r[s]'s.  W[s] = (R - 1 - sum of r[i], i < s) / r[s]  for R ranks;  a ring of W[s] + 1 weight buffers
//   on every rank, over a whole epoch: its first W[s] forwards, then one forward, one backward in turn, in the end W[s]
//   backwards, where
//     forward(t):   receive the activation of t; compute with the newest weights and remember which; send the output on
//     backward(t):  receive the gradient of t; compute with the weights that forward(t) used; send the gradient back
//       and, as a round of the replicas' mini-batches is over:
//                   sum the gradients over the replicas; clip by the stage's own norm
//                   update: read the newest weights, write the next version into the ring
//   nothing waits for a step to end; at the end of an epoch all stages have made all their updates
//   drain=never: the first W[s] forwards of the next epoch read the ring's older versions, as if there had been no end:
//   mini-batch t of the whole training finds the weights after max(0, t / r[s] - W[s]) updates
//
// Papers: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019;
// "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021 (mode 2bw). Upstream: msr-fiddle/pipedream,
// runtime/{runtime,optimizer}.py of branches pipedream and pipedream_2bw.
//
// Same as upstream
//   - 1F1B-RR: the depths W[s], the turns of replicas, an update after each round, the pipeline drained at epochs' ends
//   - weight stashing: forward and backward of a mini-batch see one version; weight decay counts on the newest weights
//     and moments are one sequence
//   - the learning rate of a stage is lr * r[s] / r[0], as an update averages r[s] mini-batches
//   - mini-batches at the end of an epoch that do not fill a round of every stage are left out (and it is said)
// Differs from upstream
//   - versions lie in a ring and are never copied; upstream clones them, one more than are needed
//   - the learning rate follows from the update's number; upstream's last W[s] updates of an epoch keep the one before
//   - mini-batches go to replicas by their number on every stage; upstream pairs ranks of unequal stages otherwise,
//   with
//     the same sums
//   - a parameter that first and last stage share (GPT-2's embedding) has stage 0's version in both and stays one
//     parameter (pipeline/tied_exchange.h); upstream has no rule, its 2bw lets the copies drift apart
//   - mode vertical_sync is in the paper, not in the released code; lr_staleness and drain=never are nobody's but ours
//   - with drain=never mode none holds W[s] + 1 versions, to find the old ones after an epoch's end; else one
//   - no upstream macrobatch, where stages update at different rates and some backwards see other weights than their
//     forwards; no upstream recompute, which is read and never used
//   - training.optimizer.clip_grad_norm is a stage's: a norm over all stages would stop the pipeline
//   - one stage with replicas is data parallelism within the same code; upstream starts another program
//
// Knobs (upstream name = default)
//   replicas=[] balance=[] (upstream: a configuration file that its planner writes)
//   plan=straight  profile=""  bandwidth=1  network_bandwidth=1  ranks_per_node=0  memory_gib=0 (its planner's
//   arguments) own: mode=stash  batch_rule=match_update  lr_staleness=none  drain=epoch  micro_batches=0 (2bw, flush)

#include "parallel/engines/pipedream.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <optional>

#include "parallel/pipeline/async_pipeline.h"
#include "parallel/pipeline/pipeline_forecast.h"
#include "parallel/pipeline/schedule_timeline.h"
#include "parallel/pipeline/stage_tables.h"
#include "parallel/sync/startup.h"

namespace pdl {

namespace {

std::string decimals(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

/// Where layers go: what neither the user nor the planner has said is found here.
PartitionReport choose_layout(const PipedreamKnobs& knobs, const std::vector<LayerCost>& costs) {
  PartitionReport report{.balance = knobs.balance,
                         .criterion = {},
                         .criterion_name = knobs.profile.empty() ? "operations" : "seconds",
                         .method = knobs.is_planned() ? "planner" : "explicit"};
  for (const LayerCost& cost : costs) report.criterion.push_back(cost.time());
  if (!report.balance.empty()) return report;
  report.method = "minimax";
  report.balance = minimax_balance(report.criterion, knobs.stages());
  return report;
}

/// `before` as in AsyncOptions.
Schedule schedule_of(const PipedreamKnobs& knobs, int units, std::optional<std::int64_t> before) {
  const int batches = knobs.has_micro_batches() ? units / knobs.micro_batches : 0;
  if (knobs.mode == "2bw") return double_buffered(knobs.stages(), knobs.micro_batches, batches, before);
  if (knobs.mode == "flush") return flushed(knobs.stages(), knobs.micro_batches, batches);
  const Stashing stashing = knobs.mode == "stash"           ? Stashing::stash
                            : knobs.mode == "vertical_sync" ? Stashing::vertical_sync
                                                            : Stashing::none;
  return continuous(knobs.replicas, units, stashing, before);
}

/// Updates by which the weights of a round are behind when it is through, in the middle of an epoch.
int lag_of(const PipedreamKnobs& knobs, int stage) {
  if (knobs.has_micro_batches()) return knobs.mode == "2bw" ? 1 : 0;
  return warm_up_depth(knobs.replicas, knobs.mode == "vertical_sync" ? 0 : stage);
}

AsyncOptions async_options(const PipedreamKnobs& knobs, const Balance& balance) {
  AsyncOptions options{
      .balance = balance,
      .replicas = knobs.replicas,
      .units_per_step = knobs.units_per_step(),
      .units_per_update = knobs.has_micro_batches() ? knobs.micro_batches : 0,
      .schedule = [knobs](int units, std::optional<std::int64_t> before) { return schedule_of(knobs, units, before); },
      .lr_factors = {},
      .keeps_lags = knobs.keeps_lags()};
  int longest = 1;  // units that a stage needs to show its whole pattern: filled, steady for a while, drained
  for (int stage = 0; stage < knobs.stages(); ++stage) {
    longest = std::max(longest, 2 * (warm_up_depth(knobs.replicas, stage) + 1) * options.round(stage) + 2);
    const double factor = knobs.lr_staleness == "inverse" ? 1.0 / (1 + lag_of(knobs, stage)) : 1.0;
    options.lr_factors.push_back(static_cast<double>(knobs.replicas[static_cast<std::size_t>(stage)]) /
                                 knobs.replicas[0] * factor);
  }
  const int multiple = options.multiple();
  options.scheduled = std::max(2, (longest + multiple - 1) / multiple) * multiple;
  return options;
}

class Pipedream final : public Engine {
 public:
  Pipedream(const EngineContext& context, const PipedreamKnobs& knobs)
      : context_(context),
        knobs_(knobs),
        costs_(planner_input(context, knobs).costs),
        report_(choose_layout(knobs, costs_)),
        options_(async_options(knobs, report_.balance)),
        pipeline_(context, options_) {}

  EngineDescription describe() const override;
  Prediction predict() const override;
  void prepare() override { pipeline_.prepare(); }
  PassResult run_epoch(const EpochPlan& plan, Observer& observer) override {
    return pipeline_.run_epoch(plan, observer);
  }
  PassResult evaluate(const EpochPlan& plan) override { return pipeline_.evaluate(plan); }
  void explain_pipeline(const EpochPlan& plan, PipelineRecord& record) override;
  void visit_parameters(const ParameterVisitor& visit) override { pipeline_.visit_parameters(visit); }
  std::vector<StateTensor> state() override { return pipeline_.state(); }
  TrainingPosition position() const override { return pipeline_.position(); }
  void set_position(const TrainingPosition& position) override { pipeline_.set_position(position); }

 private:
  int replicas(int stage) const { return knobs_.replicas[static_cast<std::size_t>(stage)]; }
  std::vector<std::string> warnings() const;
  PlanTable version_table(const Schedule& schedule) const;
  PlanTable memory_table() const;

  const EngineContext& context_;
  PipedreamKnobs knobs_;
  std::vector<LayerCost> costs_;
  PartitionReport report_;
  AsyncOptions options_;
  AsyncPipeline pipeline_;
};

EngineDescription Pipedream::describe() const {
  EngineDescription description;
  description.name = "pipedream";
  description.pp = knobs_.stages();
  const bool even = std::all_of(knobs_.replicas.begin(), knobs_.replicas.end(),
                                [this](int count) { return count == knobs_.replicas[0]; });
  description.dp = even ? knobs_.replicas[0] : 1;
  description.micro_batches = knobs_.units_per_step();
  description.knobs = {{"mode", knobs_.mode},
                       {"replicas", list_text(knobs_.replicas)},
                       {"balance", list_text(report_.balance)},
                       {"batch_rule", knobs_.batch_rule},
                       {"lr_staleness", knobs_.lr_staleness},
                       {"drain", knobs_.drain},
                       {"micro_batches", str(knobs_.micro_batches)},
                       {"plan", knobs_.plan}};
  description.differences = {"one weight version less than upstream is held, and none is ever copied",
                             "clip_grad_norm limits the norm of each stage, not that of the model"};
  if (knobs_.keeps_lags()) {
    description.differences.push_back(
        "lags go on over the ends of epochs (drain=never), where upstream's PipeDream begins them anew; the pipeline "
        "still runs empty before each validation, so its bubble stays");
  }
  if (knobs_.mode == "published") {
    description.differences.push_back(
        "confounds of the published study's code: stashing without effect (forward and backward of a mini-batch see "
        "different weights) and plain SGD");
  }
  return description;
}

/// What each stage's weights are like while mini-batches are under way.
PlanTable Pipedream::version_table(const Schedule& schedule) const {
  PlanTable table{.title = "weights of each stage: how many updates behind, how many versions, updated how often",
                  .columns = {"stage", "ranks", "behind", "versions", "in flight", "samples of an update",
                              "updates per step", "lr times"},
                  .rows = {}};
  const std::int64_t unit = cut_step(context_.training.global_batch, knobs_.units_per_step())[0].count;
  for (int stage = 0; stage < knobs_.stages(); ++stage) {
    const auto rank = static_cast<std::size_t>(pipeline_.plan().first_rank_of(stage));
    table.rows.push_back({str(stage), str(replicas(stage)), str(lag_of(knobs_, stage)),
                          str(schedule.ranks[rank].versions), str(schedule.ranks[rank].in_flight),
                          str(unit * options_.round(stage)),
                          decimals(static_cast<double>(knobs_.units_per_step()) / options_.round(stage)),
                          decimals(options_.lr_factors[static_cast<std::size_t>(stage)])});
  }
  return table;
}

/// Every stage's memory, by the formulas that a rank's own prediction uses.
PlanTable Pipedream::memory_table() const {
  PlanTable table{.title = "memory of a rank of each stage at its peak, MiB",
                  .columns = {"stage", "parameters", "weight_versions", "gradients", "optimizer", "activations"},
                  .rows = {}};
  for (int stage = 0; stage < knobs_.stages(); ++stage) {
    const int rank = pipeline_.plan().first_rank_of(stage);
    const std::vector<std::unique_ptr<StagePart>> parts = pipeline_.plan().make_parts(rank);
    const RoundUpdate update(context_, pipeline_.plan(), *parts[0], rank,
                             options_.version_needs(pipeline_.plan(), rank));
    const MemoryByKind passes = pipeline_.plan().predicted_memory(rank), versions = update.predicted_memory(),
                       store = parts[0]->store.predicted_memory(context_.training.dtype);
    std::vector<std::string> row = {str(stage)};
    for (const MemoryKind kind : {MemoryKind::parameters, MemoryKind::weight_versions, MemoryKind::gradients,
                                  MemoryKind::optimizer, MemoryKind::activations}) {
      row.push_back(mebibytes(passes[kind] + versions[kind] + store[kind]));
    }
    table.rows.push_back(std::move(row));
  }
  return table;
}

std::vector<std::string> Pipedream::warnings() const {
  std::vector<std::string> warnings;
  const int multiple = options_.multiple();
  if (context_.train_samples > 0) {
    const EpochPlan plan(context_.train_samples, context_.training.global_batch, 0, 0, false,
                         context_.training.drop_last, context_.max_steps_per_epoch);
    const UnitPlan all(plan, knobs_.units_per_step(), 1), whole(plan, knobs_.units_per_step(), multiple);
    if (whole.units() < all.units()) {
      warnings.push_back(str("an epoch has ", all.units(), " mini-batches or micro-batches; the last ",
                             all.units() - whole.units(), " (", all.samples(whole.units(), all.units()),
                             " samples) are left out, as ", multiple, " make whole updates on every stage"));
    }
  }
  if (knobs_.mode == "flush" && knobs_.micro_batches < knobs_.stages()) {
    warnings.push_back(str(knobs_.micro_batches, " micro-batches for ", knobs_.stages(), " stages: never more than ",
                           knobs_.micro_batches,
                           " of them work at a time; set engine.micro_batches to a few times the number of stages"));
  }
  if (context_.training.optimizer.clip_grad_norm > 0.0 && knobs_.stages() > 1) {
    warnings.push_back(
        "clip_grad_norm limits the gradient of each stage by its own norm: results differ from those of "
        "engines that limit the norm of the whole model");
  }
  return warnings;
}

Prediction Pipedream::predict() const {
  Prediction prediction;
  prediction.memory = pipeline_.predicted_memory();
  prediction.comm_per_step = pipeline_.predicted_traffic();
  // An epoch waits for its pipeline to fill and to drain; a long one is hardly different from one of so many units.
  constexpr int kMostUnits = 240;
  int units = kMostUnits;
  if (context_.train_samples > 0) {
    const EpochPlan plan(context_.train_samples, context_.training.global_batch, 0, 0, false,
                         context_.training.drop_last, context_.max_steps_per_epoch);
    units = std::min(units, UnitPlan(plan, knobs_.units_per_step(), options_.multiple()).units());
  }
  units = std::max(1, units / options_.multiple()) * options_.multiple();
  const std::vector<StageCost> stage_costs = pipeline_.plan().stage_costs(costs_);
  const Timeline epoch = simulate(options_.schedule(units, options_.start()), stage_costs);
  prediction.bubble_fraction = epoch.idle_fraction();

  const Schedule shown = options_.shown();
  if (knobs_.is_planned()) {
    const PlannerInput input = planner_input(context_, knobs_);
    prediction.tables = explain_plan(costs_, input.options, *plan_stages(costs_, input.options));
  } else {
    prediction.tables = {explain_partition(report_, costs_, context_.training.dtype)};
  }
  prediction.tables.push_back(version_table(shown));
  prediction.tables.push_back(memory_table());
  prediction.tables.push_back(
      schedule_picture(str("the first ", options_.scheduled, " of an epoch's passes, mode ", knobs_.mode,
                           "; idle over ", units, ": ", percent(epoch.idle_fraction())),
                       shown, simulate(shown, stage_costs)));
  prediction.warnings = warnings();
  return prediction;
}

void Pipedream::explain_pipeline(const EpochPlan& plan, PipelineRecord& record) {
  const int units = UnitPlan(plan, knobs_.units_per_step(), options_.multiple()).units();
  if (units == 0) return;
  const int fills = knobs_.mode == "flush" ? units / knobs_.micro_batches : 1;
  forecast_epoch(pipeline_.plan(), {{.schedule = pipeline_.plan().training(units), .fills = fills}},
                 knobs_.profile.empty() ? std::vector<LayerCost>() : costs_, record);
}

std::unique_ptr<Engine> make_pipedream(const EngineContext& context, const ConfigReader& reader) {
  PipedreamKnobs knobs = read_pipedream_knobs(reader);
  if (!complete_knobs(context, reader, knobs)) return nullptr;
  return std::make_unique<Pipedream>(context, knobs);
}

}  // namespace

EngineDefinition pipedream_definition() {
  return {.name = "pipedream",
          .summary = "a pipeline that never stops: each stage updates after every mini-batch, with stashed weights",
          .paper = "Narayanan et al., PipeDream, SOSP 2019; PipeDream-2BW, ICML 2021",
          .reference = "pipedream-recurrence",
          .make = make_pipedream,
          .document = [](const ConfigReader& reader) { read_pipedream_knobs(reader); },
          .data_parallel_size =
              [](int ranks, const ConfigReader& reader) {
                return read_pipedream_knobs(reader).batch_rule == "match_injection" ? ranks : 1;
              },
          .takes_data_store = false,
          .synchronous = false,
          .variants = {{"match_injection", {"batch_rule=match_injection", "lr_staleness=inverse"}},
                       {"no stash", {"mode=none"}},
                       {"vertical sync", {"mode=vertical_sync"}},
                       {"2bw", {"mode=2bw", "micro_batches=4"}},
                       {"flush", {"mode=flush", "micro_batches=4"}}}};
}

}  // namespace pdl
