#pragma once
// Fully-connected layers whose neurons are divided over ranks that divide the samples everywhere else: with few samples
// and large layers it is cheaper to send activations than gradients of weights.
//
//   R ranks have b samples each, B = R b together; rank r holds rows W_r [O_r, I] of each weight, and their biases
//
//   first layer    X = all-gather of x [b, I] over samples;    Y_r = activation(X W_r^T + b_r)  [B, O_r]
//   next layers    X = all-gather of X_r [B, I_r] over neurons;  Y_r as above
//   last layer     y [b, O] = all-to-all of Y_r: each rank gets every output of its own samples
//   between them   dropout on [B, O_r], with the masks of the undivided tensor
//   backward       dY_r [B, O_r] = all-to-all of dy [b, O] behind the last layer
//                  dW_r = dY_r^T X is the sum over all samples already: no all-reduce
//                  dX = sum over ranks of dY_r W_r: reduce-scatter, over neurons, and over samples in front of the
//                  first
//
// Parts are those of split_evenly, so sizes need not divide. All ranks have equally many samples: BatchFeeder fills up.
// Source: LBANN's data_layout "model_parallel" (there in two dimensions); Krizhevsky, "One weird trick for
// parallelizing convolutional neural networks", arXiv:1404.5997 (2014).

#include <memory>
#include <string>
#include <vector>

#include "engine/device/device.h"
#include "engine/nn/model.h"
#include "parallel/comm/counting_communicator.h"

namespace pdl {

/// A layer at the fully-connected end of a model.
struct FullyConnected {
  std::string name;
  std::int64_t in = 0, out = 0;
  bool first = false, last = false;
};

class NeuronParallelFactory final : public LayerFactory {
 public:
  /// Divides the fully-connected end of `model`: the linear layers in front of its loss, with nothing but dropouts
  /// between them. Each needs as many outputs as there are ranks. On one rank all layers are the dense ones.
  NeuronParallelFactory(const ModelDescription& model, Communicator& group, Device& device);

  std::unique_ptr<Layer> linear(std::string name, const LinearOptions& options) const override;
  std::unique_ptr<Layer> dropout(std::string name, double rate, Split below) const override;

  /// The layers that are divided, in order; empty when the model ends otherwise.
  const std::vector<FullyConnected>& layers() const { return layers_; }
  /// Why the model cannot be divided so, with what can be done; empty when it can.
  std::string obstacle(const std::string& model) const;
  /// What one forward and backward pass over `samples` samples on each rank sends.
  CommCounts traffic(std::int64_t samples, DType dtype) const;

 private:
  struct Divided {
    std::string name;
    std::int64_t width = 0;
  };
  std::vector<FullyConnected> layers_;
  std::vector<Divided> dropouts_;  ///< between the layers, with the width of what they drop from
  Communicator& group_;
  Device& device_;
};

}  // namespace pdl
