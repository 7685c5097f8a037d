#pragma once
// Where the parameters of a stage lie while its layers run. An engine that holds only parts of them brings them in
// before a layer uses them and lets go of them afterwards; one that holds them whole has nothing to do.

#include "engine/nn/param.h"

namespace pdl {

/// Asked and told by a Stage. Layers run in one fixed order: forward from the first to the last and, in training, back
/// from the last to the first. `position` counts the layers of the stage from 0.
class ParameterHost {
 public:
  virtual ~ParameterHost() = default;
  /// A forward pass is about to begin; in training a backward pass over the same samples follows it.
  virtual void begin_pass(bool /*training*/) {}
  virtual void before_layer(int /*position*/) {}
  virtual void after_layer(int /*position*/) {}
  /// Of params()[index], in its shape: holds from before_layer to after_layer of a layer that uses it.
  virtual Tensor value(int index) = 0;
  /// Where the gradient of params()[index] is to be; asked for in backward passes only, first by a layer that uses the
  /// parameter or by the one above it, which may form the gradient of a bias. Stays there until it is complete.
  virtual Tensor gradient(int index) = 0;
};

/// Whole ranges in a store's layout.
class FlatParameters final : public ParameterHost {
 public:
  /// `gradients` may be undefined in forward passes.
  FlatParameters(const ParamStore& store, const Tensor& values, const Tensor& gradients)
      : store_(store), values_(values), gradients_(gradients) {}
  Tensor value(int index) override { return store_.view(values_, index); }
  Tensor gradient(int index) override { return store_.view(gradients_, index); }

 private:
  const ParamStore& store_;
  Tensor values_, gradients_;
};

}  // namespace pdl
