#include "parallel/comm/gpu_places.h"

#include <map>

#include "engine/base/error.h"

namespace pdl {

std::string obstacle_to_nccl(const std::vector<RankPlace>& places) {
  std::map<std::string, std::size_t> first_rank;  // by GPU: a UUID is unique in the world
  std::string sharing;
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    const auto& [host, uuid] = places[rank];
    if (uuid.empty()) {
      return str("rank ", rank, " on host ", host, " computes on a CPU: use comm=auto or comm=mpi, or device=cuda");
    }
    const auto [other, is_new] = first_rank.emplace(uuid, rank);
    if (is_new || !sharing.empty()) continue;
    sharing = str("ranks ", other->second, " and ", rank, " share ", uuid, " of host ", host);
  }
  if (sharing.empty()) return "";
  const std::size_t gpus = first_rank.size();
  return str(sharing, ": use comm=mpi or at most ", gpus, gpus == 1 ? " rank" : " ranks");
}

}  // namespace pdl
