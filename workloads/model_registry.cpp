#include <utility>

#include "workloads/models.h"

namespace pdl {

#define PDL_MODEL_FAMILY(name) ModelFamily name##_models();
#include "workloads/workloads.def"
#undef PDL_MODEL_FAMILY

const std::vector<ModelFamily>& model_families() {
  static const std::vector<ModelFamily> families = {
#define PDL_MODEL_FAMILY(name) name##_models(),
#include "workloads/workloads.def"
#undef PDL_MODEL_FAMILY
  };
  return families;
}

namespace {

/// Families and members as flat pairs, in listing order.
std::vector<std::pair<const ModelFamily*, const ModelFamily::Member*>> all_models() {
  std::vector<std::pair<const ModelFamily*, const ModelFamily::Member*>> all;
  for (const ModelFamily& family : model_families()) {
    for (const ModelFamily::Member& member : family.members) all.emplace_back(&family, &member);
  }
  return all;
}

/// Reads the family's keys and completes what is the same for every family.
ModelOptions read_as(const ModelFamily& family, const std::string& name, const ConfigReader& workload) {
  ModelOptions options = family.read(name, workload);
  options.name = name;
  options.family = family.name;
  return options;
}

std::vector<ModelInfo> describe_all() {
  std::vector<ModelInfo> infos;
  for (const auto& [family, member] : all_models()) {
    const ConfigDocument defaults = ConfigDocument::parse("{}", member->name);
    const ModelOptions options = read_as(*family, member->name, defaults.root());
    const LayerList layers = make_model(options, options.usual_outputs).build(LayerFactory());
    infos.push_back({.name = member->name,
                     .family = family->name,
                     .summary = member->summary,
                     .parameters = parameter_count(layers),
                     .usual_outputs = options.usual_outputs});
  }
  return infos;
}

}  // namespace

ModelOptions read_model_options(const ConfigReader& workload) {
  constexpr const char* kDoc = "what is trained: one of `pdlbench list workloads`";
  std::vector<std::string> names;
  for (const auto& [family, member] : all_models()) names.push_back(member->name);
  std::string name;
  if (workload.has("model")) {
    name = workload.choice("model", "", names, kDoc);
  } else {
    workload.require_choice("model", names, kDoc);
  }
  for (const auto& [family, member] : all_models()) {
    if (member->name == name) return read_as(*family, name, workload);
  }
  // The name is missing or wrong, which has been noted. Which other keys are right depends on it, so they go unjudged,
  // and some model stands in until the document is finished.
  workload.leave_unjudged();
  return read_as(*all_models().front().first, names.front(), ConfigDocument::parse("{}", name).root());
}

ModelDescription make_model(const ModelOptions& options, std::int64_t vocabulary_or_classes) {
  PDL_CHECK(options.build != nullptr, "model options that were never read");
  PDL_CHECK(vocabulary_or_classes > 0, options.name, " for ", vocabulary_or_classes, " tokens or classes");
  ModelDescription model = options.build(vocabulary_or_classes);
  model.name = options.name;
  model.sample_input = options.sample_input;
  model.sample_target = options.sample_target;
  return model;
}

const std::vector<ModelInfo>& model_infos() {
  static const std::vector<ModelInfo> infos = describe_all();
  return infos;
}

}  // namespace pdl
