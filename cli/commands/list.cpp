// pdlbench list: what can be put into a configuration.

#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/commands/commands.h"
#include "cli/config.h"
#include "cli/table.h"
#include "parallel/engine.h"
#include "workloads/datasets.h"
#include "workloads/models.h"

namespace pdl {
namespace {

using Json = nlohmann::ordered_json;

/// The knobs that an engine reads from its block, with their defaults; those of a block inside it as "block.knob".
std::vector<KeyDoc> knobs_of(const EngineDefinition& definition) {
  const ConfigDocument document = ConfigDocument::parse("{}", "list");
  const ConfigReader reader = document.root().section("engine", "");
  definition.document(reader);
  std::vector<KeyDoc> knobs;
  for (const KeyDoc& knob : reader.docs()) {
    if (knob.type != "section") {
      knobs.push_back(knob);
      continue;
    }
    for (KeyDoc inner : reader.section(knob.key, knob.doc).docs()) {
      inner.key = knob.key + "." + inner.key;
      knobs.push_back(std::move(inner));
    }
  }
  return knobs;
}

std::string joined(const std::vector<std::string>& knobs) {
  std::string text;
  for (const std::string& knob : knobs) text += (text.empty() ? "" : " ") + knob;
  return text;
}

void print_engines() {
  std::printf("engines (\"engine\": { \"name\": ... })\n");
  for (const EngineDefinition& definition : engine_definitions()) {
    std::printf("\n  %s: %s\n", definition.name.c_str(), definition.summary.c_str());
    if (!definition.paper.empty()) std::printf("    after %s\n", definition.paper.c_str());
    std::vector<std::vector<std::string>> rows;
    for (const KeyDoc& knob : knobs_of(definition))
      rows.push_back({"  " + knob.key, knob.type, knob.default_value, knob.doc});
    if (!rows.empty()) std::printf("%s", format_table({"  knob", "type", "default", ""}, rows).c_str());
    rows.clear();
    for (const EngineVariant& variant : definition.variants)
      rows.push_back({"  " + variant.name, joined(variant.knobs)});
    if (!rows.empty()) std::printf("%s", format_table({"  variant", "knobs"}, rows).c_str());
  }
}

void print_workloads() {
  std::vector<std::vector<std::string>> rows;
  for (const ModelInfo& info : model_infos()) rows.push_back({info.name, str(info.parameters), info.summary});
  std::printf("models (\"workload\": { \"model\": ... })\n%s", format_table({"name", "parameters", ""}, rows).c_str());
}

void print_datasets() {
  std::vector<std::vector<std::string>> rows;
  for (const DatasetDoc& set : dataset_docs()) rows.push_back({set.name, set.kind, set.source, set.summary});
  std::printf("data sets (\"workload\": { \"data\": ... })\n%s",
              format_table({"name", "kind", "source", ""}, rows).c_str());
}

void print_settings() {
  std::vector<std::vector<std::string>> rows;
  for (const KeyDoc& key : setting_docs()) rows.push_back({key.key, key.type, key.default_value, key.doc});
  std::printf("settings (for all engines and workloads)\n%s",
              format_table({"key", "type", "default", ""}, rows).c_str());
}

Json settings_as_json() {
  Json settings = Json::array();
  for (const KeyDoc& key : setting_docs()) {
    settings.push_back({{"key", key.key},
                        {"type", key.type},
                        {"default", key.default_value},
                        {"doc", key.doc},
                        {"choices", key.choices}});
  }
  return settings;
}

Json all_as_json() {
  Json json;
  for (const EngineDefinition& definition : engine_definitions()) {
    Json knobs = Json::array();
    for (const KeyDoc& knob : knobs_of(definition)) {
      knobs.push_back({{"key", knob.key},
                       {"type", knob.type},
                       {"default", knob.default_value},
                       {"doc", knob.doc},
                       {"choices", knob.choices}});
    }
    Json variants = Json::array();
    for (const EngineVariant& variant : definition.variants) {
      variants.push_back({{"name", variant.name},
                          {"knobs", variant.knobs},
                          {"rank_multiple", variant.rank_multiple},
                          {"models", variant.models}});
    }
    json["engines"].push_back({{"name", definition.name},
                               {"summary", definition.summary},
                               {"paper", definition.paper},
                               {"reference", definition.reference},
                               {"knobs", knobs},
                               {"variants", variants}});
  }
  for (const ModelInfo& info : model_infos()) {
    json["workloads"].push_back({{"name", info.name}, {"parameters", info.parameters}, {"summary", info.summary}});
  }
  for (const DatasetDoc& set : dataset_docs()) {
    Json keys = Json::array();
    for (const KeyDoc& key : set.keys)
      keys.push_back({{"key", key.key}, {"type", key.type}, {"default", key.default_value}, {"doc", key.doc}});
    json["datasets"].push_back(
        {{"name", set.name}, {"kind", set.kind}, {"source", set.source}, {"summary", set.summary}, {"keys", keys}});
  }
  json["settings"] = settings_as_json();
  return json;
}

}  // namespace

int list_command(const Args& args) {
  if (args.json) {
    Json json = all_as_json();
    if (args.topic != "all") json = Json{{args.topic, json[args.topic]}};
    std::printf("%s\n", json.dump(2).c_str());
    return 0;
  }
  const bool all = args.topic == "all";
  if (all || args.topic == "engines") print_engines();
  if (all) std::printf("\n");
  if (all || args.topic == "workloads") print_workloads();
  if (all) std::printf("\n");
  if (all || args.topic == "datasets") print_datasets();
  if (all) std::printf("\n");
  if (all || args.topic == "settings") print_settings();
  return 0;
}

}  // namespace pdl
