#include "parallel/shard/neuron_parallel.h"

#include <algorithm>
#include <utility>

#include "engine/data/batch_plan.h"
#include "engine/nn/layers/elementwise.h"
#include "engine/nn/layers/linear.h"

namespace pdl {
namespace {

constexpr std::int64_t kAlignment = 64;
std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// How `extent` neurons are divided over the ranks of a group.
struct Division {
  Division(std::int64_t extent_in, const Communicator& group)
      : extent(extent_in), ranks(group.size()), own(part(group.rank())) {}
  Part part(int rank) const { return split_evenly(extent, ranks, rank); }
  std::int64_t largest() const { return part(0).count; }
  bool even() const { return extent % ranks == 0; }

  std::int64_t extent;
  int ranks;
  Part own;
};

/// The columns of a matrix [rows, width] from `first` on, as copy_block wants them.
Tensor from_column(const Tensor& matrix, std::int64_t first) { return matrix.range(first, matrix.elements() - first); }

class NeuronParallelLinear final : public Layer {
 public:
  NeuronParallelLinear(FullyConnected place, LinearOptions options, Communicator& group, Device& device)
      : place_(std::move(place)),
        options_(options),
        inputs_(options.in, group),
        outputs_(options.out, group),
        group_(group),
        stream_(device.compute_stream()) {
    PDL_CHECK(options.activation != Activation::gelu_tanh, place_.name, " keeps no pre-activation");
  }

  std::string name() const override { return place_.name; }
  std::vector<ParamSpec> param_specs() const override {
    std::vector<ParamSpec> specs = Linear(place_.name, options_).param_specs();
    for (ParamSpec& spec : specs) spec.slice = {.axis = 0, .begin = outputs_.own.begin, .count = outputs_.own.count};
    return specs;
  }
  Shape output_shape(const Shape& x) const override {
    return place_.last ? Shape{local(x), options_.out} : Shape{all(x), outputs_.own.count};
  }
  /// The gathered input.
  std::vector<TensorSpec> saved_specs(const Shape& x, DType dtype) const override {
    return {{dtype, {all(x), options_.in}}};
  }
  std::int64_t workspace_bytes(const Shape& x, DType dtype, Backend&) const override {
    return scratch(x, dtype, nullptr).bytes;
  }
  double flops(const Shape& x) const override {
    return 2.0 * static_cast<double>(all(x) * options_.in) * static_cast<double>(outputs_.own.count);
  }
  bool repeatable() const override { return false; }
  void forward(const LayerIo& io) const override;
  void backward(const LayerIo& io) const override;

 private:
  struct Scratch {
    Tensor blocks;    // [R, B I_0]: of each rank its [B, I_r], which may leave a rest; not in the first layer
    Tensor partial;   // [B, I]: this rank's addend of the input gradient
    Tensor own;       // [B, O_r]: this rank's outputs or their gradient; in the last layer
    Tensor exchange;  // [b O]: of each rank its [b, O_r]; in the last layer
    std::int64_t bytes = 0;
  };
  Scratch scratch(const Shape& x, DType dtype, void* memory) const;
  Scratch scratch(const LayerIo& io) const { return scratch(io.x.shape(), io.x.dtype(), io.workspace.raw()); }

  /// Samples of this rank and of all, for the input of the layer.
  std::int64_t local(const Shape& x) const { return place_.first ? x[0] : x[0] / outputs_.ranks; }
  std::int64_t all(const Shape& x) const { return local(x) * outputs_.ranks; }
  Tensor block(const Tensor& blocks, int rank) const {
    const std::int64_t each = blocks.elements() / inputs_.ranks;
    return blocks.range(rank * each, each);
  }

  void gather_input(const LayerIo& io, const Scratch& s) const;
  void hand_out_outputs(const LayerIo& io, const Scratch& s) const;
  void collect_output_gradient(const LayerIo& io, const Scratch& s) const;
  Work begin_sum(const LayerIo& io, const Scratch& s) const;
  void copy_exchange(const LayerIo& io, const Scratch& s, const Tensor& samples, bool into_samples) const;

  FullyConnected place_;
  LinearOptions options_;
  Division inputs_, outputs_;
  Communicator& group_;
  Stream& stream_;
};

NeuronParallelLinear::Scratch NeuronParallelLinear::scratch(const Shape& x, DType dtype, void* memory) const {
  Scratch s;
  const auto take = [&](std::initializer_list<std::int64_t> extents) {
    const Tensor tensor(memory == nullptr ? nullptr : static_cast<char*>(memory) + s.bytes, dtype, Shape(extents));
    s.bytes += aligned(tensor.bytes());
    return tensor;
  };
  const std::int64_t samples = all(x);
  if (!place_.first) s.blocks = take({inputs_.ranks, samples * inputs_.largest()});
  s.partial = take({samples, options_.in});
  if (place_.last) s.own = take({samples, outputs_.own.count});
  if (place_.last) s.exchange = take({local(x) * options_.out});
  return s;
}

void NeuronParallelLinear::forward(const LayerIo& io) const {
  const Scratch s = scratch(io);
  gather_input(io, s);
  io.backend.linear_forward(place_.last ? s.own : io.y, Tensor(), io.saved[0], io.params[0],
                            options_.bias ? io.params[1] : Tensor(), options_.activation);
  if (place_.last) hand_out_outputs(io, s);
}

void NeuronParallelLinear::backward(const LayerIo& io) const {
  const Scratch s = scratch(io);
  if (options_.activation != Activation::none) {
    io.backend.activation_backward(io.dy, io.dy, io.y, options_.activation);
  }
  if (place_.last) collect_output_gradient(io, s);
  const Tensor dy = place_.last ? s.own : io.dy;  // [B, O_r]
  // The data gradient comes first: it is added up while this rank computes the weight gradient, which needs no sum.
  Work sum;
  if (io.wants_input_grad) {
    io.backend.linear_backward_data(s.partial, dy, io.params[0]);
    sum = begin_sum(io, s);
  }
  io.backend.linear_backward_weight(io.grads[0], options_.bias ? io.grads[1] : Tensor(), dy, io.saved[0],
                                    io.accumulate[0] != 0);
  if (options_.bias) io.grad_ready(1);
  io.grad_ready(0);
  sum.wait(stream_);
  if (io.wants_input_grad && !place_.first && !inputs_.even()) {
    io.backend.copy(io.dx, block(s.blocks, group_.rank()).range(0, io.dx.elements()));
  }
}

void NeuronParallelLinear::gather_input(const LayerIo& io, const Scratch& s) const {
  const Tensor& gathered = io.saved[0];
  if (place_.first) {
    group_.all_gather(gathered, io.x, stream_).wait(stream_);
    return;
  }
  // Blocks of different widths are sent as if all were as wide as the widest.
  const Tensor own = block(s.blocks, group_.rank());
  if (!inputs_.even()) io.backend.copy(own.range(0, io.x.elements()), io.x);
  group_.all_gather(s.blocks, inputs_.even() ? io.x : own, stream_).wait(stream_);
  for (int rank = 0; rank < inputs_.ranks; ++rank) {
    const Part part = inputs_.part(rank);
    io.backend.copy_block(from_column(gathered, part.begin), options_.in, block(s.blocks, rank), part.count,
                          gathered.shape()[0], part.count);
  }
}

/// The sum over ranks of `partial`, on its way into dx, or into this rank's block when blocks leave a rest.
Work NeuronParallelLinear::begin_sum(const LayerIo& io, const Scratch& s) const {
  if (place_.first) return group_.reduce_scatter(io.dx, s.partial, ReduceOp::sum, stream_);
  for (int rank = 0; rank < inputs_.ranks; ++rank) {
    const Part part = inputs_.part(rank);
    io.backend.copy_block(block(s.blocks, rank), part.count, from_column(s.partial, part.begin), options_.in,
                          s.partial.shape()[0], part.count);
  }
  const Tensor own = inputs_.even() ? io.dx : block(s.blocks, group_.rank());
  return group_.reduce_scatter(own, s.blocks, ReduceOp::sum, stream_);
}

/// Between [b, O] and the blocks [b, O_r] of `exchange`.
void NeuronParallelLinear::copy_exchange(const LayerIo& io, const Scratch& s, const Tensor& samples,
                                         bool into_samples) const {
  const std::int64_t rows = samples.shape()[0];
  for (int rank = 0; rank < outputs_.ranks; ++rank) {
    const Part part = outputs_.part(rank);
    const Tensor columns = from_column(samples, part.begin);
    const Tensor packed = s.exchange.range(rows * part.begin, rows * part.count);
    if (into_samples) {
      io.backend.copy_block(columns, options_.out, packed, part.count, rows, part.count);
    } else {
      io.backend.copy_block(packed, part.count, columns, options_.out, rows, part.count);
    }
  }
}

void NeuronParallelLinear::hand_out_outputs(const LayerIo& io, const Scratch& s) const {
  std::vector<std::int64_t> sent, received;
  for (int rank = 0; rank < outputs_.ranks; ++rank) {
    sent.push_back(io.y.shape()[0] * outputs_.own.count);
    received.push_back(io.y.shape()[0] * outputs_.part(rank).count);
  }
  group_.all_to_all(s.exchange, received, s.own, sent, stream_).wait(stream_);
  copy_exchange(io, s, io.y, true);
}

void NeuronParallelLinear::collect_output_gradient(const LayerIo& io, const Scratch& s) const {
  std::vector<std::int64_t> sent, received;
  for (int rank = 0; rank < outputs_.ranks; ++rank) {
    sent.push_back(io.dy.shape()[0] * outputs_.part(rank).count);
    received.push_back(io.dy.shape()[0] * outputs_.own.count);
  }
  copy_exchange(io, s, io.dy, false);
  group_.all_to_all(s.own, received, s.exchange, sent, stream_).wait(stream_);
}

/// Dropout between two divided layers: on the samples of all ranks and the neurons of this one.
class NeuronParallelDropout final : public Layer {
 public:
  NeuronParallelDropout(std::string name, double rate, std::int64_t width, const Communicator& group)
      : name_(std::move(name)), rate_(rate), neurons_(width, group) {}
  std::string name() const override { return name_; }
  Shape output_shape(const Shape& x) const override { return x; }
  std::vector<TensorSpec> saved_specs(const Shape&, DType) const override { return {}; }
  double flops(const Shape&) const override { return 0.0; }
  void forward(const LayerIo& io) const override { io.backend.dropout(io.y, io.x, key(io)); }
  void backward(const LayerIo& io) const override {
    if (io.wants_input_grad) io.backend.dropout(io.dx, io.dy, key(io));
  }

 private:
  DropoutKey key(const LayerIo& io) const {
    DropoutKey key = io.dropout_key(rate_, 0);
    key.sample_ids = io.batch.group_sample_ids.data<std::int64_t>();
    key.samples = io.x.shape()[0];
    key.local_width = neurons_.own.count;
    key.full_width = neurons_.extent;
    key.first_column = neurons_.own.begin;
    return key;
  }

  std::string name_;
  double rate_;
  Division neurons_;
};

const Linear* as_linear(const std::unique_ptr<Layer>& layer) { return dynamic_cast<const Linear*>(layer.get()); }

}  // namespace

NeuronParallelFactory::NeuronParallelFactory(const ModelDescription& model, Communicator& group, Device& device)
    : group_(group), device_(device) {
  const LayerList layers = model.build(LayerFactory());
  std::size_t begin = layers.size() - 1;  // the loss
  while (begin > 0 && (as_linear(layers[begin - 1]) != nullptr ||
                       dynamic_cast<const Dropout*>(layers[begin - 1].get()) != nullptr)) {
    --begin;
  }
  std::vector<std::string> dropouts;  // behind the last linear layer so far
  for (std::size_t i = begin; i + 1 < layers.size(); ++i) {
    const Linear* const linear = as_linear(layers[i]);
    if (linear == nullptr) {
      dropouts.push_back(layers[i]->name());
      continue;
    }
    for (std::string& name : dropouts) {
      if (!layers_.empty()) dropouts_.push_back({std::move(name), layers_.back().out});
    }
    dropouts.clear();
    const Shape weight = linear->param_specs().front().global_shape;
    layers_.push_back({.name = linear->name(), .in = weight[1], .out = weight[0], .first = layers_.empty()});
  }
  if (!layers_.empty()) layers_.back().last = true;
}

std::unique_ptr<Layer> NeuronParallelFactory::linear(std::string name, const LinearOptions& options) const {
  const auto place = std::find_if(layers_.begin(), layers_.end(),
                                  [&](const FullyConnected& candidate) { return candidate.name == name; });
  if (place == layers_.end() || group_.size() == 1) return LayerFactory::linear(std::move(name), options);
  PDL_CHECK(options.out >= group_.size(), name, ": ", options.out, " outputs for ", group_.size(), " ranks");
  return std::make_unique<NeuronParallelLinear>(*place, options, group_, device_);
}

std::unique_ptr<Layer> NeuronParallelFactory::dropout(std::string name, double rate, Split below) const {
  const auto place = std::find_if(dropouts_.begin(), dropouts_.end(),
                                  [&](const Divided& candidate) { return candidate.name == name; });
  if (place == dropouts_.end() || group_.size() == 1) return LayerFactory::dropout(std::move(name), rate, below);
  return std::make_unique<NeuronParallelDropout>(std::move(name), rate, place->width, group_);
}

std::string NeuronParallelFactory::obstacle(const std::string& model) const {
  if (layers_.empty()) return str(model, " does not end with fully-connected layers; take data");
  for (const FullyConnected& layer : layers_) {
    if (layer.out >= group_.size()) continue;
    return str("the ", layer.out, " outputs of ", layer.name, " cannot be divided over ", group_.size(),
               " ranks; take data, or at most ", layer.out, " ranks");
  }
  return "";
}

CommCounts NeuronParallelFactory::traffic(std::int64_t samples, DType dtype) const {
  CommCounts counts;
  const int ranks = group_.size();
  if (ranks == 1) return counts;
  const auto add = [&](const char* operation, std::int64_t bytes) {
    CommCount& count = counts[group_.axis() + "." + operation];
    count.calls += 1;
    count.bytes += bytes;
  };
  const std::int64_t all = ranks * samples;
  for (const FullyConnected& layer : layers_) {
    const Division inputs(layer.in, group_), outputs(layer.out, group_);
    const std::int64_t gathered = (layer.first ? all * layer.in : ranks * all * inputs.largest()) * size_of(dtype);
    for (const char* operation : {"all_gather", "reduce_scatter"})
      add(operation, ring_bytes(operation, ranks, gathered));
    if (!layer.last) continue;
    add("all_to_all", (all - samples) * outputs.own.count * size_of(dtype));
    add("all_to_all", samples * (layer.out - outputs.own.count) * size_of(dtype));
  }
  return counts;
}

}  // namespace pdl
