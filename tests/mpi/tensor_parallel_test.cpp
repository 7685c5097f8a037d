// Layers divided over a tensor-parallel group against the dense ones: whole models, forward and back, in fp64; the
// movements of tensors one by one; and exactly the traffic that the formulas say.

#include <map>
#include <string>

#include "engine/nn/stage.h"
#include "parallel/comm/counting_communicator.h"
#include "parallel/shard/tensor_parallel.h"
#include "tests/mpi/ranks.h"
#include "tests/support/catch.h"
#include "tests/support/op_testing.h"
#include "workloads/models.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

/// All ranks as one group, with what it counts.
struct Group {
  Ranks ranks;
  CommLedger ledger;
  std::unique_ptr<Communicator> members;
  std::unique_ptr<Backend> backend;
  TensorGroup tp;

  Group() {
    const std::unique_ptr<Communicator> world = make_counting_communicator(ranks.communicator(true), ledger);
    members = world->split(0, ranks.rank, "tp");
    backend = make_backend(*ranks.device, {.deterministic = true});
    backend->set_stream(ranks.stream);
    tp = {.rank = ranks.rank, .size = ranks.size, .ranks = members.get(), .stream = &ranks.stream};
  }
  Values summed(Values values) {
    ranks.world->reduce(values, ReduceOp::sum);
    return values;
  }
};

ModelDescription model_of(const std::string& workload, std::int64_t outputs) {
  const ConfigDocument document = ConfigDocument::parse("{" + workload + "}", "test.json");
  const ModelOptions options = read_model_options(document.root());
  document.finish();
  return make_model(options, outputs);
}

/// 12 heads of width 2, 12 tokens; 29 classes, which no number of ranks divides, in `multiple` times so many rows.
ModelDescription gpt2(const std::string& more = "") {
  return model_of(R"("model": "gpt2-tiny", "layers": 2, "width": 24, "heads": 12, "sequence_length": 12,
                     "positions": 14)" +
                      more,
                  29);
}

/// 12 channels at least; the last map has 2 x 2 pixels.
ModelDescription vgg(const std::string& name, const std::string& more = "") {
  return model_of(
      R"("image_size": 64, "width_multiplier": 0.1875, "classifier_width": 24, "dropout": 0.3, "model": ")" + name +
          "\"" + more,
      12);
}

/// Samples [first, first + count) and everything that a MicroBatch points to.
struct Batch {
  Batch(const ModelDescription& model, std::int64_t first, std::int64_t count, std::int64_t of, std::int64_t outputs) {
    const bool is_text = model.sample_input.dtype == DType::int32;
    const std::int64_t inputs = model.sample_input.shape.elements(), targets = model.predictions_per_sample;
    const RandomStream random(5, RandomUse::synthetic, 0);
    const auto below = [&](std::int64_t i, std::int64_t bound) {
      return static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(i), static_cast<std::uint32_t>(bound)));
    };
    for (std::int64_t id = first; id < first + count; ++id) {
      ids.push_back(id);
      for (std::int64_t i = 0; i < targets; ++i) wanted.push_back(below(1000000 + id * targets + i, outputs));
      for (std::int64_t i = id * inputs; i < (id + 1) * inputs; ++i) {
        if (is_text) tokens.push_back(below(i, outputs));
        if (!is_text) images.push_back(2.0 * random.uniform(static_cast<std::uint64_t>(i)) - 1.0);
      }
    }
    wanted.front() = -1;  // a target that does not count
    for (std::int64_t id = 0; id < of; ++id) all_ids.push_back(id);
    const Shape& sample = model.sample_input.shape;
    micro.size = count;
    micro.input = is_text ? tensor_of(tokens).view({count, sample[0]})
                          : tensor_of(images).view({count, sample[0], sample[1], sample[2]});
    micro.target = tensor_of(wanted);
    micro.sample_ids = tensor_of(ids);
    micro.group_sample_ids = tensor_of(all_ids);
    micro.metrics = tensor_of(metrics);
    micro.seed = 9;
    micro.update = tensor_of(update);
    micro.gradient_scale = 1.0 / static_cast<double>(of * targets);
  }
  MicroBatch micro;
  std::vector<double> images, metrics = {0.0, 0.0};
  std::vector<std::int32_t> tokens, wanted;
  std::vector<std::int64_t> ids, all_ids, update = {3};
};

/// A whole model on one stage.
struct Replica {
  Replica(const ModelDescription& model, const LayerFactory& factory, Group& group, std::int64_t samples)
      : layers(model.build(factory)),
        store(make_param_store(layers, 0, static_cast<int>(layers.size()))),
        stage(layers, 0, static_cast<int>(layers.size()), model.sample_input, samples, DType::fp64, *group.backend) {
    store.allocate(*group.ranks.device, DType::fp64);
    for (int index = 0; index < static_cast<int>(store.params().size()); ++index) {
      const Param& param = store.params()[static_cast<std::size_t>(index)];
      ParamSpec spec = param.spec;
      if (spec.init.scale == 0.0) spec.init = {InitRule::Kind::uniform, 0.5};  // biases and norms show where they enter
      fill_initial_values(store.view(store.values(), index), spec, param.id, 17);
    }
    stage.allocate(*group.ranks.device);
    slot = stage.make_slot(*group.ranks.device);
    touched.assign(store.params().size(), 0);
  }
  void forward(Batch& batch, bool training = true) {
    stage.forward(store, store.values(), slot, batch.micro, batch.micro.input, training);
  }
  void backward(Batch& batch) {
    stage.backward(store, store.values(), store.grads(), touched, slot, batch.micro, batch.micro.input, Tensor(),
                   nullptr);
  }
  Values view(const Tensor& flat, int index) const {
    const Tensor tensor = store.view(flat, index);
    return Values(tensor.data<double>(), tensor.data<double>() + tensor.elements());
  }

  LayerList layers;
  ParamStore store;
  Stage stage;
  Slot slot;
  std::vector<char> touched;
};

/// The whole of params()[index]: slices put together; of partial gradients the sum. The same on every rank.
Values whole_of_group(Group& group, const Replica& replica, const Tensor& flat, int index, bool is_partial) {
  const ParamSpec& spec = replica.store.params()[static_cast<std::size_t>(index)].spec;
  if (spec.slice.axis < 0) {
    const Values own = replica.view(flat, index);
    return is_partial ? group.summed(own) : own;
  }
  Values whole(static_cast<std::size_t>(spec.global_shape.elements()), 0.0);
  place_slice(tensor_of(whole), replica.store.view(flat, index), spec);
  return group.summed(whole);
}

struct Experiment {
  ModelDescription model;
  SpreadOver spread = SpreadOver::none;
  std::int64_t samples = 3, outputs = 29;
};

/// Two micro-batches forward and back, gradients added up: loss, correctness, weights and gradients as without
/// division.
void check_against_dense(Group& group, const Experiment& experiment) {
  const ModelDescription& model = experiment.model;
  REQUIRE(obstacle_to_tensor_parallel(model, experiment.spread, group.tp.size) == "");
  const bool own_samples = experiment.spread == SpreadOver::samples;
  const std::int64_t all = own_samples ? experiment.samples * group.tp.size : experiment.samples;
  const std::int64_t first = own_samples ? experiment.samples * group.tp.rank : 0;
  Batch whole(model, 0, all, all, experiment.outputs);
  Batch mine(model, first, experiment.samples, all, experiment.outputs);
  if (own_samples && group.tp.rank > 0) mine.wanted.front() = whole.wanted[static_cast<std::size_t>(first)];

  const TensorParallelFactory factory(group.tp, experiment.spread);
  Replica dense(model, LayerFactory(), group, all), divided(model, factory, group, experiment.samples);
  for (int pass = 0; pass < 2; ++pass) {
    dense.forward(whole);
    dense.backward(whole);
    divided.forward(mine);
    divided.backward(mine);
  }
  for (const bool correct : {false, true}) {
    const double value = mine.metrics[correct ? 1 : 0];
    const double found = own_samples ? group.summed({value})[0] : value;
    CHECK(found == Approx(whole.metrics[correct ? 1 : 0]).epsilon(1e-12));
  }
  REQUIRE(dense.store.params().size() == divided.store.params().size());
  std::int64_t held = 0;
  for (int index = 0; index < static_cast<int>(dense.store.params().size()); ++index) {
    const ParamSpec& spec = divided.store.params()[static_cast<std::size_t>(index)].spec;
    INFO(spec.name << " on " << group.tp.size << " ranks");
    held += spec.shape().elements();
    const Values value = whole_of_group(group, divided, divided.store.values(), index, false);
    CHECK(value == dense.view(dense.store.values(), index));
    const Values gradient = whole_of_group(group, divided, divided.store.grads(), index, factory.is_partial(spec));
    CHECK(worst_error(gradient, dense.view(dense.store.grads(), index)) < 1e-11);
  }
  CHECK(held < dense.store.elements());
}

}  // namespace

TEST_CASE("a gather collects parts, a reduce-scatter hands out parts of the sum", "[tensor]") {
  Group group;
  const int t = group.tp.size;
  for (const std::int64_t outer : {1, 3}) {
    constexpr std::int64_t kPart = 5;  // elements of a part of one outer row
    const auto whole_of_rank = [&](int rank) { return contributions<double>(rank, outer * t * kPart); };
    const auto part_of = [&](const Values& whole, int rank) {
      Values part;
      for (std::int64_t o = 0; o < outer; ++o) {
        const auto begin = whole.begin() + (o * t + rank) * kPart;
        part.insert(part.end(), begin, begin + kPart);
      }
      return part;
    };
    INFO("outer " << outer);
    OwnedTensor whole(DType::fp64, {outer, t, kPart}), room(DType::fp64, {outer * t * kPart});
    OwnedTensor part(DType::fp64, {outer, kPart});
    // Parts of one and the same whole come together to it on every rank.
    part.set(part_of(whole_of_rank(0), group.tp.rank));
    Gather(group.tp, *group.backend, whole, part, outer, room).finish();
    CHECK(whole.values() == whole_of_rank(0));
    // Its conjugate: of different wholes, each rank gets its part of their sum.
    whole.set(whole_of_rank(group.tp.rank));
    ReduceScatter(group.tp, *group.backend, part, whole, outer, room).finish();
    const Values sum = serially_reduced<double>(t, outer * t * kPart, ReduceOp::sum);
    CHECK(worst_error(part.values(), part_of(sum, group.tp.rank)) < 1e-14);
    // <gather(x), y> = <x, reduce-scatter(y)>, summed over ranks: that is what makes the one the other's backward.
    const Values x =
        random_tensor(DType::fp64, {outer * kPart}, 40 + static_cast<std::uint64_t>(group.tp.rank)).values();
    OwnedTensor y(DType::fp64, {outer, t, kPart}, whole_of_rank(group.tp.rank));
    part.set(x);
    Gather(group.tp, *group.backend, whole, part, outer, room).finish();
    const double forward = group.summed({dot(whole.values(), y.values())})[0];
    ReduceScatter(group.tp, *group.backend, part, y, outer, room).finish();
    CHECK(group.summed({dot(x, part.values())})[0] == Approx(forward).epsilon(1e-12));
    CHECK((whole.guards_intact() && part.guards_intact() && room.guards_intact()));
  }
}

TEST_CASE("a divided GPT-2 trains as the dense one, dropout and padding included", "[tensor]") {
  Group group;
  for (const std::string& more :
       {std::string(R"(, "dropout": 0.0)"), std::string(R"(, "dropout": 0.2)"),
        std::string(R"(, "dropout": 0.2, "make_vocab_size_divisible_by": 20, "recompute": "gelu_and_norms")")}) {
    INFO(more);
    check_against_dense(group, {gpt2(more)});
    check_against_dense(group, {gpt2(more), SpreadOver::none, 1});
  }
}

TEST_CASE("a GPT-2 whose sequences are spread trains as the dense one", "[tensor]") {
  Group group;
  for (const std::string& more :
       {std::string(R"(, "dropout": 0.0)"), std::string(R"(, "dropout": 0.2)"),
        std::string(R"(, "dropout": 0.2, "make_vocab_size_divisible_by": 20, "recompute": "gelu_and_norms")")}) {
    INFO(more);
    check_against_dense(group, {gpt2(more), SpreadOver::sequence});
    check_against_dense(group, {gpt2(more), SpreadOver::sequence, 1});
  }
}

TEST_CASE("a divided VGG trains as the dense one: convolutions and classifier, or the classifier alone", "[tensor]") {
  Group group;
  for (const std::string name : {"vgg11", "vgg16"}) {  // an odd and an even number of layers with weights
    INFO(name);
    check_against_dense(group, {vgg(name), SpreadOver::none, 2, 12});
    check_against_dense(group, {vgg(name), SpreadOver::samples, 2, 12});
  }
}

TEST_CASE("a divided model validates as the dense one, and a forward pass may be repeated", "[tensor]") {
  Group group;
  for (const SpreadOver spread : {SpreadOver::none, SpreadOver::sequence}) {
    const ModelDescription model = gpt2(R"(, "dropout": 0.2)");
    Batch whole(model, 0, 3, 3, 29), mine(model, 0, 3, 3, 29);
    const TensorParallelFactory factory(group.tp, spread);
    Replica dense(model, LayerFactory(), group, 3), divided(model, factory, group, 3);
    dense.forward(whole, false);
    divided.forward(mine, false);
    CHECK(mine.metrics[0] == Approx(whole.metrics[0]).epsilon(1e-12));
    CHECK(mine.metrics[1] == whole.metrics[1]);

    Replica again(model, factory, group, 3);  // as checkpointing does it: forward, and forward once more
    divided.forward(mine);
    divided.backward(mine);
    again.forward(mine);
    again.forward(mine);
    again.backward(mine);
    CHECK(same_bits(again.store.grads(), divided.store.grads()));
  }
}

TEST_CASE("all ranks have the same loss and, of whole parameters, the same gradients, bit by bit", "[tensor]") {
  Group group;
  for (const SpreadOver spread : {SpreadOver::none, SpreadOver::sequence}) {
    const ModelDescription model = gpt2(R"(, "dropout": 0.2)");
    const TensorParallelFactory factory(group.tp, spread);
    Replica divided(model, factory, group, 3);
    Batch batch(model, 0, 3, 3, 29);
    divided.forward(batch);
    divided.backward(batch);
    Values values = batch.metrics;
    for (int index = 0; index < static_cast<int>(divided.store.params().size()); ++index) {
      const ParamSpec& spec = divided.store.params()[static_cast<std::size_t>(index)].spec;
      if (spec.slice.axis >= 0 || factory.is_partial(spec)) continue;
      const Values gradient = divided.view(divided.store.grads(), index);
      values.insert(values.end(), gradient.begin(), gradient.end());
    }
    CHECK((values.size() > 2) == (spread == SpreadOver::none));
    Values largest = values, smallest = values;
    group.ranks.world->reduce(largest, ReduceOp::max);
    group.ranks.world->reduce(smallest, ReduceOp::min);
    CHECK(largest == smallest);
  }
}

TEST_CASE("a group of one rank has the dense model, bit by bit", "[tensor]") {
  Group group;
  const TensorGroup alone = {.rank = 0, .size = 1, .ranks = nullptr, .stream = &group.ranks.stream};
  for (const SpreadOver spread : {SpreadOver::none, SpreadOver::sequence}) {
    const ModelDescription model = gpt2(R"(, "dropout": 0.2)");
    const TensorParallelFactory factory(alone, spread);
    Replica dense(model, LayerFactory(), group, 2), one(model, factory, group, 2);
    Batch batch(model, 0, 2, 2, 29);
    for (Replica* replica : {&dense, &one}) {
      replica->forward(batch);
      replica->backward(batch);
    }
    CHECK(same_bits(one.store.values(), dense.store.values()));
    CHECK(same_bits(one.store.grads(), dense.store.grads()));
    CHECK_FALSE(factory.is_partial(one.store.params().back().spec));
  }
}

namespace {

/// What was counted, under the names of a plan.
std::map<std::string, std::pair<std::int64_t, std::int64_t>> calls_and_bytes(const CommCounts& counts) {
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> result;
  for (const auto& [name, count] : counts) {
    result[name.substr(name.find('.') == std::string::npos ? 0 : name.find('.') + 1)] = {count.calls, count.bytes};
  }
  return result;
}

}  // namespace

TEST_CASE("divided layers send exactly what the plan says", "[tensor]") {
  Group group;
  for (const Experiment& experiment :
       {Experiment{gpt2(), SpreadOver::none, 3}, Experiment{gpt2(), SpreadOver::sequence, 3},
        Experiment{vgg("vgg16"), SpreadOver::none, 2, 12}, Experiment{vgg("vgg11"), SpreadOver::none, 2, 12},
        Experiment{vgg("vgg11"), SpreadOver::samples, 2, 12}}) {
    INFO(experiment.model.name << ", spread " << static_cast<int>(experiment.spread));
    const int t = group.tp.size;
    const bool own_samples = experiment.spread == SpreadOver::samples;
    const std::int64_t n = experiment.samples, all = own_samples ? n * t : n;
    const TensorParallelFactory factory(group.tp, experiment.spread);
    Replica divided(experiment.model, factory, group, n);
    Batch batch(experiment.model, own_samples ? n * group.tp.rank : 0, n, all, experiment.outputs);
    const auto planned = tensor_traffic(experiment.model, experiment.spread, t, 0,
                                        static_cast<int>(divided.layers.size()), n, DType::fp64);
    group.ledger.take();
    divided.forward(batch);
    CHECK(calls_and_bytes(group.ledger.take()) == calls_and_bytes(planned.forward));
    divided.backward(batch);
    CHECK(calls_and_bytes(group.ledger.take()) == calls_and_bytes(planned.backward));
  }
}
