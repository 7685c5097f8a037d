#pragma once
// Every engine of the registry with its defaults and with the knobs of each variant that it names: what tests of
// engines iterate over.

#include <string>
#include <vector>

#include "parallel/engine.h"

namespace pdl::testing {

/// An engine with the knobs of one of its variants.
struct Candidate {
  std::string name;  ///< "ddp, defaults"
  std::vector<std::string> overrides;
  bool synchronous = true;  ///< EngineDefinition::synchronous
};

/// All that run this model ("gpt2", "vgg") on so many ranks.
inline std::vector<Candidate> candidates(int ranks, const std::string& model) {
  std::vector<Candidate> all;
  for (const EngineDefinition& definition : engine_definitions()) {
    if (definition.name == "serial" && ranks > 1) continue;
    std::vector<EngineVariant> variants = definition.variants;
    variants.insert(variants.begin(), {"defaults", {}});
    for (const EngineVariant& variant : variants) {
      if (ranks % variant.rank_multiple != 0 || !model.starts_with(variant.models)) continue;
      Candidate candidate{
          definition.name + ", " + variant.name, {"engine.name=" + definition.name}, definition.synchronous};
      for (const std::string& knob : variant.knobs) candidate.overrides.push_back("engine." + knob);
      all.push_back(std::move(candidate));
    }
  }
  return all;
}

}  // namespace pdl::testing
