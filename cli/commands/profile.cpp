// pdlbench profile: how long each layer takes forward and backward, for pipelines that are cut by time.

#include <cstdio>

#include "cli/commands/commands.h"
#include "cli/experiment.h"
#include "cli/table.h"
#include "engine/record/durable_file.h"
#include "parallel/pipeline/layer_profile.h"

namespace pdl {

int profile_command(World& world, const Args& args) {
  // What the layers cost does not depend on the engine; the one of a single rank asks for nothing else.
  std::vector<std::string> overrides = args.overrides;
  overrides.push_back(R"(engine={"name": "serial"})");
  const std::unique_ptr<Experiment> experiment = make_experiment(world, args.config, overrides);
  const TrainingOptions& training = experiment->config.training;
  const std::int64_t samples = training.micro_batch > 0 ? training.micro_batch : training.global_batch;
  world.announce("profile");
  const LayerProfile profile =
      measure_layers(experiment->model, samples, training.dtype, *experiment->device, *experiment->backend);
  replace_file(args.out, to_json(profile));

  std::vector<std::vector<std::string>> rows;
  const auto milliseconds = [](double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, "%.4f", 1e3 * seconds);
    return std::string(text);
  };
  for (const LayerTime& layer : profile.layers) {
    rows.push_back({layer.name, milliseconds(layer.forward_s), milliseconds(layer.backward_s)});
  }
  std::fprintf(stderr, "%s, micro-batches of %lld samples on %s\n%s", profile.model.c_str(),
               static_cast<long long>(samples), experiment->device->info().name.c_str(),
               format_table({"layer", "forward ms", "backward ms"}, rows).c_str());
  std::printf("PROFILE %s\n", args.out.c_str());
  return 0;
}

}  // namespace pdl
