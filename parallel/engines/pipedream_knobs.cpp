// The knobs of the pipedream engine: reading, completing by a plan, checking.

#include <algorithm>
#include <numeric>

#include "parallel/engines/pipedream.h"
#include "parallel/pipeline/layer_profile.h"
#include "parallel/pipeline/stage_feeder.h"

namespace pdl {
namespace {

/// The knobs that decide where layers go without saying so.
void read_planner_knobs(const ConfigReader& reader, PipedreamKnobs& knobs) {
  knobs.plan = reader.choice("plan", knobs.plan, {"straight", "replicated", "upstream"},
                             "who decides replicas and balance where they are empty. straight: one rank a stage, "
                             "balanced; replicated: the planner, so that the slowest stage is fastest; upstream: the "
                             "planner, by upstream's costs");
  knobs.profile = reader.get<std::string>("profile", "", "file of `pdlbench profile`; plan=straight: \"\": operations");
  knobs.bandwidth = reader.get("bandwidth", knobs.bandwidth, "planner: GB/s of a rank within a node", {1e-6, 1e6});
  knobs.network_bandwidth =
      reader.get("network_bandwidth", knobs.network_bandwidth, "planner: GB/s of a rank between nodes", {1e-6, 1e6});
  knobs.ranks_per_node = reader.get("ranks_per_node", 0, "planner: ranks of a node; 0: all on one", {0, 1 << 20});
  knobs.memory_gib = reader.get("memory_gib", 0.0, "planner: memory that a rank may take, GiB; 0: any", {0, 1e6});
}

}  // namespace

PipedreamKnobs read_pipedream_knobs(const ConfigReader& reader) {
  PipedreamKnobs knobs;
  knobs.mode = reader.choice(
      "mode", knobs.mode, {"stash", "none", "published", "vertical_sync", "2bw", "flush"},
      "which weights a mini-batch finds. stash: those of its forward again in its backward; none: the newest each "
      "time; "
      "published: none with plain SGD, what the code of the published study amounts to; vertical_sync: stage 0's on "
      "every stage; 2bw: those one update back, of mini-batches in micro-batches; flush: the newest, after a flush");
  for (const std::int64_t count :
       reader.get_list("replicas", {}, "ranks of each stage; empty: as plan says", {1, 1 << 20})) {
    knobs.replicas.push_back(static_cast<int>(count));
  }
  for (const std::int64_t count :
       reader.get_list("balance", {}, "layers of each stage; empty: as plan says", {1, 1 << 20})) {
    knobs.balance.push_back(static_cast<int>(count));
  }
  knobs.batch_rule = reader.choice("batch_rule", knobs.batch_rule, {"match_update", "match_injection"},
                                   "samples of a mini-batch. match_update: training.global_batch_size, so that a stage "
                                   "without replicas updates as often as other engines; match_injection: the part that "
                                   "one of as many data-parallel ranks would have, as upstream");
  knobs.lr_staleness = reader.choice("lr_staleness", knobs.lr_staleness, {"none", "inverse"},
                                     "inverse: learning rate of a stage divided by 1 + the updates it is behind");
  knobs.drain = reader.choice(
      "drain", knobs.drain, {"epoch", "never"},
      "what becomes of lags at the end of an epoch. epoch: they begin anew, the next epoch's first mini-batches find "
      "the newest weights; never: they go on, these find what a pipeline that never runs empty would give them. It is "
      "run empty before each validation either way: never keeps the lags and saves no time");
  knobs.micro_batches =
      reader.get("micro_batches", 0,
                 "mode 2bw, flush: micro-batches of a mini-batch; 0: as many as stages, or more where "
                 "training.micro_batch_size asks for smaller ones",
                 {0, 1 << 20});
  read_planner_knobs(reader, knobs);
  return knobs;
}

int PipedreamKnobs::ranks() const { return std::accumulate(replicas.begin(), replicas.end(), 0); }

bool PipedreamKnobs::replicated() const {
  return std::any_of(replicas.begin(), replicas.end(), [](int count) { return count > 1; });
}

std::string list_text(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) text += str(text.empty() ? "" : ", ", number);
  return "[" + text + "]";
}

PlannerInput planner_input(const EngineContext& context, const PipedreamKnobs& knobs) {
  const TrainingOptions& training = context.training;
  // Before a plan there are no replicas to count.
  const int units =
      knobs.replicas.empty() && knobs.batch_rule == "match_injection" ? context.world.size() : knobs.units_per_step();
  const std::int64_t samples = cut_step(training.global_batch, units)[0].count;
  PlannerInput input{
      layer_costs(context.model.build(LayerFactory()), context.model.sample_input, training.dtype, samples), {}};
  if (!knobs.profile.empty()) input.costs = measured_costs(std::move(input.costs), knobs.profile, samples);
  const bool is_sgd = training.optimizer.name == "sgd";
  const int moments = is_sgd ? (training.optimizer.momentum > 0.0 ? 1 : 0) : 2;
  const std::int64_t wide = size_of(wide_dtype(training.dtype)), narrow = size_of(training.dtype);
  input.options = {.ranks = context.world.size(),
                   .ranks_per_node = knobs.ranks_per_node,
                   .node_bandwidth = knobs.bandwidth * 1e9,
                   .network_bandwidth = knobs.network_bandwidth * 1e9,
                   .cost = knobs.plan == "upstream" ? PlanCost::upstream : PlanCost::sum,
                   .straight = knobs.has_micro_batches() || knobs.mode == "vertical_sync",  // no replicas there
                   .memory_limit = static_cast<std::int64_t>(knobs.memory_gib * 1024.0 * 1024.0 * 1024.0),
                   .version_bytes = narrow,
                   .state_bytes = wide * (1 + moments) + (wide > narrow ? wide : 0)};
  return input;
}

namespace {

/// Sets replicas and balance by the planner. Problems are noted in the reader; false when there are any.
bool plan_layout(const EngineContext& context, const ConfigReader& reader, PipedreamKnobs& knobs) {
  const auto problem = [&](const char* key, const std::string& message) {
    reader.problem(key, message);
    return false;
  };
  if (!knobs.is_planned()) {
    for (const char* key : {"bandwidth", "network_bandwidth", "ranks_per_node", "memory_gib"}) {
      if (reader.has(key)) return problem(key, "acts with plan=replicated and plan=upstream only, this is straight");
    }
    return true;
  }
  for (const char* key : {"replicas", "balance"}) {
    if (reader.has(key)) return problem(key, str("does not act with plan=", knobs.plan, "; leave one of the two out"));
  }
  if (knobs.profile.empty()) {
    return problem("profile", str("missing: plan=", knobs.plan,
                                  " weighs times against bytes and needs the file that "
                                  "`pdlbench profile` writes"));
  }
  const int ranks = context.world.size(), node = knobs.ranks_per_node;
  if (knobs.plan == "upstream" && node > 0 && node < ranks && ranks % node != 0) {
    return problem("ranks_per_node", str(node, " does not divide ", ranks,
                                         " ranks, as plan=upstream needs; give a "
                                         "divisor, or take plan=replicated"));
  }
  const PlannerInput input = planner_input(context, knobs);
  const std::optional<StagePlan> plan = plan_stages(input.costs, input.options);
  if (!plan) {
    return problem(knobs.memory_gib > 0.0 ? "memory_gib" : "plan",
                   str("no plan of ", input.costs.size(), " layers for ", ranks, " ranks exists",
                       knobs.memory_gib > 0.0 ? "; give more memory, smaller batches or more ranks" : ""));
  }
  knobs.replicas = plan->replicas();
  knobs.balance = plan->balance();
  return true;
}

/// Problems of the layout and of the recipe are noted in the reader, each under its key.
class KnobCheck {
 public:
  KnobCheck(const EngineContext& context, const ConfigReader& reader) : context_(context), reader_(reader) {}

  bool is_fine(const PipedreamKnobs& knobs) {
    layout(knobs);
    mode(knobs);
    return fine_;
  }

 private:
  void problem(const char* key, const std::string& message) {
    reader_.problem(key, message);
    fine_ = false;
  }

  void layout(const PipedreamKnobs& knobs) {
    const int layers = static_cast<int>(context_.model.build(LayerFactory()).size()) - 1;
    const int ranks = context_.world.size(), stages = knobs.stages();
    if (knobs.ranks() != ranks) {
      problem("replicas", str(list_text(knobs.replicas), " add up to ", knobs.ranks(), " ranks, but there are ", ranks,
                              "; start ", knobs.ranks(), ", or give replicas that add up to ", ranks));
    }
    if (stages > layers) {
      problem("replicas",
              str(stages, " stages, but ", context_.model.name, " has only ", layers,
                  " layers to divide; give at most ", layers, " stages, with replicas for the other ranks"));
    } else if (!knobs.balance.empty()) {
      const std::string fault = balance_fault(knobs.balance, stages, layers);
      if (!fault.empty()) problem("balance", fault);
    } else if (knobs.replicated() && stages > 1) {
      problem("balance", str("missing: with replicas ", list_text(knobs.replicas), " say how many of the ", layers,
                             " layers each stage has, or leave both to plan=replicated"));
    }
  }

  void mode(const PipedreamKnobs& knobs) {
    const TrainingOptions& training = context_.training;
    if (knobs.replicated() && (knobs.has_micro_batches() || knobs.mode == "vertical_sync")) {
      problem("mode", str(knobs.mode, " is for stages of one rank each; with replicas there are stash and none"));
    }
    if (knobs.has_micro_batches() && knobs.micro_batches > training.global_batch) {
      problem("micro_batches", str(knobs.micro_batches, " micro-batches of ", training.global_batch,
                                   " samples; give at most ", training.global_batch));
    }
    if (knobs.has_micro_batches() && reader_.has("batch_rule")) {
      problem("batch_rule", str("does not act in mode ", knobs.mode, ", where every engine's update has ",
                                training.global_batch, " samples"));
    }
    if (knobs.mode == "2bw" && knobs.micro_batches + 1 < knobs.stages()) {
      problem("micro_batches",
              str("2bw on ", knobs.stages(), " stages needs at least ", knobs.stages() - 1, " micro-batches, this is ",
                  knobs.micro_batches, ": the weights of a mini-batch would not exist yet when it comes"));
    }
    if (knobs.mode == "flush" && knobs.keeps_lags()) {
      problem("drain",
              "never keeps lags over the end of an epoch, but mode flush has none; leave drain out, or take mode 2bw");
    }
    if (!knobs.has_micro_batches() && (knobs.micro_batches > 0 || training.micro_batch > 0)) {
      problem(knobs.micro_batches > 0 ? "micro_batches" : "mode",
              str("mode ", knobs.mode,
                  " sends mini-batches through whole: leave micro_batches and "
                  "training.micro_batch_size out, or take mode 2bw or flush"));
    }
    if (training.loss_scale.name != "none") {
      problem("name",
              "stages do not wait for each other, so they cannot skip a step together; set "
              "training.loss_scale to none, in bf16 or fp32");
    }
    const OptimizerOptions& optimizer = training.optimizer;
    const bool is_plain = optimizer.name == "sgd" && optimizer.momentum == 0.0 && optimizer.weight_decay == 0.0;
    if (knobs.mode == "published" && !is_plain) {
      problem("mode",
              "published includes plain SGD: set training.optimizer to sgd without momentum and weight_decay, "
              "or take mode none");
    }
  }

  const EngineContext& context_;
  const ConfigReader& reader_;
  bool fine_ = true;
};

}  // namespace

bool complete_knobs(const EngineContext& context, const ConfigReader& reader, PipedreamKnobs& knobs) {
  if (knobs.has_micro_batches() && knobs.micro_batches == 0) {
    const std::int64_t batch = context.training.global_batch, piece = context.training.micro_batch;
    const int stages = knobs.replicas.empty() ? context.world.size() : knobs.stages();
    const std::int64_t wanted = piece > 0 ? (batch + piece - 1) / piece : stages;
    knobs.micro_batches = static_cast<int>(std::min(batch, std::max<std::int64_t>(wanted, stages)));
  }
  if (!plan_layout(context, reader, knobs)) return false;
  if (knobs.replicas.empty()) knobs.replicas.assign(static_cast<std::size_t>(context.world.size()), 1);
  return KnobCheck(context, reader).is_fine(knobs);
}

}  // namespace pdl
