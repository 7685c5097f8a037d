#include "engine/record/pipeline_json.h"

#include <array>

namespace pdl {
namespace {

constexpr std::array<const char*, kScheduleParts> kPartNames = {"warm_up", "steady", "drain"};

/// Kinds of passes that there were none of are left out.
Json stage_passes(const StagePasses& passes) {
  Json json = Json::object();
  const auto add = [&json](const char* name, const PassTotal& total) {
    if (total.count > 0) json[name] = {{"count", total.count}, {"total_s", number(total.s)}};
  };
  add("forward", passes.forward);
  add("recompute", passes.recompute);
  add("backward", passes.backward);
  add("loss", passes.loss);
  return json;
}

StagePasses read_passes(const Fields& fields) {
  const auto total = [&fields](const char* name) {
    if (!fields.has(name)) return PassTotal();
    const Fields pass = fields.section(name);
    return PassTotal{pass.integer("count"), pass.real("total_s")};
  };
  return {total("forward"), total("recompute"), total("backward"), total("loss")};
}

Json rank_json(const PipelineRankRecord& rank) {
  Json wait = Json::object(), passes = Json::array();
  for (std::size_t part = 0; part < kPartNames.size(); ++part) wait[kPartNames[part]] = number(rank.wait_s[part]);
  for (const StagePasses& stage : rank.passes) passes.push_back(stage_passes(stage));
  return {{"rank", rank.rank},
          {"stage", rank.stage},
          {"replica", rank.replica},
          {"train_s", number(rank.train_s)},
          {"forward_s", number(rank.forward_s)},
          {"backward_s", number(rank.backward_s)},
          {"recompute_s", number(rank.recompute_s)},
          {"wait_s", wait},
          {"comm_s", {{"passes", number(rank.comm_passes_s)}, {"outside", number(rank.comm_s)}}},
          {"optimizer_s", number(rank.optimizer_s)},
          {"other_s", number(rank.other_s)},
          {"passes", passes}};
}

PipelineRankRecord read_rank(const Fields& fields) {
  PipelineRankRecord rank;
  rank.rank = fields.small_integer("rank");
  rank.stage = fields.small_integer("stage");
  rank.replica = fields.small_integer("replica");
  rank.train_s = fields.real("train_s");
  rank.forward_s = fields.real("forward_s");
  rank.backward_s = fields.real("backward_s");
  rank.recompute_s = fields.real("recompute_s");
  for (std::size_t part = 0; part < kPartNames.size(); ++part) {
    rank.wait_s[part] = fields.section("wait_s").real(kPartNames[part]);
  }
  rank.comm_passes_s = fields.section("comm_s").real("passes");
  rank.comm_s = fields.section("comm_s").real("outside");
  rank.optimizer_s = fields.real("optimizer_s");
  rank.other_s = fields.real("other_s");
  for (const Json& passes : fields.list("passes")) {
    rank.passes.push_back(read_passes(Fields(passes, "pipeline.ranks[].passes[]")));
  }
  return rank;
}

}  // namespace

Json pipeline_json(const PipelineRecord& record) {
  Json json = {{"idle_fraction", number(record.idle_fraction)}, {"useful_fraction", number(record.useful_fraction)}};
  if (record.closed_form_idle_fraction) {
    json["closed_form_idle_fraction"] = number(*record.closed_form_idle_fraction);
  }
  json["simulated"] = {{"idle_fraction", number(record.simulated_idle_fraction)},
                       {"useful_fraction", number(record.simulated_useful_fraction)},
                       {"train_s", number(record.simulated_s)}};
  if (record.planned_s) json["planned_s"] = number(*record.planned_s);
  json["ranks"] = Json::array();
  for (const PipelineRankRecord& rank : record.ranks) json["ranks"].push_back(rank_json(rank));
  return json;
}

PipelineRecord read_pipeline(const Fields& fields) {
  PipelineRecord record;
  record.idle_fraction = fields.real("idle_fraction");
  record.useful_fraction = fields.real("useful_fraction");
  record.closed_form_idle_fraction = fields.optional_real("closed_form_idle_fraction");
  const Fields simulated = fields.section("simulated");
  record.simulated_idle_fraction = simulated.real("idle_fraction");
  record.simulated_useful_fraction = simulated.real("useful_fraction");
  record.simulated_s = simulated.real("train_s");
  record.planned_s = fields.optional_real("planned_s");
  for (const Json& rank : fields.list("ranks")) record.ranks.push_back(read_rank(Fields(rank, "pipeline.ranks[]")));
  return record;
}

}  // namespace pdl
