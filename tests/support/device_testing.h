#pragma once
// What the tests of the CUDA backend share. An operation runs twice from the same numbers: on the GPU in fp32, tf32,
// bf16 or fp16, and on the CPU in fp64, the oracle. A test states the tensors and the call once:
//
//   Twin x = random_twin(dtype, {5, 7}, 1), y(dtype, {5, 7});
//   agree(dtype, {{y, "y", kRounded}}, [&](const Side& on) { on->dropout(y[on], x[on], key[on]); });
//
// Inputs are rounded to the GPU's type before either side sees them, so a difference is the operation's own. Outputs
// start as NaN (integers as a conspicuous pattern), and guard bytes on both sides are checked after every call.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "tests/support/op_testing.h"

namespace pdl::testing {

/// The GPU and its backends, and the oracle.
struct Gpu {
  std::unique_ptr<Device> device, host;
  std::unique_ptr<Backend> oracle;
  std::unique_ptr<Backend> deterministic;  ///< and true fp32
  std::unique_ptr<Backend> fast;           ///< not deterministic where that is quicker, tf32 products

  void wait() { device->compute_stream().synchronize(); }
};

/// Null, after one line on stderr, when this machine has no GPU; every test then returns at once.
Gpu* gpu();

/// A computation of a test: which backend, and where its tensors lie.
struct Side {
  Backend* backend = nullptr;
  bool on_gpu = false;
  Backend* operator->() const { return backend; }
};

/// A way to compute on the GPU.
struct Mode {
  DType dtype = DType::fp32;
  bool deterministic = true;  ///< which of the two backends
  std::string_view name() const;
  Side side() const;
};
/// On both backends; fp32 on the fast one is tf32.
std::vector<Mode> modes_of(DType dtype);
inline constexpr DType kComputeTypes[] = {DType::fp32, DType::bf16, DType::fp16};

/// Largest error of a result in each mode, as a share of the oracle's result: see difference().
struct Tolerance {
  double fp32, tf32, bf16, fp16;
  double of(const Mode& mode) const;
};
/// Computed in fp32 and rounded once to the element type, whose rounding errors are 1.6e-3 (bf16) and 2e-4 (fp16) on
/// average, and at most 4e-3 and 5e-4.
inline constexpr Tolerance kRounded = {3e-6, 3e-6, 4e-3, 5e-4};
/// fp32 whatever the inputs are: statistics, losses, gradients of weights.
inline constexpr Tolerance kWide = {4e-6, 4e-6, 4e-6, 4e-6};
inline constexpr Tolerance kExact = {0.0, 0.0, 0.0, 0.0};

/// Chooses elements of a tensor by their place; null chooses all.
using Choice = std::function<bool(std::int64_t)>;

/// The larger of |value - expected| / |expected| as vectors and half of the worst element's error / the largest
/// element. Infinite where one is NaN or infinite and the other is not. Of chosen elements, errors are relative to at
/// least a tenth of the whole, so that a part which vanishes has a scale.
double difference(const Values& values, const Values& expected, const Choice& chosen = nullptr);

Values random_values(std::int64_t count, std::uint64_t seed, double low = -1.0, double high = 1.0);

/// A tensor in the GPU's memory between guard bytes. It starts `offset` elements behind an address that is a multiple
/// of 64 bytes: parameters and gradients lie end to end in flat ranges and start anywhere.
class DeviceTensor {
 public:
  DeviceTensor(DType dtype, Shape shape, std::int64_t offset = 0);

  const Tensor& tensor() const { return tensor_; }
  /// Floats and bytes become all ones, which is NaN in every format; integers a pattern of 0xA5.
  void poison();
  void set(const Values& values);
  Values values() const;
  std::vector<std::byte> bytes() const;
  bool guards_intact() const;

 private:
  std::int64_t before_, behind_;  // bytes of the buffer before and behind the tensor
  Buffer buffer_;
  Tensor tensor_;
};

/// The same tensor on both sides: in its own type on the GPU, in fp64 (integers: their own type) for the oracle.
class Twin {
 public:
  Twin() = default;                                         ///< an undefined tensor
  Twin(DType dtype, Shape shape, std::int64_t offset = 0);  ///< an output: starts poisoned
  Twin(DType dtype, Shape shape, const Values& values, std::int64_t offset = 0);

  Tensor operator[](const Side& side) const;
  DType dtype() const { return device_->tensor().dtype(); }
  const Shape& shape() const { return device_->tensor().shape(); }
  std::int64_t elements() const { return shape().elements(); }

  /// As it was when it was made, on one side.
  void reset(const Side& side);
  /// Other values, to which `reset` goes back from now on.
  void set(const Values& values);
  Values expected() const { return host_->values(); }  ///< the oracle's
  Values values() const { return device_->values(); }  ///< the GPU's
  std::vector<std::byte> bytes() const { return device_->bytes(); }
  bool guards_intact() const { return device_->guards_intact() && host_->guards_intact(); }
  /// True when both sides are zero at the same places.
  bool same_zeros() const;

 private:
  std::optional<OwnedTensor> host_;
  std::optional<DeviceTensor> device_;
  std::optional<Values> start_;  // rounded; nothing: poison
};

Twin random_twin(DType dtype, Shape shape, std::uint64_t seed, double low = -1.0, double high = 1.0,
                 std::int64_t offset = 0);

/// A dropout key whose sample ids lie on both sides.
struct TwinKey {
  TwinKey() = default;  ///< no dropout
  TwinKey(double rate, const Values& sample_ids);
  DropoutKey operator[](const Side& side) const;

  DropoutKey key;
  Twin ids, update;
};

/// Workspace for one call on one side.
class Room {
 public:
  Room(const Side& side, std::int64_t bytes);
  operator Tensor() const;     // NOLINT: operations take it as the tensor it is
  bool guards_intact() const;  ///< waits for the GPU

 private:
  std::optional<OwnedTensor> host_;
  std::optional<DeviceTensor> device_;
};

struct Output {
  Twin& twin;
  const char* name;
  Tolerance tolerance;
  Choice chosen = nullptr;
};

/// Runs `work` by the oracle, then in every mode of the type twice, outputs as they were made before each run. Checks
/// the outputs against the oracle's, the guards, and that the deterministic backend repeats itself bit for bit. Leaves
/// the outputs of the oracle and of the last mode.
void agree(DType dtype, const std::vector<Output>& outputs, const std::function<void(const Side&)>& work);

}  // namespace pdl::testing
