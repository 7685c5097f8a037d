#pragma once
// The group of one rank: every collective is a copy or nothing.

#include <memory>
#include <string>

#include "parallel/comm/communicator.h"

namespace pdl {

std::unique_ptr<Communicator> make_self_communicator(Device& device, std::string axis = "world");

/// A group of `size` ranks of which this is `rank`, that can be asked for its shape and nothing else: for plans without
/// MPI.
std::unique_ptr<Communicator> make_planning_communicator(int rank, int size, std::string axis = "world");

}  // namespace pdl
