// When NCCL can connect the ranks, and what is said when it cannot.

#include "parallel/comm/gpu_places.h"
#include "tests/support/catch.h"

using namespace pdl;

TEST_CASE("a GPU for every rank is no obstacle") {
  CHECK(obstacle_to_nccl({{"a", "GPU-1"}}).empty());
  CHECK(obstacle_to_nccl({{"a", "GPU-1"}, {"a", "GPU-2"}, {"b", "GPU-3"}, {"b", "GPU-4"}}).empty());
}

TEST_CASE("a shared GPU is named with the first two ranks on it and the number of GPUs") {
  const std::string two = obstacle_to_nccl({{"a", "GPU-1"}, {"b", "GPU-2"}, {"b", "GPU-2"}, {"a", "GPU-1"}});
  CHECK(two == "ranks 1 and 2 share GPU-2 of host b: use comm=mpi or at most 2 ranks");
  const std::string one = obstacle_to_nccl({{"a", "GPU-1"}, {"a", "GPU-1"}, {"a", "GPU-1"}});
  CHECK(one == "ranks 0 and 1 share GPU-1 of host a: use comm=mpi or at most 1 rank");
}

TEST_CASE("a rank on a CPU is named") {
  const std::string text = obstacle_to_nccl({{"a", "GPU-1"}, {"a", "GPU-1"}, {"b", ""}});
  CHECK_THAT(text, StartsWith("rank 2 on host b computes on a CPU"));
  CHECK_THAT(text, ContainsSubstring("comm=mpi"));
}
