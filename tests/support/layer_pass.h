#pragma once
// One layer by itself, with memory of its own for all that a pass takes: to hold a divided layer against the whole one.

#include <algorithm>
#include <vector>

#include "engine/nn/layer.h"
#include "tests/support/catch.h"
#include "tests/support/op_testing.h"

namespace pdl::testing {

/// One forward and backward pass of a layer, whose tensors all start poisoned.
struct LayerPass {
  LayerPass(const Layer& layer, Backend& backend, DType dtype, const Shape& shape, const MicroBatch& batch,
            const Values& x_values, const Values& dy_values)
      : layer_(layer),
        batch_(batch),
        io(backend, batch_),
        x(dtype, shape, x_values),
        y(dtype, layer.output_shape(shape)),
        dx(dtype, shape),
        dy(dtype, y.tensor().shape(), dy_values),
        workspace(DType::uint8, {std::max<std::int64_t>(1, layer.workspace_bytes(shape, dtype, backend))}) {
    std::uint64_t seed = 7;
    for (const ParamSpec& spec : layer.param_specs()) {
      params.push_back(random_tensor(dtype, spec.shape(), ++seed));
      grads.push_back(random_tensor(dtype, spec.shape(), ++seed));  // what is there already, when it is added to
    }
    for (const TensorSpec& spec : layer.saved_specs(shape, dtype)) saved.emplace_back(spec.dtype, spec.shape);
    const auto views = [](const std::vector<OwnedTensor>& tensors) {
      return std::vector<Tensor>(tensors.begin(), tensors.end());
    };
    param_views = views(params), grad_views = views(grads), saved_views = views(saved);
    accumulate.assign(params.size(), 0);
    io.params = param_views;
    io.grads = grad_views;
    io.saved = saved_views;
    io.accumulate = accumulate;
    io.x = x, io.y = y, io.dx = dx, io.dy = dy, io.workspace = workspace;
  }
  void run() {
    layer_.forward(io);
    workspace.poison();
    layer_.backward(io);
    bool intact = x.guards_intact() && y.guards_intact() && dx.guards_intact() && dy.guards_intact();
    for (const OwnedTensor& tensor : saved) intact = intact && tensor.guards_intact();
    CHECK((intact && workspace.guards_intact()));
  }

  const Layer& layer_;
  MicroBatch batch_;
  LayerIo io;
  OwnedTensor x, y, dx, dy, workspace;
  std::vector<OwnedTensor> params, grads, saved;
  std::vector<Tensor> param_views, grad_views, saved_views;
  std::vector<char> accumulate;
};

inline MicroBatch batch_of(std::int64_t size) {
  MicroBatch batch;
  batch.size = size;
  return batch;
}

inline Values random_values(const Shape& shape, std::uint64_t seed) {
  return random_tensor(DType::fp64, shape, seed).values();
}

}  // namespace pdl::testing
