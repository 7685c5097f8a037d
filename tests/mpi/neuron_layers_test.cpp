// Fully-connected layers whose neurons are divided, against the undivided ones: outputs bit by bit, data gradients up
// to the order of their sums, weight gradients of all samples without a reduction, and exactly the published volume.

#include "parallel/shard/neuron_parallel.h"

#include "engine/data/batch_plan.h"
#include "engine/nn/layers/linear.h"
#include "tests/mpi/ranks.h"
#include "tests/support/catch.h"
#include "tests/support/layer_pass.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

constexpr std::int64_t kSamples = 3;  // of each rank

/// Two layers at the end of a model, `in` to `hidden` to `out`, divided over all ranks.
struct Divided {
  Divided(std::int64_t in, std::int64_t hidden, std::int64_t out)
      : first{.in = in, .out = hidden, .activation = Activation::relu}, last{.in = hidden, .out = out} {
    world = make_counting_communicator(ranks.communicator(), ledger);
    backend = make_backend(*ranks.device, {});
    backend->set_stream(ranks.stream);
    ModelDescription model;
    model.name = "two layers";
    model.build = [this](const LayerFactory& layer_factory) {
      LayerList layers;
      layers.push_back(layer_factory.linear("first", first));
      layers.push_back(layer_factory.linear("last", last));
      layers.push_back(layer_factory.loss("loss", last.out));
      return layers;
    };
    factory = std::make_unique<NeuronParallelFactory>(model, *world, *ranks.device);
  }
  std::int64_t all() const { return kSamples * ranks.size; }
  Part own(std::int64_t extent) const { return split_evenly(extent, ranks.size, ranks.rank); }
  /// Of a matrix over all samples the rows of this rank's.
  Values samples_of(const Values& matrix) const {
    const auto each = static_cast<std::int64_t>(matrix.size()) / ranks.size;
    return {matrix.begin() + ranks.rank * each, matrix.begin() + (ranks.rank + 1) * each};
  }
  /// Of a matrix [rows, width] this rank's columns.
  Values columns_of(const Values& matrix, std::int64_t width) const {
    const Part part = own(width);
    Values columns;
    for (std::size_t row = 0; row < matrix.size(); row += static_cast<std::size_t>(width)) {
      const auto begin = matrix.begin() + static_cast<std::ptrdiff_t>(row) + part.begin;
      columns.insert(columns.end(), begin, begin + part.count);
    }
    return columns;
  }
  /// Of a parameter [neurons, ...] this rank's neurons.
  Values neurons_of(const OwnedTensor& parameter) const {
    const Part part = own(parameter.tensor().shape()[0]);
    const std::int64_t each = parameter.elements() / parameter.tensor().shape()[0];
    const Values all = parameter.values();
    return {all.begin() + part.begin * each, all.begin() + (part.begin + part.count) * each};
  }
  /// Runs `mine` with this rank's neurons of the parameters of `whole`, and `whole`.
  void run(LayerPass& mine, LayerPass& whole) const {
    for (std::size_t i = 0; i < mine.params.size(); ++i) mine.params[i].set(neurons_of(whole.params[i]));
    whole.run();
    mine.run();
    for (std::size_t i = 0; i < mine.grads.size(); ++i) {
      CHECK(worst_error(mine.grads[i].values(), neurons_of(whole.grads[i])) <= 1e-13);
    }
  }

  Ranks ranks;
  CommLedger ledger;
  std::unique_ptr<Communicator> world;
  std::unique_ptr<Backend> backend;
  LinearOptions first, last;
  std::unique_ptr<NeuronParallelFactory> factory;
};

}  // namespace

TEST_CASE("E10: divided neurons have the bits of undivided ones, data gradients up to rounding", "[neurons]") {
  for (const std::int64_t hidden : {12, 13}) {  // 13: the ranks have unequal parts
    for (const std::int64_t out : {12, 10}) {
      Divided divided(24, hidden, out);
      INFO("24 to " << hidden << " to " << out << " on " << divided.ranks.size << " ranks");
      const std::int64_t all = divided.all();
      const Linear whole_first("first", divided.first), whole_last("last", divided.last);
      const Values x = random_values({all, 24}, 1), dy = random_values({all, hidden}, 2);
      LayerPass first(whole_first, *divided.backend, DType::fp64, {all, 24}, batch_of(all), x, dy);
      const std::unique_ptr<Layer> own_first = divided.factory->linear("first", divided.first);
      LayerPass mine(*own_first, *divided.backend, DType::fp64, {kSamples, 24}, batch_of(kSamples),
                     divided.samples_of(x), divided.columns_of(dy, hidden));
      divided.run(mine, first);
      CHECK(mine.y.values() == divided.columns_of(first.y.values(), hidden));
      CHECK(worst_error(mine.dx.values(), divided.samples_of(first.dx.values())) <= 1e-13);

      const Values middle = random_values({all, hidden}, 3), dz = random_values({all, out}, 4);
      LayerPass last(whole_last, *divided.backend, DType::fp64, {all, hidden}, batch_of(all), middle, dz);
      const std::unique_ptr<Layer> own_last = divided.factory->linear("last", divided.last);
      LayerPass mine_last(*own_last, *divided.backend, DType::fp64, {all, divided.own(hidden).count},
                          batch_of(kSamples), divided.columns_of(middle, hidden), divided.samples_of(dz));
      divided.run(mine_last, last);
      CHECK(mine_last.y.values() == divided.samples_of(last.y.values()));
      CHECK(worst_error(mine_last.dx.values(), divided.columns_of(last.dx.values(), hidden)) <= 1e-13);
    }
  }
}

TEST_CASE("a pass over divided neurons sends 2f of all inputs, and each sample's outputs once each way", "[neurons]") {
  Divided divided(24, 12, 12);
  const std::int64_t ranks = divided.ranks.size, all = divided.all();
  const auto pass = [&](const char* name, const LinearOptions& options, const Shape& x, const Shape& y) {
    const std::unique_ptr<Layer> layer = divided.factory->linear(name, options);
    LayerPass(*layer, *divided.backend, DType::fp64, x, batch_of(kSamples), random_values(x, 1), random_values(y, 2))
        .run();
  };
  const std::int64_t own = divided.own(12).count;
  divided.ledger.take();
  pass("first", divided.first, {kSamples, 24}, {all, own});
  pass("last", divided.last, {all, own}, {kSamples, 12});
  CommCounts counts = divided.ledger.take();
  const std::int64_t f_inputs = all * (24 + 12) * 8 / ranks * (ranks - 1);
  CHECK(counts["world.all_gather"].bytes + counts["world.reduce_scatter"].bytes == 2 * f_inputs);
  // Of its neurons what belongs to other samples; back, of its samples what belongs to other neurons.
  CHECK(counts["world.all_to_all"].bytes == (all - kSamples) * own * 8 + kSamples * (12 - own) * 8);
  const CommCounts foreseen = divided.factory->traffic(kSamples, DType::fp64);
  CHECK(counts.size() == foreseen.size());
  for (const auto& [operation, count] : foreseen) {
    INFO(operation);
    CHECK(counts[operation].bytes == count.bytes);
    CHECK(counts[operation].calls == count.calls);
  }
}
