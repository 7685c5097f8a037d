#pragma once
// A stage runs the layers [first, last) of a model forward and back, over parameters and slots that it is given.
//
// A slot is the memory of one micro-batch in flight: every layer's output and saved tensors, at fixed offsets.
// Schedules that keep several micro-batches in flight take several slots. Gradients between layers ping-pong through
// two scratch buffers that all slots share, since only one backward runs at a time.
//
// Of layers that are recomputed a slot has only what the last one hands on. What lies between, and what they save, is
// in memory that all slots share: written by the forward pass, and again by the backward pass just before it is read.
//
// A pass over the same memory is the same work each time. Where the device can, it is recorded and replayed as a whole,
// unless a listener wants to hear of gradients on the way.

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "engine/device/repeated_work.h"
#include "engine/nn/model.h"
#include "engine/nn/parameter_host.h"

namespace pdl {

/// Memory for one micro-batch in flight on a stage.
class Slot {
 public:
  Slot() = default;
  Slot(Device& device, std::int64_t bytes) : buffer_(device.allocate(bytes, MemoryKind::activations)) {}
  const Buffer& buffer() const { return buffer_; }

 private:
  Buffer buffer_;
};

/// Layers [first, last) of a model.
using LayerRange = std::pair<int, int>;

class Stage {
 public:
  /// Plans memory for micro-batches of up to `max_samples`; allocates nothing. The layers and the backend must outlive
  /// the stage. Each range of `recomputed`, in order and apart from each other, runs forward again in the backward
  /// pass, so that only its input is kept; none has the loss or the layer whose output the loss overwrites.
  Stage(const LayerList& layers, int first, int last, const TensorSpec& sample_input, std::int64_t max_samples,
        DType dtype, Backend& backend, const std::vector<LayerRange>& recomputed = {});

  /// Takes what all slots share (gradient ping-pong, recomputed tensors: activations; layer workspace: workspace).
  void allocate(Device& device);
  std::int64_t slot_bytes() const { return slot_bytes_; }
  /// Both ping-pong buffers, and the largest recomputed range.
  std::int64_t scratch_bytes() const { return scratch_bytes_ + recomputed_bytes_; }
  std::int64_t workspace_bytes() const { return workspace_bytes_; }
  Slot make_slot(Device& device) const { return Slot(device, slot_bytes_); }

  /// Input of the stage for one sample, and what it hands on (empty after the loss).
  TensorSpec input_spec(std::int64_t samples) const;
  TensorSpec output_spec(std::int64_t samples) const;

  /// Runs the layers; with a host that brings parameters in, none may be recomputed. `x` is batch.input on the first
  /// stage, else what the stage before handed on; it must stay valid until backward of this slot is done. Returns the
  /// last layer's output, inside the slot. In training a stage that begins with the loss leaves the gradient in place
  /// of `x`, so it takes each `x` once.
  Tensor forward(const ParamStore& store, ParameterHost& host, const Slot& slot, const MicroBatch& batch,
                 const Tensor& x, bool training);

  /// Backward through the slot's forward. `dy` is undefined after the loss; it may be overwritten. Returns dx inside
  /// the scratch (undefined for the first layer of the model; `x` itself when the stage begins with the loss), valid
  /// until the next backward. `touched[i]` says whether params()[i] already holds a part of the sum and is set. The
  /// listener hears each parameter once, after its last contribution in this pass.
  Tensor backward(const ParamStore& store, ParameterHost& host, std::vector<char>& touched, const Slot& slot,
                  const MicroBatch& batch, const Tensor& x, Tensor dy, GradientListener* listener);

  /// The two over parameters that are whole: `values` and `grads` are flat ranges of the store's layout. Without a
  /// listener such passes are replayed when they repeat.
  Tensor forward(const ParamStore& store, const Tensor& values, const Slot& slot, const MicroBatch& batch,
                 const Tensor& x, bool training);
  Tensor backward(const ParamStore& store, const Tensor& values, const Tensor& grads, std::vector<char>& touched,
                  const Slot& slot, const MicroBatch& batch, const Tensor& x, Tensor dy, GradientListener* listener);

  /// What a host and a listener see of a pass, without the pass: for a rank that has no samples while others have. Its
  /// gradients are zero.
  void idle_pass(const ParamStore& store, ParameterHost& host, bool training, GradientListener* listener);

  int first() const { return first_; }
  int last() const { return last_; }
  double forward_flops(std::int64_t samples) const;

 private:
  /// Where a tensor begins, for max_samples: bytes into the slot, or into what is recomputed.
  struct Place {
    bool in_slot = true;
    std::int64_t offset = 0;
  };
  struct PlacedLayer {
    const Layer* layer = nullptr;
    int index = 0;            ///< in the model
    std::vector<int> params;  ///< registered parameter numbers in the store, in the order of param_specs
    Place y;
    std::vector<Place> saved;
    int again_from = -1;  ///< of the last layer of a recomputed range: the position of the first one
  };
  /// What one forward or backward call works on.
  struct Pass {
    const ParamStore& store;
    ParameterHost& host;
    const Slot& slot;
    const std::vector<MicroBatch> batches;  ///< of each layer here
    const Tensor& x;
  };
  void place_layer(const Layer& layer, int index, const std::vector<Shape>& shapes, const LayerRange* recomputed,
                   std::int64_t& recomputed_end);
  Tensor tensor_at(const Place& place, const TensorSpec& spec, const Slot& slot) const;
  Tensor run_forward(const Pass& pass, bool training);
  void run_layer(std::size_t position, const Pass& pass, const std::vector<Shape>& shapes, bool training);
  void run_again(std::size_t last, const Pass& pass, const std::vector<Shape>& shapes);
  Tensor run_backward(const Pass& pass, std::vector<char>& touched, Tensor dy, GradientListener* listener);
  /// Does `work`, or replays it. `key` is all that tells the pass from others besides `pass`.
  Tensor repeat(const Pass& pass, RepeatedWork::Key key, const std::function<Tensor()>& work);
  std::vector<MicroBatch> batches_for(const MicroBatch& batch) const;
  std::vector<Shape> shapes_for(std::int64_t samples) const;
  /// The part of LayerIo that both directions share. Its spans point into members and hold until the next call.
  LayerIo layer_io(std::size_t position, const Pass& pass, const std::vector<Shape>& shapes, bool training);
  /// How many layers of this stage add to each parameter's gradient.
  std::vector<int> contributions(const ParamStore& store) const;

  /// How the layer below ends, when the layer at `position` goes through that on the way back.
  InputActivation input_activation(std::size_t position, const Pass& pass, const std::vector<char>& touched) const;

  std::vector<PlacedLayer> placed_;
  int first_ = 0, last_ = 0;
  TensorSpec sample_input_;
  std::int64_t max_samples_ = 0;
  DType dtype_ = DType::fp32;
  Backend& backend_;
  std::int64_t slot_bytes_ = 0, scratch_bytes_ = 0, recomputed_bytes_ = 0, workspace_bytes_ = 0;
  Shape input_shape_;  ///< of the first layer here, for max_samples
  Buffer scratch_[2], recomputed_, workspace_;
  bool repeatable_ = true;
  std::optional<RepeatedWork> repeated_;  ///< from `allocate` on
  RangeListener* ranges_ = nullptr;       ///< hears the layers' names; null: nobody
  std::vector<Tensor> params_, grads_, saved_;
  std::vector<char> accumulate_;
};

}  // namespace pdl
