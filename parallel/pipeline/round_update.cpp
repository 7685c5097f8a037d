#include "parallel/pipeline/round_update.h"

#include <algorithm>
#include <cmath>

#include "parallel/comm/world.h"

namespace pdl {

RoundUpdate::RoundUpdate(const EngineContext& context, const PipelinePlan& plan, StagePart& part, int rank,
                         VersionNeeds needs)
    : context_(context),
      plan_(plan),
      part_(part),
      rank_(rank),
      needs_(needs),
      ring_(part, needs.versions, context.training.dtype),
      tied_(context, plan, part, rank, needs.tied_delay),
      history_(history_length()),
      segments_(part.store.segments(context.training.optimizer.decay_biases_and_norms)),
      optimizer_(make_optimizer(context.training.optimizer)) {}

/// A stage whose ring has one slot has no room for the versions of before that its owner's lag asks for.
int RoundUpdate::history_length() const {
  return tied_.copies() && needs_.outlive_run && needs_.versions < needs_.owner_versions ? needs_.owner_versions : 0;
}

void RoundUpdate::prepare() {
  const int stage = plan_.stage_of(rank_);
  ring_.allocate(context_.device);
  optimizer_->allocate(context_.device, part_.store.elements(), context_.training.dtype, segments_);
  std::unique_ptr<Communicator> group = context_.world.split(stage, rank_, "dp");
  if (plan_.replicas_of(stage) > 1) replicas_ = std::move(group);
  tied_.prepare();
  if (history_.length() > 0) history_.allocate(context_.device, {copy().dtype(), copy().shape()});
  sums_ = context_.device.allocate(parameters() * size_of(DType::fp64), MemoryKind::workspace);
}

MemoryByKind RoundUpdate::predicted_memory() const {
  MemoryByKind memory = tied_.predicted_memory();
  memory[MemoryKind::weight_versions] += ring_.predicted_bytes();
  if (history_.length() > 0) {
    const Param& param = part_.store.params()[static_cast<std::size_t>(tied_.index())];
    memory[MemoryKind::weight_versions] += history_.length() * param.count * size_of(context_.training.dtype);
  }
  memory[MemoryKind::optimizer] +=
      optimizer_bytes(context_.training.optimizer, part_.store.elements(), context_.training.dtype,
                      static_cast<std::int64_t>(segments_.size()));
  memory[MemoryKind::workspace] += parameters() * size_of(DType::fp64);
  const int replicas = plan_.replicas_of(plan_.stage_of(rank_));
  if (context_.training.deterministic && replicas > 1) {
    memory[MemoryKind::communication] += deterministic_scratch_bytes(replicas);
  }
  return memory;
}

CommCounts RoundUpdate::predicted_traffic() const {
  CommCounts counts = tied_.predicted_traffic();
  const int replicas = plan_.replicas_of(plan_.stage_of(rank_));
  if (replicas > 1) {
    const std::int64_t bytes = part_.store.elements() * size_of(wide_dtype(context_.training.dtype));
    counts["dp.all_reduce"] = {.calls = 1, .bytes = ring_bytes("all_reduce", replicas, bytes)};
  }
  return counts;
}

void RoundUpdate::reduce(int round) {
  Stream& stream = context_.device.compute_stream();
  if (tied_.copies()) tied_.send_gradient(round);
  if (tied_.owns()) tied_.add_gradient();
  if (replicas_ && part_.store.elements() > 0) {
    replicas_->all_reduce(part_.store.grads(), ReduceOp::sum, stream).wait(stream);
  }
}

/// Without a tied copy, which counts where it is owned.
double RoundUpdate::square_sum(const Tensor& flat) {
  const auto count = static_cast<std::int64_t>(segments_.size());
  if (count == 0) return 0.0;
  Stream& stream = context_.device.compute_stream();
  const Tensor sums = sums_.tensor(DType::fp64, Shape{count});
  context_.backend.sum_of_squares(sums, flat, segments_.data(), count);
  std::vector<double> squares(segments_.size());
  context_.device.copy(squares.data(), sums.raw(), sums.bytes(), stream);
  stream.synchronize();
  double total = 0.0;
  for (std::size_t i = 0; i < squares.size(); ++i) {
    if (!tied_.copies() || static_cast<int>(i) != tied_.index()) total += squares[i];
  }
  return total;
}

void RoundUpdate::step(const RoundOrder& order, double factor, int first, int count) {
  if (count == 0) return;
  OptimizerStep step = ring_.step_from(order.version);
  step.lr = order.lr;
  step.grad_scale = factor;
  step.update = order.update + 1;
  step.first_segment = first;
  step.segment_count = count;
  optimizer_->step(context_.backend, step);
}

double RoundUpdate::apply(const RoundOrder& order) {
  GradientScaling scaling{.factor = 1.0 / order.divisor};
  if (clips()) {
    scaling =
        gradient_scaling(square_sum(part_.store.grads()), order.divisor, context_.training.optimizer.clip_grad_norm);
  }
  const int index = tied_.index();
  if (index < 0) {
    step(order, scaling.factor, 0, parameters());
  } else {
    step(order, scaling.factor, 0, index);
    step(order, scaling.factor, index + 1, parameters() - index - 1);
  }
  if (tied_.owns()) {
    // What the copy gets needs no factor any more, so that both make the same step.
    const Tensor total = part_.store.view(part_.store.grads(), index);
    if (scaling.factor != 1.0) context_.backend.scale(total, scaling.factor);
    tied_.send_total(order.version);
    step(order, 1.0, index, 1);
  }
  ring_.advance();
  return scaling.norm;
}

void RoundUpdate::apply_total(const RoundOrder& order) {
  tied_.take_total();
  step(order, 1.0, tied_.index(), 1);
}

void RoundUpdate::keep_copy(std::int64_t version) {
  if (history_.length() > 0) context_.backend.copy(history_.values(version), copy());
}

void RoundUpdate::find_copy(std::int64_t version) {
  if (history_.length() > 0) context_.backend.copy(copy(), history_.values(version));
}

double RoundUpdate::drift() {
  if (ring_.distinct() == 1 || is_half(context_.training.dtype) || part_.store.elements() == 0) return 0.0;
  const Tensor newest = ring_.values(ring_.newest());
  const Tensor oldest = ring_.values(ring_.newest() - ring_.distinct() + 1);
  const Tensor difference = part_.store.grads();
  context_.backend.copy(difference, newest);
  context_.backend.add(difference, oldest, -1.0);
  const double size = square_sum(oldest);
  return size == 0.0 ? 0.0 : std::sqrt(square_sum(difference) / size);
}

std::vector<StateTensor> RoundUpdate::state() const {
  std::vector<StateTensor> tensors = {{"weights", ring_.weights()}};
  const std::vector<Tensor> moments = optimizer_->state();
  for (std::size_t i = 0; i < moments.size(); ++i) tensors.push_back({str("moment", i), moments[i]});
  if (!needs_.outlive_run) return tensors;
  for (int age = 1; age < ring_.slots(); ++age) {
    tensors.push_back({str("weights of ", age, " updates before"), ring_.values(ring_.newest() - age)});
  }
  for (int i = 0; i < history_.length(); ++i) tensors.push_back({str("tied copy ", i), history_.values(i)});
  return tensors;
}

void RoundUpdate::restored(std::int64_t rounds) {
  const std::int64_t older = std::min<std::int64_t>(rounds, ring_.slots() - 1);
  ring_.restored(context_.backend, needs_.outlive_run ? static_cast<int>(older) : 0);
}

}  // namespace pdl
