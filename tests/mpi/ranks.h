#pragma once
// What a test that runs on several ranks stands on: the world, a CPU device, and data that shows in which order it was
// added.

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/device/device.h"
#include "parallel/comm/mpi_world.h"
#include "parallel/comm/world.h"

namespace pdl {

struct Ranks {
  std::unique_ptr<World> world = attach_world();
  std::unique_ptr<Device> device = make_device({.kind = "cpu"});
  Stream& stream = device->compute_stream();
  int rank = world->info().rank, size = world->info().size;

  std::unique_ptr<Communicator> communicator(bool deterministic = false, double timeout_s = 60.0) {
    return world->make_communicator(*device, {.kind = "mpi", .deterministic = deterministic, .timeout_s = timeout_s});
  }
  /// Cuts MPI calls at a few elements, as if counts were that narrow.
  std::unique_ptr<Communicator> chunked(std::int64_t largest_count) {
    return dynamic_cast<MpiWorld&>(*world).make_mpi_communicator(*device, {.largest_count = largest_count}, 60.0);
  }
};

template <typename T>
Tensor tensor_of(std::vector<T>& values) {
  return Tensor(values.data(), DTypeOf<T>::value, Shape{static_cast<std::int64_t>(values.size())});
}

/// Element i of what a rank contributes. Floating-point values are of mixed sign and magnitude, so that their sum
/// depends on the order of addition; integers are small.
template <typename T>
T contribution(int rank, std::int64_t i) {
  const std::int64_t hash = (i * 7919 + rank * 104729 + 13) % 1009;
  if constexpr (std::is_integral_v<T>) return static_cast<T>(hash % 50);
  return static_cast<T>(std::sin(static_cast<double>(hash)) * std::pow(10.0, static_cast<double>(hash % 7) - 3.0));
}

template <typename T>
std::vector<T> contributions(int rank, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) values[static_cast<std::size_t>(i)] = contribution<T>(rank, i);
  return values;
}

/// The reduction over all ranks as one process would form it, rank by rank.
template <typename T>
std::vector<T> serially_reduced(int size, std::int64_t count, ReduceOp op) {
  std::vector<T> result = contributions<T>(0, count);
  for (int rank = 1; rank < size; ++rank) {
    for (std::int64_t i = 0; i < count; ++i) {
      T& value = result[static_cast<std::size_t>(i)];
      const T next = contribution<T>(rank, i);
      value = op == ReduceOp::sum   ? static_cast<T>(value + next)
              : op == ReduceOp::max ? std::max(value, next)
                                    : std::min(value, next);
    }
  }
  return result;
}

}  // namespace pdl
