#pragma once
// What the tests of backend operations share: tensors that own guarded, poisoned memory, comparisons, finite
// differences.
//
// A test computes in two ways and compares values as doubles, whatever the element type. Outputs start as NaN (integers
// as a conspicuous pattern), so an element that an operation leaves unwritten is found; guard bytes on both sides find
// overruns.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/base/random.h"
#include "engine/device/device.h"

namespace pdl::testing {

using Values = std::vector<double>;

/// A tensor with its own memory, 64-byte aligned. Starts poisoned. Moving it keeps the memory where it is.
class OwnedTensor {
 public:
  OwnedTensor(DType dtype, Shape shape) : bytes_(shape.elements() * size_of(dtype)), memory_(allocate(bytes_)) {
    std::memset(memory_.get(), kGuard, static_cast<std::size_t>(bytes_ + 2 * kGuardBytes));
    tensor_ = Tensor(memory_.get() + kGuardBytes, dtype, shape);
    poison();
  }
  OwnedTensor(DType dtype, Shape shape, const Values& values) : OwnedTensor(dtype, shape) { set(values); }

  operator const Tensor&() const { return tensor_; }  // NOLINT: operations take it as the tensor it is
  const Tensor& tensor() const { return tensor_; }
  std::int64_t elements() const { return tensor_.elements(); }

  /// Every float becomes NaN, every integer byte 0xA5.
  void poison() {
    std::memset(tensor_.raw(), 0xA5, static_cast<std::size_t>(bytes_));
    for (std::int64_t i = 0; i < elements(); ++i) {
      if (tensor_.dtype() == DType::fp64) tensor_.data<double>()[i] = std::numeric_limits<double>::quiet_NaN();
      if (tensor_.dtype() == DType::fp32) tensor_.data<float>()[i] = std::numeric_limits<float>::quiet_NaN();
    }
  }

  void set(const Values& values) {
    PDL_CHECK(static_cast<std::int64_t>(values.size()) == elements(), values.size(), " values for ", elements());
    for (std::int64_t i = 0; i < elements(); ++i) put(i, values[static_cast<std::size_t>(i)]);
  }
  Values values() const {
    Values all(static_cast<std::size_t>(elements()));
    for (std::int64_t i = 0; i < elements(); ++i) all[static_cast<std::size_t>(i)] = get(i);
    return all;
  }

  double get(std::int64_t i) const {
    switch (tensor_.dtype()) {
      case DType::fp64:
        return tensor_.data<double>()[i];
      case DType::fp32:
        return tensor_.data<float>()[i];
      case DType::int64:
        return static_cast<double>(tensor_.data<std::int64_t>()[i]);
      case DType::int32:
        return tensor_.data<std::int32_t>()[i];
      default:
        return tensor_.data<std::uint8_t>()[i];
    }
  }
  void put(std::int64_t i, double value) {
    switch (tensor_.dtype()) {
      case DType::fp64:
        tensor_.data<double>()[i] = value;
        return;
      case DType::fp32:
        tensor_.data<float>()[i] = static_cast<float>(value);
        return;
      case DType::int64:
        tensor_.data<std::int64_t>()[i] = static_cast<std::int64_t>(value);
        return;
      case DType::int32:
        tensor_.data<std::int32_t>()[i] = static_cast<std::int32_t>(value);
        return;
      default:
        tensor_.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(value);
        return;
    }
  }

  /// False when somebody wrote outside the tensor.
  bool guards_intact() const {
    const auto is_guard = [](std::byte b) { return b == std::byte{kGuard}; };
    const std::byte* end = memory_.get() + kGuardBytes + bytes_;
    return std::all_of(memory_.get(), memory_.get() + kGuardBytes, is_guard) &&
           std::all_of(end, end + kGuardBytes, is_guard);
  }

 private:
  static constexpr std::int64_t kGuardBytes = 256;
  static constexpr int kGuard = 0x5C;
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
  };
  static std::byte* allocate(std::int64_t bytes) {
    const auto total = static_cast<std::size_t>(bytes + 2 * kGuardBytes);
    return static_cast<std::byte*>(::operator new[](total, std::align_val_t{64}));
  }

  std::int64_t bytes_;
  std::unique_ptr<std::byte[], Free> memory_;
  Tensor tensor_;
};

/// Uniform values in (low, high), the same for every element type up to rounding.
inline OwnedTensor random_tensor(DType dtype, Shape shape, std::uint64_t seed, double low = -1.0, double high = 1.0) {
  const RandomStream stream(seed, RandomUse::synthetic, 0);
  OwnedTensor x(dtype, shape);
  for (std::int64_t i = 0; i < x.elements(); ++i)
    x.put(i, low + (high - low) * stream.uniform(static_cast<std::uint64_t>(i)));
  return x;
}

/// max |value - expected| / max(max |expected|, tiny); infinite when anything is NaN or the sizes differ.
inline double worst_error(const Values& values, const Values& expected) {
  if (values.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double worst = 0.0, largest = 1e-30;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double error = std::fabs(values[i] - expected[i]);
    if (!(error < std::numeric_limits<double>::infinity())) return std::numeric_limits<double>::infinity();
    worst = std::max(worst, error);
    largest = std::max(largest, std::fabs(expected[i]));
  }
  return worst / largest;
}
inline double worst_error(const OwnedTensor& values, const OwnedTensor& expected) {
  return worst_error(values.values(), expected.values());
}

/// Equal bit for bit, NaN included.
inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.raw(), b.raw(), static_cast<std::size_t>(a.bytes())) == 0;
}

inline double dot(const Values& a, const Values& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Checks a gradient along random directions. `loss()` recomputes a scalar from x (fp64), typically dot(projection, y);
/// `gradient` is what the backward operation says d loss / dx is. Returns the worst of four
/// |central difference - <gradient, direction>| / (|gradient| |direction|), a measure that does not suffer when a
/// direction happens to be nearly orthogonal to the gradient.
template <typename Loss>
double gradient_error(OwnedTensor& x, const Values& gradient, Loss loss, double step = 1e-5) {
  const Values start = x.values();
  double worst = 0.0;
  for (std::uint64_t trial = 0; trial < 4; ++trial) {
    const Values direction = random_tensor(DType::fp64, x.tensor().shape(), 7000 + trial).values();
    const auto loss_at = [&](double distance) {
      Values moved = start;
      for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += distance * direction[i];
      x.set(moved);
      return loss();
    };
    const double slope = (loss_at(step) - loss_at(-step)) / (2.0 * step);
    const double norm = std::sqrt(dot(gradient, gradient) * dot(direction, direction));
    const double error = std::fabs(slope - dot(gradient, direction)) / std::max(norm, 1e-30);
    worst = error <= worst ? worst : error;  // a NaN wins
  }
  x.set(start);
  return worst;
}

/// Runs `work` with so many OpenMP threads.
template <typename Work>
void with_threads(int threads, Work work) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(threads);
  work();
  omp_set_num_threads(before);
}

/// A CPU device and its backend.
struct CpuUnderTest {
  std::unique_ptr<Device> device = make_device({.kind = "cpu", .threads = 1});
  std::unique_ptr<Backend> backend = make_backend(*device, {.deterministic = true});
};

}  // namespace pdl::testing
