#pragma once
// The World that tests under a launcher share: MPI is started and ended by mpi_main.cpp.

#include <memory>

#include "parallel/comm/world.h"

namespace pdl::testing {

inline World& test_world() {
  // Never destroyed: statics go after mpi_main.cpp has ended MPI.
  static World* const world = attach_world().release();
  return *world;
}

}  // namespace pdl::testing
