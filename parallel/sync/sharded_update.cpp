#include "parallel/sync/sharded_update.h"

#include <cmath>

#include "engine/optim/loss_scaler.h"

namespace pdl {

ShardedUpdate::ShardedUpdate(const EngineContext& context, const ParamStore& store, const ShardMap& map,
                             const ShardedWeights& weights, const GradientShards& gradients)
    : context_(context), store_(store), map_(map), weights_(weights), gradients_(gradients) {
  norm_segments_.resize(store.params().size());
  for (const ShardBlock& block : map.blocks()) {
    optimizers_.push_back(make_optimizer(context.training.optimizer));
    std::vector<UpdateSegment> segments = segments_of(block);
    for (std::size_t i = 0; i < segments.size(); ++i) {
      segments[i].offset += gradients.shard_begin(block);
      norm_segments_[static_cast<std::size_t>(block.params[i])] = segments[i];
    }
  }
}

std::vector<UpdateSegment> ShardedUpdate::segments_of(const ShardBlock& block) const {
  return map_.segments(store_, block, context_.world.rank(), context_.training.optimizer.decay_biases_and_norms);
}

MemoryByKind ShardedUpdate::predicted_memory() const {
  MemoryByKind memory;
  for (const ShardBlock& block : map_.blocks()) {
    memory[MemoryKind::optimizer] += optimizer_bytes(context_.training.optimizer, block.slice, context_.training.dtype,
                                                     static_cast<std::int64_t>(block.params.size()));
  }
  memory[MemoryKind::workspace] = static_cast<std::int64_t>(norm_segments_.size()) * size_of(DType::fp64);
  return memory;
}

CommCount ShardedUpdate::predicted_all_reduces() const {
  CommCount count = predicted_in_steps();
  const bool looks_at_gradients =
      context_.training.optimizer.clip_grad_norm > 0.0 || context_.training.loss_scale.name != "none";
  if (looks_at_gradients) add_all_reduce(norm_segments_.size(), count);
  return count;
}

CommCount ShardedUpdate::predicted_in_steps() const {
  CommCount count;
  if (context_.training.optimizer.name != "lamb") return count;
  for (const ShardBlock& block : map_.blocks()) add_all_reduce(2 * block.params.size(), count);
  return count;
}

void ShardedUpdate::add_all_reduce(std::size_t numbers, CommCount& count) const {
  if (context_.world.size() == 1) return;
  count.calls += 1;
  count.bytes += ring_bytes("all_reduce", context_.world.size(), static_cast<std::int64_t>(numbers * sizeof(double)));
}

void ShardedUpdate::prepare() {
  for (std::size_t b = 0; b < optimizers_.size(); ++b) {
    const ShardBlock& block = map_.blocks()[b];
    optimizers_[b]->allocate(context_.device, block.slice, context_.training.dtype, segments_of(block));
  }
  norms_ = context_.device.allocate(static_cast<std::int64_t>(norm_segments_.size()) * size_of(DType::fp64),
                                    MemoryKind::workspace);
}

/// Sums of squares of this rank's parts of all parameters.
Tensor ShardedUpdate::own_squares() {
  const auto count = static_cast<std::int64_t>(norm_segments_.size());
  const Tensor squares = norms_.tensor(DType::fp64, Shape{count});
  context_.backend.sum_of_squares(squares, gradients_.shard(), norm_segments_.data(), count);
  return squares;
}

std::vector<double> ShardedUpdate::read(const Tensor& numbers) {
  std::vector<double> host(static_cast<std::size_t>(numbers.elements()));
  Stream& stream = context_.device.compute_stream();
  context_.device.copy(host.data(), numbers.raw(), numbers.bytes(), stream);
  stream.synchronize();
  return host;
}

double ShardedUpdate::sum_of_squares() {
  Stream& stream = context_.device.compute_stream();
  const Tensor squares = own_squares();
  if (context_.world.size() > 1) context_.world.all_reduce(squares, ReduceOp::sum, stream).wait(stream);
  double sum = 0.0;
  for (double square : read(squares)) sum += square;
  return sum;
}

StepOutcome ShardedUpdate::apply(const StepOrder& order, const std::function<void(int block)>& updated) {
  const double clip = context_.training.optimizer.clip_grad_norm;
  GradientScaling scaling;
  if (clip > 0.0 || order.skips_overflow) scaling = gradient_scaling(sum_of_squares(), order.loss_scale, clip);
  if (order.skips_overflow && scaling.overflow) return {.grad_norm = scaling.norm, .skipped = true};
  for (int block = 0; block < static_cast<int>(optimizers_.size()); ++block) {
    step(order, scaling, block);
    updated(block);
  }
  return {.grad_norm = scaling.norm};
}

void ShardedUpdate::step(const StepOrder& order, const GradientScaling& scaling, int index) {
  const ShardBlock& block = map_.blocks()[static_cast<std::size_t>(index)];
  OptimizerStep step = {.values = weights_.weights(index),
                        .grads = gradients_.shard().range(gradients_.shard_begin(block), block.slice),
                        .rounded = weights_.rounded(index),
                        .lr = order.lr,
                        .grad_scale = scaling.factor,
                        .update = order.update + 1};
  if (context_.world.size() > 1) {
    step.sum_over_shards = [this](const Tensor& norms) {
      Stream& stream = context_.device.compute_stream();
      context_.world.all_reduce(norms, ReduceOp::sum, stream).wait(stream);
    };
  }
  optimizers_[static_cast<std::size_t>(index)]->step(context_.backend, step);
}

std::string ShardedUpdate::describe_nonfinite() {
  const std::vector<double> squares = read(own_squares());
  for (std::size_t i = 0; i < squares.size(); ++i) {
    if (!std::isfinite(squares[i])) return str("first in the gradient of ", store_.params()[i].spec.name);
  }
  return "";
}

std::vector<StateTensor> ShardedUpdate::state() const {
  std::vector<StateTensor> tensors;
  for (std::size_t b = 0; b < optimizers_.size(); ++b) {
    tensors.push_back({str("weights of block ", b), weights_.weights(static_cast<int>(b))});
    const std::vector<Tensor> moments = optimizers_[b]->state();
    for (std::size_t i = 0; i < moments.size(); ++i) tensors.push_back({str("moment", i, " of block ", b), moments[i]});
  }
  return tensors;
}

}  // namespace pdl
