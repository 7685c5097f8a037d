// Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019), with bias correction.
//
//   adam:   g = scale * grad + decay * w          adamw:  g = scale * grad;  w -= lr * decay * w
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   w -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

#include "engine/optim/moments.h"

namespace pdl {
namespace {

class Adam final : public Optimizer {
 public:
  explicit Adam(const OptimizerOptions& options) : options_(options), moments_(2) {}

  int moments() const override { return moments_.count(); }
  void allocate(Device& device, std::int64_t elements, DType dtype, std::vector<UpdateSegment> segments) override {
    moments_.allocate(device, elements, dtype, std::move(segments));
  }
  void step(Backend& backend, const OptimizerStep& step) override {
    const std::span<const UpdateSegment> segments = moments_.updated_by(step);
    const AdamScalars scalars = {.lr = step.lr,
                                 .beta1 = options_.beta1,
                                 .beta2 = options_.beta2,
                                 .epsilon = options_.epsilon,
                                 .weight_decay = options_.weight_decay,
                                 .decoupled_decay = options_.name == "adamw",
                                 .update = step.update,
                                 .grad_scale = step.grad_scale};
    backend.adam_update(step.values, weights_before(step), step.rounded, step.grads, moments_[0], moments_[1],
                        segments.data(), static_cast<std::int64_t>(segments.size()), scalars);
  }
  std::vector<Tensor> state() const override { return moments_.all(); }

 private:
  OptimizerOptions options_;
  Moments moments_;
};

}  // namespace

std::unique_ptr<Optimizer> make_adam(const OptimizerOptions& options) { return std::make_unique<Adam>(options); }

}  // namespace pdl
