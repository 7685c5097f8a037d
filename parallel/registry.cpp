#include "parallel/engine.h"

namespace pdl {

#define PDL_ENGINE(name) EngineDefinition name##_definition();
#define PDL_REFERENCE(name) EngineDefinition name##_definition();
#include "parallel/engines.def"
#undef PDL_ENGINE
#undef PDL_REFERENCE

const std::vector<EngineDefinition>& engine_definitions() {
  static const std::vector<EngineDefinition> definitions = {
#define PDL_ENGINE(name) name##_definition(),
#define PDL_REFERENCE(name)
#include "parallel/engines.def"
#undef PDL_ENGINE
#undef PDL_REFERENCE
  };
  return definitions;
}

const EngineDefinition* find_engine(const std::string& name) {
  static const std::vector<EngineDefinition> references = {
#define PDL_ENGINE(name)
#define PDL_REFERENCE(name) name##_definition(),
#include "parallel/engines.def"
#undef PDL_ENGINE
#undef PDL_REFERENCE
  };
  for (const std::vector<EngineDefinition>* list : {&engine_definitions(), &references}) {
    for (const EngineDefinition& definition : *list) {
      if (definition.name == name) return &definition;
    }
  }
  return nullptr;
}

}  // namespace pdl
