// Layers on slices of images against the undivided layer: outputs and data gradients bit by bit, weight gradients up to
// the order of their sums, and exactly the messages that the formula says.

#include <map>

#include "engine/backend/backend.h"
#include "engine/data/batch_plan.h"
#include "engine/nn/layers/pooling.h"
#include "parallel/comm/counting_communicator.h"
#include "parallel/shard/spatial_layers.h"
#include "tests/mpi/ranks.h"
#include "tests/support/catch.h"
#include "tests/support/layer_pass.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

struct Images {
  std::int64_t n, h, w, c;
  Shape shape() const { return {n, h, w, c}; }
};

/// A rank among the slices of a group, with what it counts.
struct Slices {
  Ranks ranks;
  CommLedger ledger;
  std::unique_ptr<Communicator> group;
  std::unique_ptr<Backend> backend;
  SpatialGroup place;

  Slices() {
    const std::unique_ptr<Communicator> world = make_counting_communicator(ranks.communicator(), ledger);
    group = world->split(0, ranks.rank, "spatial");
    backend = make_backend(*ranks.device, {});
    backend->set_stream(ranks.stream);
    place = {.rank = ranks.rank, .size = ranks.size, .ranks = group.get(), .stream = &ranks.stream};
  }
  int size() const { return place.size; }
  /// This rank's rows of images [N, H, W, C].
  Values slice_of(const Values& images, const Images& of) const {
    const std::int64_t row = of.w * of.c, rows = of.h / size();
    Values slice;
    for (std::int64_t n = 0; n < of.n; ++n) {
      const auto begin = images.begin() + (n * of.h + place.rank * rows) * row;
      slice.insert(slice.end(), begin, begin + rows * row);
    }
    return slice;
  }
  /// The sum over all ranks, in rank order.
  Values summed(const OwnedTensor& part) {
    Values values = part.values();
    ranks.world->reduce(values, ReduceOp::sum);
    return values;
  }
};

void compare(Slices& slices, const Images& images, const ConvOptions& options, DType dtype, double tolerance) {
  const bool exact = tolerance == 0.0;
  const Conv2d whole("conv", options);
  const SpatialConv2d divided("conv", options, slices.place);
  const Images outputs{images.n, images.h, images.w, options.out};
  const Values x = random_values(images.shape(), 1), dy = random_values(outputs.shape(), 2);
  const Shape slice{images.n, images.h / slices.size(), images.w, images.c};
  for (const bool wants_input_grad : {true, false}) {
    for (const char accumulate : {0, 1}) {
      INFO("input gradient " << wants_input_grad << ", accumulate " << int{accumulate});
      LayerPass reference(whole, *slices.backend, dtype, images.shape(), batch_of(images.n), x, dy);
      LayerPass mine(divided, *slices.backend, dtype, slice, batch_of(images.n), slices.slice_of(x, images),
                     slices.slice_of(dy, outputs));
      for (LayerPass* pass : {&reference, &mine}) pass->io.wants_input_grad = wants_input_grad;
      // What was there before belongs to one rank.
      for (std::size_t i = 0; i < mine.grads.size(); ++i) {
        reference.accumulate[i] = mine.accumulate[i] = accumulate;
        if (slices.place.rank > 0) mine.grads[i].set(Values(static_cast<std::size_t>(mine.grads[i].elements()), 0.0));
      }
      reference.run();
      mine.run();
      const auto error = [&](const OwnedTensor& part, const OwnedTensor& all, const Images& of) {
        return worst_error(part.values(), slices.slice_of(all.values(), of));
      };
      CHECK(error(mine.y, reference.y, outputs) <= tolerance);
      if (wants_input_grad) CHECK(error(mine.dx, reference.dx, images) <= tolerance);
      for (std::size_t i = 0; i < mine.grads.size(); ++i) {
        CHECK(worst_error(slices.summed(mine.grads[i]), reference.grads[i].values()) <= (exact ? 1e-13 : tolerance));
      }
    }
  }
}

/// Images whose heights the group divides; slices of one row and of three, of 8 and more rows, real sizes.
std::vector<Images> images_for(int parts) {
  std::vector<Images> found;
  for (const std::int64_t height : {std::int64_t{32}, std::int64_t{64}, std::int64_t{48}, std::int64_t{parts},
                                    std::int64_t{3 * parts}, std::int64_t{8 * parts}}) {
    if (height % parts == 0) found.push_back({2, height, 5, 3});
  }
  return found;
}

}  // namespace

TEST_CASE("a convolution on slices equals the undivided one: y and dx bit by bit", "[spatial]") {
  Slices slices;
  for (const Images& images : images_for(slices.size())) {
    for (const bool overlap : {true, false}) {
      slices.place.overlap = overlap;
      for (const Activation activation : {Activation::relu, Activation::none}) {
        for (const std::int64_t kernel : {3, 5}) {
          if (images.h / slices.size() < (kernel - 1) / 2) continue;
          INFO(images.shape().to_string() << ", kernel " << kernel << ", overlap " << overlap);
          const ConvOptions options{.in = images.c,
                                    .out = 4,
                                    .geometry = {.kernel = kernel, .stride = 1, .padding = (kernel - 1) / 2},
                                    .activation = activation};
          compare(slices, images, options, DType::fp64, 0.0);
        }
      }
    }
  }
  slices.place.overlap = true;
  const ConvOptions wide{.in = 20, .out = 17};
  compare(slices, {3, 16 * slices.size(), 6, 20}, wide, DType::fp64, 0.0);
  compare(slices, {3, 16 * slices.size(), 6, 20}, wide, DType::fp32, 1e-5);
  compare(slices, {3, 2 * slices.size(), 6, 20}, wide, DType::fp32, 1e-5);
}

TEST_CASE("a slice sends h rows to each neighbour, forward of x and backward of dy", "[spatial]") {
  Slices slices;
  const Images images{3, 4 * slices.size(), 6, 2};
  const ConvOptions options{.in = 2, .out = 5};
  const SpatialConv2d layer("conv", options, slices.place);
  const Shape slice{images.n, 4, images.w, images.c};
  LayerPass pass(layer, *slices.backend, DType::fp64, slice, batch_of(3), Values(3 * 4 * 6 * 2, 1.0),
                 Values(3 * 4 * 6 * 5, 1.0));
  const std::int64_t neighbours = (slices.place.rank > 0 ? 1 : 0) + (slices.place.rank + 1 < slices.size() ? 1 : 0);
  slices.ledger.take();
  layer.forward(pass.io);
  CommCounts counts = slices.ledger.take();
  CHECK(counts.at("spatial.send").calls == neighbours);
  CHECK(counts.at("spatial.recv").calls == neighbours);
  CHECK(counts.at("spatial.send").bytes == neighbours * 3 * 6 * 2 * 8);
  layer.backward(pass.io);
  CHECK(slices.ledger.take().at("spatial.send").bytes == neighbours * 3 * 6 * 5 * 8);
  pass.io.wants_input_grad = false;
  layer.backward(pass.io);
  CHECK(slices.ledger.take().empty());
}

TEST_CASE("slices become whole samples and go back", "[spatial]") {
  Slices slices;
  for (const std::int64_t n : {1, 2, 5, 8}) {  // fewer samples than ranks, and parts that differ
    INFO(n << " samples");
    const Images images{n, 2 * slices.size(), 4, 3}, outputs{n, slices.size(), 2, 3};
    const Values x = random_values(images.shape(), 1), dy = random_values(outputs.shape(), 2);
    const MaxPool pool("pool", 2);
    LayerPass reference(pool, *slices.backend, DType::fp64, images.shape(), batch_of(n), x, dy);
    reference.run();

    const Part own = split_evenly(n, slices.size(), slices.place.rank);
    const auto own_part = [&](const Values& all) {
      const auto each = static_cast<std::int64_t>(all.size()) / n;
      return Values(all.begin() + own.begin * each, all.begin() + (own.begin + own.count) * each);
    };
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < n; ++i) ids.push_back(10 + i);
    MicroBatch batch = batch_of(n);
    batch.sample_ids = tensor_of(ids);
    const WholeSamples layer(std::make_unique<MaxPool>("pool", 2), slices.place);
    const MicroBatch behind = layer.output_batch(batch);
    CHECK(behind.size == own.count);
    if (own.count > 0) CHECK(behind.sample_ids.data<std::int64_t>()[0] == 10 + own.begin);

    LayerPass mine(layer, *slices.backend, DType::fp64, {n, 2, 4, 3}, batch, slices.slice_of(x, images), own_part(dy));
    mine.run();
    CHECK(mine.y.values() == own_part(reference.y.values()));
    CHECK(mine.dx.values() == slices.slice_of(reference.dx.values(), images));
  }
}
