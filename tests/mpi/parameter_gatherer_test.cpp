// Every rank sees the same bits of every parameter whenever a layer uses it, before and after updates of the slices:
// with all blocks whole, with all gathered and let go, with some of both.

#include "parallel/sync/parameter_gatherer.h"

#include "cli/experiment.h"
#include "tests/support/catch.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

/// The parts of a divided model, put together as an engine does.
struct Divided {
  Divided(Experiment& experiment, ShardedWeights::Values values, std::int64_t resident, const GatherOptions& options)
      : of(experiment),
        layers(experiment.model.build(LayerFactory())),
        store(make_param_store(layers, 0, static_cast<int>(layers.size()))),
        users(parameter_users(layers, store)),
        map(make_map(resident)),
        weights(store, map, of.communicator->rank(), DType::fp64, values),
        gradients(store, map, users, static_cast<int>(layers.size()), *of.communicator, {.bucket_elements = 2000},
                  DType::fp64),
        gatherer(store, map, users, static_cast<int>(layers.size()), weights, gradients, options, DType::fp64) {
    store.allocate(*of.device, DType::fp64, {.values = values == ShardedWeights::Values::whole, .gradients = false});
    weights.prepare(*of.device);
    gatherer.prepare(*of.device, *of.communicator);
    weights.initialise(*of.device, *of.backend, kSeed);
    regather();
  }

  ShardMap make_map(std::int64_t resident) {
    ShardMap made(store, layer_blocks(store, users, resident), of.communicator->size(), 4);
    made.place(store);
    return made;
  }
  void regather() {
    for (std::size_t b = 0; b < map.blocks().size(); ++b) gatherer.regather(static_cast<int>(b));
  }
  /// Each rank changes its slices.
  void update() {
    for (std::size_t b = 0; b < map.blocks().size(); ++b) of.backend->scale(weights.weights(static_cast<int>(b)), 0.5);
    regather();
  }
  /// A layer's parameters are the initial ones times `factor`.
  void check_layer(int layer, double factor) {
    gatherer.before_layer(layer);
    for (std::size_t i = 0; i < users.size(); ++i) {
      if (std::find(users[i].begin(), users[i].end(), layer) == users[i].end()) continue;
      INFO(store.params()[i].spec.name << " in layer " << layer);
      const Tensor found = gatherer.value(static_cast<int>(i));
      std::vector<double> expected(static_cast<std::size_t>(found.elements()));
      fill_initial_values(Tensor(expected.data(), DType::fp64, found.shape()), store.params()[i].spec,
                          store.params()[i].id, kSeed);
      for (double& value : expected) value *= factor;
      CHECK(std::equal(expected.begin(), expected.end(), found.data<double>()));
    }
    gatherer.after_layer(layer);
  }
  void check_pass(bool training, double factor) {
    gatherer.begin_pass(training);
    const int count = static_cast<int>(layers.size());
    for (int layer = 0; layer < count; ++layer) check_layer(layer, factor);
    for (int layer = training ? count - 1 : -1; layer >= 0; --layer) check_layer(layer, factor);
  }

  static constexpr std::uint64_t kSeed = 77;
  Experiment& of;
  LayerList layers;
  ParamStore store;
  std::vector<std::vector<int>> users;
  ShardMap map;
  ShardedWeights weights;
  GradientShards gradients;
  ParameterGatherer gatherer;
};

}  // namespace

TEST_CASE("each use of a parameter sees the same bits on every rank, after every update") {
  using Values = ShardedWeights::Values;
  for (const char* model : {"gpt2", "vgg"}) {
    const std::unique_ptr<Experiment> experiment =
        make_experiment(test_world(), tiny_config(model), {"training.deterministic=true"});
    for (Values values : {Values::whole, Values::sharded, Values::first_resident}) {
      for (std::int64_t ahead : {0, 1, 5000}) {
        for (std::int64_t reuse : {0, 4000, 1000000}) {
          INFO(model << ", values " << static_cast<int>(values) << ", " << ahead << " ahead, reuse " << reuse);
          Divided divided(*experiment, values, values == Values::first_resident ? 30 : 0, {ahead, 20000, reuse, true});
          divided.check_pass(true, 1.0);
          divided.update();
          divided.check_pass(true, 0.5);
          divided.check_pass(false, 0.5);  // an evaluation in between changes nothing
          divided.update();
          divided.check_pass(false, 0.25);
          divided.check_pass(true, 0.25);
          divided.gatherer.wait_for_regathers();
        }
      }
    }
  }
}
