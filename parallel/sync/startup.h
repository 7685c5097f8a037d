#pragma once
// What ranks settle before the first step: that they hold the same parameters, with the same values, or divide them
// alike.

#include <string>

#include "engine/nn/param.h"
#include "parallel/comm/communicator.h"

namespace pdl {

/// Compares names and shapes with rank 0's. Throws Error(communication) on every rank, naming the first parameter that
/// differs.
void check_equal_shapes(const ParamStore& store, Communicator& group, Device& device);

/// Compares how ranks mean to work together, in words of up to 255 bytes. Throws Error(communication) on every rank,
/// with rank 0's plan and that of the first rank that has another.
void check_equal_plans(const std::string& plan, Communicator& group, Device& device);

/// Rank 0's weights on every rank, in chunks of 250 MiB; slices stay as they are.
void broadcast_weights(const ParamStore& store, Communicator& group, Device& device);

/// "15.6": one decimal.
std::string mebibytes(std::int64_t bytes);

}  // namespace pdl
