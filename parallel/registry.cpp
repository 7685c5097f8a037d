#include "parallel/engine.h"

namespace pdl {

#define PDL_ENGINE(name) EngineDefinition name##_definition();
#include "parallel/engines.def"
#undef PDL_ENGINE

const std::vector<EngineDefinition>& engine_definitions() {
  static const std::vector<EngineDefinition> definitions = {
#define PDL_ENGINE(name) name##_definition(),
#include "parallel/engines.def"
#undef PDL_ENGINE
  };
  return definitions;
}

const EngineDefinition* find_engine(const std::string& name) {
  for (const EngineDefinition& definition : engine_definitions()) {
    if (definition.name == name) return &definition;
  }
  return nullptr;
}

}  // namespace pdl
