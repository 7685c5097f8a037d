#pragma once
// Parameters as descriptions (ParamSpec) and as flat storage (ParamStore).
//
// A parameter has an id: its place in the dense model's registration order, the same for every engine, shard and rank.
// Values and gradients of all parameters held by a rank lie end to end in registration order, without padding, so that
// buckets, shards, stashes and the fused optimizer are arithmetic on ranges of elements.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/device/device.h"

namespace pdl {

/// How a parameter starts. Element i of the global tensor is a pure function of (seed, parameter id, i).
struct InitRule {
  enum class Kind { zeros, ones, normal, uniform } kind = Kind::zeros;
  double scale = 0.0;  ///< standard deviation, or half-width of the uniform interval
};

/// What a rank holds of a parameter: entries [begin, begin + count) along `axis`; axis -1 means all of it. With several
/// groups the axis is so many equal stretches, and these entries of each of them are held.
struct ParamSlice {
  int axis = -1;
  std::int64_t begin = 0, count = 0;
  std::int64_t groups = 1;
};

struct ParamSpec {
  std::string name;    ///< unique in the model: "h.0.attn.qkv.weight"
  Shape global_shape;  ///< of the unsharded tensor
  InitRule init = {};
  bool decay = true;         ///< false for biases and norms when the recipe spares them
  std::string tied_to = {};  ///< name of the parameter whose storage this one shares; empty when its own
  ParamSlice slice = {};

  /// Shape of what is held here.
  Shape shape() const {
    Shape held = global_shape;
    if (slice.axis >= 0) held[slice.axis] = slice.count * slice.groups;
    return held;
  }
};

/// A parameter placed in a store.
struct Param {
  ParamSpec spec;
  int id = 0;               ///< place in the dense model's registration order; of a tied one, its target's
  int layer = 0;            ///< model index of the layer that registers it
  std::int64_t offset = 0;  ///< elements, into the flat ranges
  std::int64_t count = 0;
};

/// Which ranges a store takes memory for. What is left out lies elsewhere, in shards or buckets of an engine.
struct StoreParts {
  bool values = true, gradients = true;
  bool master = true;  ///< the master weights beside values of a half type
};

/// Values and gradients of the parameters of some layers, flat. A tied parameter whose target is in the same store has
/// no range of its own; one whose target is elsewhere (another pipeline stage) has, and its engine keeps the copies
/// equal.
class ParamStore {
 public:
  /// Lays the parameters out; allocates nothing. `specs[i]` belongs to model layer `layers[i]` and has id `ids[i]`.
  ParamStore(std::vector<ParamSpec> specs, std::vector<int> layers, std::vector<int> ids);

  /// Moves params()[i] to offsets[i] in ranges of `elements`, before `allocate`. What no parameter covers stays zero.
  void place(const std::vector<std::int64_t>& offsets, std::int64_t elements);

  /// Takes memory for values and gradients, which have wide_dtype(dtype). Values of a half type get master weights
  /// beside them: what the optimizer updates and the values are rounded from.
  void allocate(Device& device, DType dtype, StoreParts parts = {});
  /// Bytes that `allocate` takes.
  MemoryByKind predicted_memory(DType dtype, StoreParts parts = {}) const;
  /// Hands out the initial values of each parameter in turn, in host memory of wide_dtype(dtype), for the time of the
  /// call.
  void visit_initial_values(DType dtype, std::uint64_t seed,
                            const std::function<void(int index, const Tensor& values)>& visit) const;
  /// Fills the weights by their init rules, on the host, then copies them to the device.
  void initialise(Device& device, std::uint64_t seed);
  /// Makes the values from the master weights, after these were set; nothing to do when the values are the weights.
  void round_master(Backend& backend);

  std::int64_t elements() const { return elements_; }  ///< of a range
  DType dtype() const { return dtype_; }
  /// The parameters that own a range, in layout order.
  const std::vector<Param>& params() const { return params_; }
  /// Index into `params()` of the range that holds registered parameter `i` (tied ones map to their target).
  int owner(int i) const { return owner_[static_cast<std::size_t>(i)]; }
  int registered() const { return static_cast<int>(owner_.size()); }

  /// What layers compute with.
  Tensor values() const { return values_.tensor(dtype_, Shape{elements_}); }
  Tensor grads() const { return grads_.tensor(wide_dtype(dtype_), Shape{elements_}); }
  /// The weights in full: the master weights, or the values when these are wide themselves.
  Tensor weights() const { return is_half(dtype_) ? master_.tensor(wide_dtype(dtype_), Shape{elements_}) : values(); }
  /// Value and gradient of params()[index], in the parameter's shape; `values`/`grads` may be another flat range of
  /// equal layout.
  Tensor view(const Tensor& flat, int index) const;

  /// One segment per parameter, in layout order: what norms and optimizer updates run over. All decay, or only those
  /// whose spec does.
  std::vector<UpdateSegment> segments(bool all_decay) const;

 private:
  std::vector<Param> params_;
  std::vector<int> owner_;
  std::int64_t elements_ = 0;
  DType dtype_ = DType::fp32;
  Buffer values_, grads_, master_;
};

/// Fills `values` (host memory, fp32 or fp64, the slice's elements in order) by the rule of the spec.
void fill_initial_values(Tensor values, const ParamSpec& spec, int id, std::uint64_t seed);

/// Puts elements of a slice, from its element `first` on, where they stand in the whole parameter; both in host memory,
/// of one type.
void place_slice(const Tensor& whole, const Tensor& part, const ParamSpec& spec, std::int64_t first = 0);

}  // namespace pdl
