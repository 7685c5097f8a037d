#pragma once
// The World that tests under a launcher share: MPI is started and ended by mpi_main.cpp.

#include <memory>

#include "parallel/comm/world.h"

namespace pdl::testing {

inline World& test_world() {
  static const std::unique_ptr<World> world = attach_world();
  return *world;
}

}  // namespace pdl::testing
