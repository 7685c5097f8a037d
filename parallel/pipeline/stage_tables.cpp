#include "parallel/pipeline/stage_tables.h"

#include <cstdio>

#include "engine/optim/optimizer.h"
#include "parallel/sync/startup.h"

namespace pdl {

std::string percent(double fraction) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %%", 100.0 * fraction);
  return text;
}

PlanTable stage_memory_table(const EngineContext& context, const PipelinePlan& plan, int optimizer_parts) {
  PlanTable table{.title = "memory of each stage at its peak, MiB",
                  .columns = {"stage", "parameters", "gradients", "optimizer", "activations", "communication",
                              "workspace", "sent in a step"},
                  .rows = {}};
  const DType dtype = context.training.dtype;
  for (int stage = 0; stage < plan.options().stages; ++stage) {
    MemoryByKind memory = plan.predicted_memory(stage);
    for (const std::unique_ptr<StagePart>& part : plan.make_parts(stage)) {
      const MemoryByKind store = part->store.predicted_memory(dtype);
      for (MemoryKind kind : {MemoryKind::parameters, MemoryKind::gradients}) memory[kind] += store[kind];
      memory[MemoryKind::optimizer] +=
          store[MemoryKind::optimizer] / optimizer_parts +
          optimizer_bytes(context.training.optimizer, part->store.elements() / optimizer_parts, dtype,
                          static_cast<std::int64_t>(part->store.params().size()));
    }
    std::vector<std::string> row = {str(stage)};
    for (MemoryKind kind : {MemoryKind::parameters, MemoryKind::gradients, MemoryKind::optimizer,
                            MemoryKind::activations, MemoryKind::communication, MemoryKind::workspace}) {
      row.push_back(mebibytes(memory[kind]));
    }
    const CommCounts messages = plan.predicted_messages(stage);
    row.push_back(mebibytes(messages.contains("pp.send") ? messages.at("pp.send").bytes : 0));
    table.rows.push_back(std::move(row));
  }
  return table;
}

PlanTable schedule_picture(const std::string& title, const Schedule& schedule, const Timeline& timeline) {
  PlanTable picture{
      .title = title, .columns = {"stage", "F forward, R forward again, B backward, . waiting"}, .rows = {}};
  const std::vector<std::string> lines = draw(schedule, timeline);
  for (std::size_t rank = 0; rank < lines.size(); ++rank) {
    const RankSchedule& here = schedule.ranks[rank];
    const bool has_replicas = schedule.replicas[static_cast<std::size_t>(here.stage)] > 1;
    picture.rows.push_back({has_replicas ? str(here.stage, ".", here.replica) : str(here.stage), lines[rank]});
  }
  return picture;
}

PlanTable traffic_table(const CommCounts& counts) {
  PlanTable table{
      .title = "what this rank sends in a step", .columns = {"axis", "operation", "calls", "MiB"}, .rows = {}};
  for (const auto& [key, count] : counts) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3f", static_cast<double>(count.bytes) / (1024.0 * 1024.0));
    const std::size_t dot = key.find('.');
    table.rows.push_back({key.substr(0, dot), key.substr(dot + 1), str(count.calls), text});
  }
  return table;
}

}  // namespace pdl
