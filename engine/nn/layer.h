#pragma once
// A layer is code without memory: values, gradients, saved activations and workspace are passed in through LayerIo. So
// the same Linear runs on a data-parallel replica, on gathered shards, on a stashed weight version and on a recomputed
// slot.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/nn/param.h"

namespace pdl {

/// The samples of one forward pass, on the device, and what turns them into a gradient.
struct MicroBatch {
  std::int64_t size = 0;  ///< N samples
  Tensor input;           ///< [N, ...] of the first layer's input; undefined away from the first stage
  Tensor target;          ///< int32 [N] or [N, T]; undefined away from the last stage
  Tensor sample_ids;      ///< int64 [N] global sample ids
  /// int64 [R N] ids of the R ranks whose samples a layer takes together, rank by rank; undefined where none does.
  Tensor group_sample_ids;
  Tensor metrics;  ///< fp64 [2]: += sum of losses, += number of correct predictions
  std::uint64_t seed = 0;
  Tensor update;                ///< int64 [1], dropout key: the optimizer update that these samples belong to
  double gradient_scale = 1.0;  ///< loss scale / (losses in the global batch): sums of gradients are then scaled means
};

/// Told when a parameter's gradient is complete for this backward pass, in the order in which that happens.
class GradientListener {
 public:
  virtual ~GradientListener() = default;
  /// `index` into ParamStore::params().
  virtual void gradient_ready(int index) = 0;
};

/// How a layer's output ends, for the layer above: y = activation(pre_activation), pre_activation = ... + params[bias].
struct OutputActivation {
  Activation activation = Activation::none;
  int bias = -1;  ///< place in the layer's parameters; -1: it has none
};

/// What a layer's x was made of, when backward is to go through that: x = activation(pre_activation), dx is the
/// gradient of pre_activation.
struct InputActivation {
  Activation activation = Activation::none;  ///< none: dx is the gradient of x
  Tensor pre_activation;                     ///< for gelu_tanh; for relu x, or the largest of some x, tells enough
  Tensor dbias;                              ///< gradient of the bias in it, (+)= column sums of dx; may be undefined
  bool accumulate = false;                   ///< of dbias
};

/// Everything a layer may touch in one call.
struct LayerIo {
  LayerIo(Backend& backend_in, const MicroBatch& batch_in) : backend(backend_in), batch(batch_in) {}

  Backend& backend;
  const MicroBatch& batch;
  bool training = true;          ///< false: no dropout, nothing needs saving
  bool wants_input_grad = true;  ///< false for the first layer: dx is not computed
  int layer_index = 0;           ///< place in the model: dropout sites are layer_index * 8 + k

  Tensor x, y;      ///< forward: input, output; backward: both as they were
  Tensor dx, dy;    ///< backward only; the layer may overwrite dy; dx overwrites, and may lie over x
  Tensor residual;  ///< forward of a layer that adds_residual: y = residual + what the layer computes, when defined
  InputActivation input;  ///< backward of a layer that passes_activation
  /// The layer above has gone through this layer's output_activation: dy is the gradient ahead of it, and the bias's
  /// gradient is written. The layer still announces that one.
  bool dy_is_ahead_of_activation = false;
  std::span<const Tensor> params;    ///< in the order of param_specs
  std::span<const Tensor> grads;     ///< likewise
  std::span<const char> accumulate;  ///< likewise: 1 when this gradient already holds a part of the sum
  std::span<const Tensor> saved;     ///< in the order of saved_specs
  Tensor workspace;                  ///< uint8, workspace_bytes

  /// Called by the layer once grads[i] is final for this call, last parameter first.
  struct Ready {
    virtual ~Ready() = default;
    virtual void operator()(int i) = 0;
  };
  Ready* ready = nullptr;
  void grad_ready(int i) const {
    if (ready != nullptr) (*ready)(i);
  }

  DropoutKey dropout_key(double rate, int place) const;
};

/// Backward of a layer that has no samples here: nothing is added to its gradients.
void leave_gradients(const LayerIo& io);

/// Hyper-parameters only. Shapes are those of the tensors passed in, so the same layer serves any batch and sequence
/// length.
class Layer {
 public:
  virtual ~Layer() = default;
  virtual std::string name() const = 0;  ///< unique in the model: "features.0", "h.3"
  virtual std::vector<ParamSpec> param_specs() const { return {}; }
  virtual Shape output_shape(const Shape& x) const = 0;
  /// Tensors that forward writes and backward reads, besides x and y. `dtype` is the compute type.
  virtual std::vector<TensorSpec> saved_specs(const Shape& x, DType dtype) const = 0;
  virtual std::int64_t workspace_bytes(const Shape& x, DType dtype, Backend& backend) const;
  /// Multiply-adds count 2. Of the forward pass; the backward pass of every layer here costs twice that.
  virtual double flops(const Shape& x) const = 0;
  /// False when what forward or backward queues is not the same each time, or waits for other ranks: then the layer's
  /// stage is not recorded (device/repeated_work.h).
  virtual bool repeatable() const { return true; }
  /// True for a layer of several layers, a transformer block: what is recomputed, is recomputed by such.
  virtual bool is_block() const { return false; }
  /// The samples that the layers behind this one work on: all of the micro-batch's, unless the layer is one that deals
  /// whole samples out over ranks. May be none.
  virtual MicroBatch output_batch(const MicroBatch& batch) const { return batch; }
  /// True when forward already wrote the input gradient over x (the loss): dx is x, backward does nothing.
  virtual bool input_grad_in_place() const { return false; }
  /// True when forward looks at io.residual. A caller that finds false adds it itself. Backward is the same either way:
  /// the residual's gradient is dy.
  virtual bool adds_residual() const { return false; }
  /// How y ends, when backward can leave that to the layer above (dy_is_ahead_of_activation).
  virtual OutputActivation output_activation() const { return {}; }
  /// True when backward can go through such an end of the layer below (io.input).
  virtual bool passes_activation(Activation) const { return false; }

  virtual void forward(const LayerIo& io) const = 0;
  virtual void backward(const LayerIo& io) const = 0;
};

}  // namespace pdl
