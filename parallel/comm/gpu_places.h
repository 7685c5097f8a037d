#pragma once
// Who computes where, and whether NCCL can connect them: it wants a GPU for every rank and refuses two ranks on one.

#include <string>
#include <vector>

namespace pdl {

/// The device of one rank. `uuid` is empty for a CPU.
struct RankPlace {
  std::string host, uuid;
};

/// Empty when every rank, in rank order, has a GPU of its own; else the first obstacle, as the end of a sentence:
/// "ranks 0 and 1 share GPU-... of host h: use comm=mpi or at most 1 rank".
std::string obstacle_to_nccl(const std::vector<RankPlace>& places);

}  // namespace pdl
