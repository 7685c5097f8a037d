// Stochastic gradient descent with PyTorch's momentum: the buffer starts as the first gradient, undamped.
//
//   g = scale * grad + decay * w;  m = momentum * m + g;  w -= lr * (nesterov ? g + momentum * m : m)

#include "engine/optim/moments.h"

namespace pdl {
namespace {

class Sgd final : public Optimizer {
 public:
  explicit Sgd(const OptimizerOptions& options) : options_(options), moments_(options.momentum > 0.0 ? 1 : 0) {}

  int moments() const override { return moments_.count(); }
  void allocate(Device& device, std::int64_t elements, DType dtype, std::vector<UpdateSegment> segments) override {
    moments_.allocate(device, elements, dtype, std::move(segments));
  }
  void step(Backend& backend, const OptimizerStep& step) override {
    const std::span<const UpdateSegment> segments = moments_.updated_by(step);
    const SgdScalars scalars = {.lr = step.lr,
                                .momentum = options_.momentum,
                                .weight_decay = options_.weight_decay,
                                .grad_scale = step.grad_scale,
                                .nesterov = options_.nesterov,
                                .first_update = step.update == 1};
    const Tensor momentum = moments_.count() == 0 ? Tensor() : moments_[0];
    backend.sgd_update(step.values, weights_before(step), step.rounded, step.grads, momentum, segments.data(),
                       static_cast<std::int64_t>(segments.size()), scalars);
  }
  std::vector<Tensor> state() const override { return moments_.all(); }

 private:
  OptimizerOptions options_;
  Moments moments_;
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(const OptimizerOptions& options) { return std::make_unique<Sgd>(options); }

}  // namespace pdl
