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
  const double clip = context_.training.optimizer.clip_grad_norm;
  GradientScaling scaling;
  if (clip > 0.0 || order.skips_overflow) {
    scaling = gradient_scaling(replica.gradient_square_sum(), order.loss_scale, clip);
  }
  if (order.skips_overflow && scaling.overflow) return {.grad_norm = scaling.norm, .skipped = true};
  const ParamStore& store = replica.store();
  optimizer_->step(context_.backend, {.values = store.weights(),
                                      .grads = store.grads(),
                                      .rounded = is_half(store.dtype()) ? store.values() : Tensor(),
                                      .lr = order.lr,
                                      .grad_scale = scaling.factor,
                                      .update = order.update + 1});
  return {.grad_norm = scaling.norm};
}

std::vector<StateTensor> ReplicatedUpdate::state(Replica& replica) const {
  std::vector<StateTensor> tensors = {{"weights", replica.store().weights()}};
  const std::vector<Tensor> moments = optimizer_->state();
  for (std::size_t i = 0; i < moments.size(); ++i) tensors.push_back({str("moment", i), moments[i]});
  return tensors;
}

}  // namespace pdl
