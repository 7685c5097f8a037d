#include "parallel/sync/replicated_update.h"

namespace pdl {

ReplicatedUpdate::ReplicatedUpdate(const EngineContext& context)
    : context_(context), optimizer_(make_optimizer(context.training.optimizer)) {}

void ReplicatedUpdate::prepare(const Replica& replica) {
  optimizer_->allocate(context_.device, replica.store().elements(), context_.training.dtype, replica.segments());
}

std::int64_t ReplicatedUpdate::predicted_bytes(const Replica& replica) const {
  return optimizer_bytes(context_.training.optimizer, replica.store().elements(), context_.training.dtype,
                         static_cast<std::int64_t>(replica.segments().size()));
}

StepOutcome ReplicatedUpdate::apply(Replica& replica, const StepOrder& order) {
  const GradientScaling scaling = this->scaling(replica, order);
  if (!scaling.overflow) step(replica, order, scaling);
  return {.grad_norm = scaling.norm, .skipped = scaling.overflow};
}

bool ReplicatedUpdate::needs_all_gradients() const {
  const TrainingOptions& training = context_.training;
  return training.optimizer.clip_grad_norm > 0.0 || LossScaler(training.loss_scale, training.dtype).active();
}

GradientScaling ReplicatedUpdate::scaling(Replica& replica, const StepOrder& order) const {
  if (!needs_all_gradients()) return {};
  GradientScaling scaling =
      gradient_scaling(replica.gradient_square_sum(), order.loss_scale, context_.training.optimizer.clip_grad_norm);
  scaling.overflow = scaling.overflow && order.skips_overflow;
  return scaling;
}

void ReplicatedUpdate::step(Replica& replica, const StepOrder& order, const GradientScaling& scaling,
                            std::int64_t first, std::int64_t count) {
  const ParamStore& store = replica.store();
  std::function<void(Tensor)> sum_slices;
  if (replica.slices().count() > 0) {
    sum_slices = [&](Tensor norms) { replica.slices().sum_norms(norms, first); };
  }
  optimizer_->step(context_.backend, {.values = store.weights(),
                                      .grads = store.grads(),
                                      .rounded = is_half(store.dtype()) ? store.values() : Tensor(),
                                      .lr = order.lr,
                                      .grad_scale = scaling.factor,
                                      .update = order.update + 1,
                                      .first_segment = first,
                                      .segment_count = count,
                                      .sum_over_shards = sum_slices});
}

std::vector<StateTensor> ReplicatedUpdate::state(Replica& replica) const {
  std::vector<StateTensor> tensors = {{"weights", replica.store().weights()}};
  const std::vector<Tensor> moments = optimizer_->state();
  for (std::size_t i = 0; i < moments.size(); ++i) tensors.push_back({str("moment", i), moments[i]});
  return tensors;
}

std::vector<UpdateGroup> update_groups(const ParamStore& store, std::int64_t elements) {
  std::vector<UpdateGroup> groups;
  std::int64_t open = elements;
  for (int index = static_cast<int>(store.params().size()); index-- > 0;) {
    if (open >= elements) {
      groups.push_back({});
      open = 0;
    }
    groups.back().first = index;
    groups.back().count += 1;
    open += store.params()[static_cast<std::size_t>(index)].count;
  }
  return groups;
}

}  // namespace pdl
