#include "parallel/sync/sharded_model.h"

#include <algorithm>

namespace pdl {

void ShardedModel::visit_parameters(const Engine::ParameterVisitor& visit) {
  const ParamStore& store = replica_.store();
  const DType wide = wide_dtype(store.dtype());
  int collected = -1;
  std::vector<char> weights;
  for (std::size_t i = 0; i < store.params().size(); ++i) {
    const Param& param = store.params()[i];
    const int home = map_.block_of(static_cast<int>(i));
    if (home != collected) weights = collect(home);
    collected = home;
    if (context_.world.rank() != 0) continue;
    const std::int64_t inside = param.offset - map_.blocks()[static_cast<std::size_t>(home)].offset;
    visit(param.spec, param.id, Tensor(weights.data() + inside * size_of(wide), wide, param.spec.shape()));
  }
}

std::vector<char> ShardedModel::collect(int index) {
  const ShardBlock& block = map_.blocks()[static_cast<std::size_t>(index)];
  const Tensor mine = weights_.weights(index), spare = gradients_.spare();
  const std::int64_t element_bytes = size_of(mine.dtype());
  const int ranks = context_.world.size();
  const bool first = context_.world.rank() == 0;
  Stream& stream = context_.device.compute_stream();
  std::vector<char> host(first ? static_cast<std::size_t>(block.elements * element_bytes) : 0);
  // Piece by piece, since the spare memory may be smaller than the block.
  const std::int64_t most = spare.elements() / ranks;
  for (std::int64_t begin = 0; begin < block.slice; begin += most) {
    const std::int64_t count = std::min(most, block.slice - begin);
    const Tensor all = spare.range(0, ranks * count);
    context_.world.all_gather(all, mine.range(begin, count), stream).wait(stream);
    for (int rank = 0; first && rank < ranks; ++rank) {
      const Tensor piece = all.range(rank * count, count);
      context_.device.copy(host.data() + (rank * block.slice + begin) * element_bytes, piece.raw(), piece.bytes(),
                           stream);
    }
    stream.synchronize();
  }
  return host;
}

}  // namespace pdl
