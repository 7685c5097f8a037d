// dump_training CONFIG OUT STEPS [key=value ...]: one rank of training, written out for Python to repeat in PyTorch.
//
//   OUT/value.NAME.npy    initial weights            OUT/input.K.npy, OUT/target.K.npy   samples of step K
//   OUT/logits.npy        of step 0                  OUT/grad.NAME.npy                   gradients of step 0
//   OUT/losses.npy        loss of each step, as the configured engine trains on one rank
//
// Logits and gradients are written for runs on the CPU only: there they fit, and are of a type that NumPy knows.

#include <cstdio>
#include <cstdlib>

#include "cli/experiment.h"
#include "engine/nn/stage.h"
#include "parallel/comm/self_communicator.h"
#include "tests/support/npy.h"

namespace pdl::testing {
namespace {

class LossList final : public Observer {
 public:
  void step_end(const StepReport& report) override { losses.push_back(report.loss); }
  std::vector<double> losses;
};

/// Samples of every step and initial weights, all in host memory.
void dump_inputs(const Experiment& experiment, const EpochPlan& plan, const std::string& out) {
  const TrainingOptions& training = experiment.config.training;
  DataLoader loader(*experiment.data.train, {.threads = 0, .prefetch = 1, .image_dtype = wide_dtype(training.dtype)},
                    training.global_batch);
  for (std::int64_t step = 0; step < plan.steps(); ++step) {
    loader.push(plan.step_ids(step));
    const HostBatch& host = loader.next();
    write_npy(out + str("/input.", step, ".npy"), host.input);
    write_npy(out + str("/target.", step, ".npy"), host.target);
  }
  const LayerList layers = experiment.model.build(LayerFactory());
  const ParamStore store = make_param_store(layers, 0, static_cast<int>(layers.size()));
  for (const Param& param : store.params()) {
    std::vector<double> memory(static_cast<std::size_t>(param.count));  // room for either type
    const Tensor values(memory.data(), wide_dtype(training.dtype), param.spec.shape());
    fill_initial_values(values, param.spec, param.id, training.seed);
    write_npy(out + "/value." + param.spec.name + ".npy", values);
  }
}

/// Forward and backward over the first global batch on the CPU, layer by layer memory as any engine has it.
void dump_first_step(const Experiment& experiment, const EpochPlan& plan, const std::string& out) {
  const TrainingOptions& training = experiment.config.training;
  const std::unique_ptr<Device> device = make_device({.kind = "cpu", .threads = 1});
  const std::unique_ptr<Backend> backend = make_backend(*device, {});
  const LayerList layers = experiment.model.build(LayerFactory());
  const int count = static_cast<int>(layers.size());
  ParamStore store = make_param_store(layers, 0, count);
  Stage stage(layers, 0, count, experiment.model.sample_input, training.global_batch, training.dtype, *backend);
  store.allocate(*device, training.dtype);
  store.initialise(*device, training.seed);
  stage.allocate(*device);
  const Slot slot = stage.make_slot(*device);
  const Buffer metrics = device->allocate(16, MemoryKind::workspace);

  DataLoader loader(*experiment.data.train, {.threads = 0, .prefetch = 1, .image_dtype = training.dtype},
                    training.global_batch);
  loader.push(plan.step_ids(0));
  const HostBatch& host = loader.next();
  MicroBatch batch;
  batch.size = host.size;
  batch.input = host.input;
  batch.target = host.target;
  batch.sample_ids = host.sample_ids;
  std::int64_t update = 0;
  batch.update = Tensor(&update, DType::int64, {1});
  batch.metrics = metrics.tensor(DType::fp64, {2});
  batch.seed = training.seed;
  batch.gradient_scale = 1.0 / static_cast<double>(host.size * experiment.model.predictions_per_sample);
  Stage logits_stage(layers, 0, count - 1, experiment.model.sample_input, training.global_batch, training.dtype,
                     *backend);
  logits_stage.allocate(*device);
  const Slot logits_slot = logits_stage.make_slot(*device);
  write_npy(out + "/logits.npy", logits_stage.forward(store, store.values(), logits_slot, batch, batch.input, false));
  std::vector<char> touched(store.params().size(), 0);
  stage.forward(store, store.values(), slot, batch, batch.input, true);
  stage.backward(store, store.values(), store.grads(), touched, slot, batch, batch.input, Tensor(), nullptr);
  for (std::size_t i = 0; i < store.params().size(); ++i) {
    write_npy(out + "/grad." + store.params()[i].spec.name + ".npy", store.view(store.grads(), static_cast<int>(i)));
  }
}

int dump(int argc, char** argv) {
  const std::string out = argv[2];
  const std::int64_t steps = std::atoll(argv[3]);
  const std::unique_ptr<World> world = make_world(&argc, &argv);
  const std::unique_ptr<Experiment> experiment =
      make_experiment(*world, argv[1], std::vector<std::string>(argv + 4, argv + argc));
  const TrainingOptions& training = experiment->config.training;
  const EpochPlan plan(experiment->data.train->size(), training.global_batch, training.seed, 0, true, false, steps);
  dump_inputs(*experiment, plan, out);
  if (experiment->config.device == "cpu") dump_first_step(*experiment, plan, out);
  experiment->engine->prepare();
  LossList losses;
  experiment->engine->run_epoch(plan, losses);
  write_npy(out + "/losses.npy",
            Tensor(losses.losses.data(), DType::fp64, {static_cast<std::int64_t>(losses.losses.size())}));
  return 0;
}

}  // namespace
}  // namespace pdl::testing

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: dump_training CONFIG OUT STEPS [key=value ...]\n");
    return 2;
  }
  try {
    return pdl::testing::dump(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
