#include "engine/nn/stage.h"

#include <algorithm>
#include <bit>

namespace pdl {
namespace {

constexpr std::int64_t kAlignment = 64;
std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// Tells the listener of a parameter once its last contribution in this pass is in: a tied one is heard of at the later
/// layer.
struct StoreReady final : LayerIo::Ready {
  void operator()(int i) override {
    const int owner = store->owner((*registered)[static_cast<std::size_t>(i)]);
    if (--(*pending)[static_cast<std::size_t>(owner)] == 0 && listener != nullptr) listener->gradient_ready(owner);
  }
  const ParamStore* store = nullptr;
  const std::vector<int>* registered = nullptr;
  std::vector<int>* pending = nullptr;
  GradientListener* listener = nullptr;
};

std::int64_t place_of(const Tensor& tensor) { return std::bit_cast<std::int64_t>(tensor.raw()); }

}  // namespace

Stage::Stage(const LayerList& layers, int first, int last, const TensorSpec& sample_input, std::int64_t max_samples,
             DType dtype, Backend& backend, const std::vector<LayerRange>& recomputed)
    : first_(first),
      last_(last),
      sample_input_(sample_input),
      max_samples_(max_samples),
      dtype_(dtype),
      backend_(backend) {
  PDL_CHECK(first >= 0 && first < last && last <= static_cast<int>(layers.size()), "layers ", first, " to ", last);
  const std::vector<Shape> shapes = layer_input_shapes(layers, sample_input, max_samples);
  input_shape_ = shapes[static_cast<std::size_t>(first)];
  std::int64_t largest_gradient = 0;
  int registered = 0;
  auto range = recomputed.begin();
  std::int64_t recomputed_end = 0;  // of the range under way
  for (int index = first; index < last; ++index) {
    const auto i = static_cast<std::size_t>(index);
    const Layer& layer = *layers[i];
    repeatable_ = repeatable_ && layer.repeatable();
    if (range != recomputed.end() && index == range->second) ++range;
    const bool is_recomputed = range != recomputed.end() && index >= range->first;
    place_layer(layer, index, shapes, is_recomputed ? &*range : nullptr, recomputed_end);
    for (std::size_t p = 0; p < layer.param_specs().size(); ++p) placed_.back().params.push_back(registered++);
    workspace_bytes_ = std::max(workspace_bytes_, layer.workspace_bytes(shapes[i], dtype, backend));
    // A gradient of this layer's input, unless nobody reads it or it lies over the input itself.
    if (index > 0 && !layer.input_grad_in_place()) {
      largest_gradient = std::max(largest_gradient, aligned(shapes[i].elements() * size_of(dtype)));
    }
  }
  scratch_bytes_ = 2 * largest_gradient;
}

/// Finds room for what the layer writes: in the slot, or where all slots recompute it.
void Stage::place_layer(const Layer& layer, int index, const std::vector<Shape>& shapes, const LayerRange* recomputed,
                        std::int64_t& recomputed_end) {
  const Shape &x = shapes[static_cast<std::size_t>(index)], &y = shapes[static_cast<std::size_t>(index) + 1];
  PlacedLayer placed;
  placed.layer = &layer;
  placed.index = index;
  const bool is_first = recomputed != nullptr && index == recomputed->first;
  const bool is_last = recomputed != nullptr && index + 1 == recomputed->second;
  if (layer.input_grad_in_place()) {
    PDL_CHECK(recomputed == nullptr && (placed_.empty() || placed_.back().again_from < 0), layer.name(),
              " overwrites its input, which cannot be recomputed then");
  }
  if (is_first) recomputed_end = 0;
  if (is_last) placed.again_from = recomputed->first - first_;
  const auto take = [&](bool in_slot, std::int64_t bytes) {
    std::int64_t& end = in_slot ? slot_bytes_ : recomputed_end;
    const Place place{in_slot, end};
    end += aligned(bytes);
    return place;
  };
  placed.y = take(recomputed == nullptr || is_last, y.elements() * size_of(dtype_));
  for (const TensorSpec& spec : layer.saved_specs(x, dtype_)) {
    placed.saved.push_back(take(recomputed == nullptr, spec.bytes()));
  }
  recomputed_bytes_ = std::max(recomputed_bytes_, recomputed_end);
  placed_.push_back(std::move(placed));
}

void Stage::allocate(Device& device) {
  for (Buffer& buffer : scratch_) buffer = device.allocate(scratch_bytes_ / 2, MemoryKind::activations);
  recomputed_ = device.allocate(recomputed_bytes_, MemoryKind::activations);
  workspace_ = device.allocate(workspace_bytes_, MemoryKind::workspace);
  if (repeatable_) repeated_.emplace(device.compute_stream());
  ranges_ = device.ranges();
}

std::vector<Shape> Stage::shapes_for(std::int64_t samples) const {
  std::vector<Shape> shapes = {input_shape_.with_first(samples)};
  for (const PlacedLayer& placed : placed_) shapes.push_back(placed.layer->output_shape(shapes.back()));
  return shapes;
}

std::vector<MicroBatch> Stage::batches_for(const MicroBatch& batch) const {
  std::vector<MicroBatch> batches = {batch};
  for (const PlacedLayer& placed : placed_) batches.push_back(placed.layer->output_batch(batches.back()));
  return batches;
}

TensorSpec Stage::input_spec(std::int64_t samples) const {
  return {first_ == 0 && sample_input_.dtype == DType::int32 ? DType::int32 : dtype_, input_shape_.with_first(samples)};
}

TensorSpec Stage::output_spec(std::int64_t samples) const { return {dtype_, shapes_for(samples).back()}; }

double Stage::forward_flops(std::int64_t samples) const {
  const std::vector<Shape> shapes = shapes_for(samples);
  double flops = 0.0;
  for (std::size_t i = 0; i < placed_.size(); ++i) flops += placed_[i].layer->flops(shapes[i]);
  return flops;
}

Tensor Stage::tensor_at(const Place& place, const TensorSpec& spec, const Slot& slot) const {
  return (place.in_slot ? slot.buffer() : recomputed_).tensor(spec.dtype, spec.shape, place.offset);
}

LayerIo Stage::layer_io(std::size_t position, const Pass& pass, const std::vector<Shape>& shapes, bool training) {
  const PlacedLayer& placed = placed_[position];
  const auto y_of = [&](std::size_t p) {
    return shapes[p + 1].empty() ? Tensor() : tensor_at(placed_[p].y, {dtype_, shapes[p + 1]}, pass.slot);
  };
  LayerIo io(backend_, pass.batches[position]);
  io.training = training;
  io.wants_input_grad = placed.index > 0;
  io.layer_index = placed.index;
  io.x = position == 0 ? pass.x : y_of(position - 1);
  io.y = y_of(position);
  params_.clear();
  for (int registered : placed.params) params_.push_back(pass.host.value(pass.store.owner(registered)));
  saved_.clear();
  const std::vector<TensorSpec> specs = placed.layer->saved_specs(shapes[position], dtype_);
  for (std::size_t s = 0; s < specs.size(); ++s) {
    saved_.push_back(tensor_at(placed.saved[s], specs[s], pass.slot));
  }
  io.params = params_;
  io.saved = saved_;
  io.workspace = workspace_.tensor(DType::uint8, Shape{workspace_bytes_});
  return io;
}

std::vector<int> Stage::contributions(const ParamStore& store) const {
  std::vector<int> counts(store.params().size(), 0);
  for (const PlacedLayer& placed : placed_) {
    for (int registered : placed.params) ++counts[static_cast<std::size_t>(store.owner(registered))];
  }
  return counts;
}

Tensor Stage::forward(const ParamStore& store, const Tensor& values, const Slot& slot, const MicroBatch& batch,
                      const Tensor& x, bool training) {
  FlatParameters host(store, values, Tensor());
  const Pass pass{store, host, slot, batches_for(batch), x};
  return repeat(pass, {training, place_of(values)}, [&] { return run_forward(pass, training); });
}

Tensor Stage::forward(const ParamStore& store, ParameterHost& host, const Slot& slot, const MicroBatch& batch,
                      const Tensor& x, bool training) {
  PDL_CHECK(recomputed_bytes_ == 0, "layers are recomputed with whole parameters only");
  return run_forward({store, host, slot, batches_for(batch), x}, training);
}

Tensor Stage::repeat(const Pass& pass, RepeatedWork::Key key, const std::function<Tensor()>& work) {
  if (!repeated_) return work();
  const MicroBatch& batch = pass.batches.front();
  for (const Tensor* tensor :
       {&pass.x, &batch.input, &batch.target, &batch.sample_ids, &batch.metrics, &batch.update}) {
    key.push_back(place_of(*tensor));
  }
  key.push_back(std::bit_cast<std::int64_t>(pass.slot.buffer().raw()));
  key.push_back(batch.size);
  key.push_back(static_cast<std::int64_t>(batch.seed));
  key.push_back(std::bit_cast<std::int64_t>(batch.gradient_scale));
  return repeated_->run(key, work);
}

Tensor Stage::run_forward(const Pass& pass, bool training) {
  const std::int64_t samples = pass.batches.front().size;
  PDL_CHECK(samples > 0 && samples <= max_samples_, "a slot for ", max_samples_, " samples was given ", samples);
  const std::vector<Shape> shapes = shapes_for(samples);
  pass.host.begin_pass(training);
  for (std::size_t position = 0; position < placed_.size(); ++position) {
    const NamedRange range(ranges_, [&] { return placed_[position].layer->name() + " forward"; });
    pass.host.before_layer(static_cast<int>(position));
    run_layer(position, pass, shapes, training);
    pass.host.after_layer(static_cast<int>(position));
  }
  return shapes.back().empty() ? Tensor() : tensor_at(placed_.back().y, {dtype_, shapes.back()}, pass.slot);
}

void Stage::run_layer(std::size_t position, const Pass& pass, const std::vector<Shape>& shapes, bool training) {
  const LayerIo io = layer_io(position, pass, shapes, training);
  if (io.batch.size > 0) placed_[position].layer->forward(io);
}

/// The range of recomputed layers that ends at `last`.
void Stage::run_again(std::size_t last, const Pass& pass, const std::vector<Shape>& shapes) {
  for (auto position = static_cast<std::size_t>(placed_[last].again_from); position <= last; ++position) {
    const NamedRange range(ranges_, [&] { return placed_[position].layer->name() + " forward again"; });
    run_layer(position, pass, shapes, true);
  }
}

InputActivation Stage::input_activation(std::size_t position, const Pass& pass,
                                        const std::vector<char>& touched) const {
  InputActivation input;
  if (position == 0) return input;
  const PlacedLayer& below = placed_[position - 1];
  const OutputActivation end = below.layer->output_activation();
  // Only relu does without the pre-activation, which is the other layer's.
  if (end.activation != Activation::relu || !placed_[position].layer->passes_activation(end.activation)) return input;
  input.activation = end.activation;
  if (end.bias >= 0) {
    const int owner = pass.store.owner(below.params[static_cast<std::size_t>(end.bias)]);
    input.dbias = pass.host.gradient(owner);
    input.accumulate = touched[static_cast<std::size_t>(owner)] != 0;
  }
  return input;
}

Tensor Stage::backward(const ParamStore& store, const Tensor& values, const Tensor& grads, std::vector<char>& touched,
                       const Slot& slot, const MicroBatch& batch, const Tensor& x, Tensor dy,
                       GradientListener* listener) {
  FlatParameters host(store, values, grads);
  const Pass pass{store, host, slot, batches_for(batch), x};
  if (listener != nullptr) return run_backward(pass, touched, dy, listener);
  RepeatedWork::Key key(touched.begin(), touched.end());
  key.insert(key.end(), {place_of(values), place_of(grads), place_of(dy)});
  const Tensor dx = repeat(pass, key, [&] { return run_backward(pass, touched, dy, nullptr); });
  for (const PlacedLayer& placed : placed_) {
    for (int registered : placed.params) touched[static_cast<std::size_t>(store.owner(registered))] = 1;
  }
  return dx;
}

Tensor Stage::backward(const ParamStore& store, ParameterHost& host, std::vector<char>& touched, const Slot& slot,
                       const MicroBatch& batch, const Tensor& x, Tensor dy, GradientListener* listener) {
  return run_backward({store, host, slot, batches_for(batch), x}, touched, dy, listener);
}

Tensor Stage::run_backward(const Pass& pass, std::vector<char>& touched, Tensor dy, GradientListener* listener) {
  const ParamStore& store = pass.store;
  const std::vector<Shape> shapes = shapes_for(pass.batches.front().size);
  std::vector<int> pending = contributions(store);
  StoreReady ready;
  ready.store = &store;
  ready.pending = &pending;
  ready.listener = listener;
  bool above_took_activation = false;
  int free_scratch = dy.defined() && dy.raw() == scratch_[0].raw() ? 1 : 0;
  for (std::size_t position = placed_.size(); position-- > 0;) {
    const PlacedLayer& placed = placed_[position];
    if (placed.again_from >= 0) run_again(position, pass, shapes);
    const NamedRange range(ranges_, [&placed] { return placed.layer->name() + " backward"; });
    pass.host.before_layer(static_cast<int>(position));
    LayerIo io = layer_io(position, pass, shapes, true);
    grads_.clear();
    accumulate_.clear();
    for (int registered : placed.params) {
      const int owner = store.owner(registered);
      grads_.push_back(pass.host.gradient(owner));
      accumulate_.push_back(touched[static_cast<std::size_t>(owner)]);
      touched[static_cast<std::size_t>(owner)] = 1;
    }
    io.grads = grads_;
    io.accumulate = accumulate_;
    ready.registered = &placed.params;
    io.ready = &ready;
    io.dy = dy;
    io.dy_is_ahead_of_activation = above_took_activation;
    io.input = input_activation(position, pass, touched);
    above_took_activation = io.input.activation != Activation::none;
    if (placed.layer->input_grad_in_place()) {
      io.dx = io.x;
    } else if (io.wants_input_grad) {
      io.dx = scratch_[free_scratch].tensor(dtype_, shapes[position]);
      free_scratch = 1 - free_scratch;
    }
    if (io.batch.size > 0) {
      placed.layer->backward(io);
    } else {
      leave_gradients(io);
    }
    pass.host.after_layer(static_cast<int>(position));
    dy = io.dx;
  }
  return dy;
}

void Stage::idle_pass(const ParamStore& store, ParameterHost& host, bool training, GradientListener* listener) {
  const int layers = static_cast<int>(placed_.size());
  host.begin_pass(training);
  for (int position = 0; position < layers; ++position) {
    host.before_layer(position);
    host.after_layer(position);
  }
  if (!training) return;
  std::vector<int> pending = contributions(store);
  for (int position = layers - 1; position >= 0; --position) {
    host.before_layer(position);
    const std::vector<int>& params = placed_[static_cast<std::size_t>(position)].params;
    for (auto registered = params.rbegin(); registered != params.rend(); ++registered) {
      const int owner = store.owner(*registered);
      if (--pending[static_cast<std::size_t>(owner)] > 0) continue;
      backend_.fill(host.gradient(owner), 0.0);
      if (listener != nullptr) listener->gradient_ready(owner);
    }
    host.after_layer(position);
  }
}

}  // namespace pdl
