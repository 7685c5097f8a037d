#pragma once
// An engine on a world of one rank, beside others on the same configuration: what it must leave is the plain loop.

#include <string>
#include <vector>

#include "cli/experiment.h"
#include "parallel/comm/self_communicator.h"

namespace pdl::testing {

/// The engine with these knobs ("key=value") on this rank alone, with the recipe and the data of `of`, which must
/// outlive it. Communication is counted in its ledger.
inline std::unique_ptr<Experiment> make_lone_experiment(const Experiment& of, const std::string& engine,
                                                        const std::vector<std::string>& knobs) {
  std::unique_ptr<Experiment> alone = make_reference_experiment(of);
  alone->engine.reset();
  alone->communicator = make_counting_communicator(make_self_communicator(*alone->device), alone->ledger);
  const EngineContext& given = *alone->context;
  alone->context = std::make_unique<EngineContext>(EngineContext{.world = *alone->communicator,
                                                                 .device = given.device,
                                                                 .backend = given.backend,
                                                                 .model = given.model,
                                                                 .training = given.training,
                                                                 .data = given.data,
                                                                 .train_samples = given.train_samples,
                                                                 .validation_samples = given.validation_samples,
                                                                 .loader = given.loader,
                                                                 .max_steps_per_epoch = given.max_steps_per_epoch,
                                                                 .stop_requested = nullptr});
  std::vector<std::string> overrides = knobs;
  for (std::string& knob : overrides) knob.insert(0, "engine.");
  alone->document = std::make_unique<ConfigDocument>(ConfigDocument::parse("{}", "alone", overrides));
  alone->config.engine = find_engine(engine);
  alone->engine = alone->config.engine->make(*alone->context, engine_block(*alone->document));
  alone->document->finish();
  return alone;
}

}  // namespace pdl::testing
