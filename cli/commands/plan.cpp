// pdlbench plan: what an engine would do, before anything is launched.

#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/commands/commands.h"
#include "cli/experiment.h"
#include "cli/table.h"

namespace pdl {
namespace {

/// What the data store brings to a rank in one step, on average over epochs: all but the samples that it keeps itself.
struct DataStoreTraffic {
  DataStoreTraffic(const Experiment& experiment, const EngineDescription& description, int ranks)
      : sample_bytes(experiment.model.sample_input.bytes() + experiment.model.sample_target.bytes()),
        received_bytes(experiment.config.training.global_batch / description.dp * sample_bytes * (ranks - 1) / ranks) {}
  std::int64_t sample_bytes, received_bytes;
};

void print_plan(const Experiment& experiment, const Prediction& prediction, int ranks) {
  const EngineDescription description = experiment.engine->describe();
  const TrainingOptions& training = experiment.config.training;
  const LayerList layers = experiment.model.build(LayerFactory());
  std::printf("%s on %d rank%s: %s, %lld parameters, %s\n", description.name.c_str(), ranks, ranks == 1 ? "" : "s",
              experiment.model.name.c_str(), static_cast<long long>(parameter_count(layers)),
              std::string(name_of(training.dtype)).c_str());
  std::printf("grid: dp %d, tp %d, pp %d; global batch %lld, %lld micro-batch%s per rank and step\n\n", description.dp,
              description.tp, description.pp, static_cast<long long>(training.global_batch),
              static_cast<long long>(description.micro_batches), description.micro_batches == 1 ? "" : "es");
  for (const PlanTable& table : prediction.tables) {
    std::printf("%s\n%s\n", table.title.c_str(), format_table(table.columns, table.rows).c_str());
  }
  std::vector<std::vector<std::string>> rows;
  for (const auto& [operation, count] : prediction.comm_per_step) {
    rows.push_back({operation, str(count.calls), str(count.bytes), format_bytes(count.bytes)});
  }
  if (rows.empty()) rows.push_back({"none", "0", "0", format_bytes(0)});
  std::printf("sent by one rank in one step\n%s\n", format_table({"operation", "calls", "bytes", ""}, rows).c_str());
  if (experiment.config.data_store.enabled) {
    const DataStoreTraffic traffic(experiment, description, ranks);
    std::printf("data store: a rank keeps 1/%d of the samples (%s each) and receives about %s a step\n\n", ranks,
                format_bytes(traffic.sample_bytes).c_str(), format_bytes(traffic.received_bytes).c_str());
  }
  std::printf("memory of one rank at its peak\n%s", memory_table(prediction.memory, nullptr).c_str());
  if (prediction.bubble_fraction > 0.0) std::printf("\npipeline bubble: %.1f %%\n", 100.0 * prediction.bubble_fraction);
  for (const std::string& warning : prediction.warnings) std::printf("\nwarning: %s\n", warning.c_str());
}

nlohmann::ordered_json to_json(const Experiment& experiment, const Prediction& prediction, int ranks) {
  const EngineDescription description = experiment.engine->describe();
  nlohmann::ordered_json json;
  json["engine"] = description.name;
  json["model"] = experiment.model.name;
  json["ranks"] = ranks;
  json["dp"] = description.dp;
  json["tp"] = description.tp;
  json["pp"] = description.pp;
  json["parameters"] = parameter_count(experiment.model.build(LayerFactory()));
  json["global_batch_size"] = experiment.config.training.global_batch;
  json["micro_batches"] = description.micro_batches;
  for (int kind = 0; kind < kMemoryKinds; ++kind) {
    json["memory_predicted_bytes"][std::string(kMemoryKindNames[static_cast<std::size_t>(kind)])] =
        prediction.memory[static_cast<MemoryKind>(kind)];
  }
  json["memory_predicted_bytes"]["total"] = prediction.memory.total();
  json["comm_per_step"] = nlohmann::ordered_json::object();
  for (const auto& [operation, count] : prediction.comm_per_step) {
    json["comm_per_step"][operation] = {{"calls", count.calls}, {"bytes", count.bytes}};
  }
  if (experiment.config.data_store.enabled) {
    const DataStoreTraffic traffic(experiment, description, ranks);
    json["data_store"] = {{"sample_bytes", traffic.sample_bytes}, {"received_bytes_per_step", traffic.received_bytes}};
  }
  json["bubble_fraction"] = prediction.bubble_fraction;
  json["tables"] = nlohmann::ordered_json::array();
  for (const PlanTable& table : prediction.tables) {
    json["tables"].push_back({{"title", table.title}, {"columns", table.columns}, {"rows", table.rows}});
  }
  json["warnings"] = prediction.warnings;
  return json;
}

}  // namespace

int plan_command(const Args& args) {
  const std::unique_ptr<Experiment> experiment = make_planned_experiment(args.ranks, args.config, args.overrides);
  const Prediction prediction = experiment->engine->predict();
  if (args.json) {
    std::printf("%s\n", to_json(*experiment, prediction, args.ranks).dump(2).c_str());
  } else {
    print_plan(*experiment, prediction, args.ranks);
  }
  return 0;
}

}  // namespace pdl
