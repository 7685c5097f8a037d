// LAMB (You et al. 2020): Adam's direction, with each parameter's step scaled to the parameter's own norm.
//
//   m, v as in Adam from g = scale * grad
//   d = m^ / (sqrt(v^) + epsilon) + decay * w;  w -= lr * (|w| / |d|) * d       per parameter; ratio 1 where a norm is
//   0
//
// The norms are those of whole parameters. Where a parameter is spread over ranks, each rank has the squares of its
// part, and they are summed between the two halves. The direction takes the place of the gradient, which nobody needs
// afterwards.

#include "engine/optim/moments.h"

namespace pdl {
namespace {

class Lamb final : public Optimizer {
 public:
  explicit Lamb(const OptimizerOptions& options) : options_(options), moments_(2) {}

  int moments() const override { return moments_.count(); }
  void allocate(Device& device, std::int64_t elements, DType dtype, std::vector<UpdateSegment> segments) override {
    moments_.allocate(device, elements, dtype, std::move(segments));
    norms_ = device.allocate(2 * moments_.segment_count() * size_of(DType::fp64), MemoryKind::optimizer);
  }
  void step(Backend& backend, const OptimizerStep& step) override {
    const std::span<const UpdateSegment> updated = moments_.updated_by(step);
    const AdamScalars scalars = {.lr = step.lr,
                                 .beta1 = options_.beta1,
                                 .beta2 = options_.beta2,
                                 .epsilon = options_.epsilon,
                                 .weight_decay = options_.weight_decay,
                                 .decoupled_decay = true,
                                 .update = step.update,
                                 .grad_scale = step.grad_scale};
    const auto count = static_cast<std::int64_t>(updated.size());
    const UpdateSegment* const segments = updated.data();
    const Tensor norms = norms_.tensor(DType::fp64, {moments_.segment_count(), 2}).rows(step.first_segment, count);
    const Tensor& direction = step.grads;
    backend.lamb_direction(direction, norms, weights_before(step), step.grads, moments_[0], moments_[1], segments,
                           count, scalars);
    if (step.sum_over_shards) step.sum_over_shards(norms);
    backend.lamb_apply(step.values, weights_before(step), step.rounded, direction, norms, segments, count, step.lr);
  }
  std::vector<Tensor> state() const override { return moments_.all(); }

 private:
  OptimizerOptions options_;
  Moments moments_;
  Buffer norms_;
};

}  // namespace

std::unique_ptr<Optimizer> make_lamb(const OptimizerOptions& options) { return std::make_unique<Lamb>(options); }

}  // namespace pdl
