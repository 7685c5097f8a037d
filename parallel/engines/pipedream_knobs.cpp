// How the pipedream engine and its planner meet: knobs, the layers' costs, and what the planner's answer sets.

#include "parallel/engines/pipedream.h"
#include "parallel/pipeline/layer_profile.h"

namespace pdl {

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
  const std::optional<PipedreamPlan> plan = plan_pipedream(input.costs, input.options);
  if (!plan) {
    return problem(knobs.memory_gib > 0.0 ? "memory_gib" : "plan",
                   str("no plan of ", input.costs.size(), " layers for ", ranks, " ranks exists",
                       knobs.memory_gib > 0.0 ? "; give more memory, smaller batches or more ranks" : ""));
  }
  knobs.replicas = plan->replicas();
  knobs.balance = plan->balance();
  return true;
}

}  // namespace pdl
