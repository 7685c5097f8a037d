#include "parallel/pipeline/staged_parameters.h"

#include <algorithm>

namespace pdl {

void visit_staged_parameters(const EngineContext& context, const PipelinePlan& plan, const Buffer& landing,
                             const std::function<Tensor(int dense_index)>& held,
                             const Engine::ParameterVisitor& visit) {
  Stream& stream = context.device.compute_stream();
  const DType dtype = wide_dtype(context.training.dtype);
  const int rank = context.world.rank();
  std::vector<char> host;
  for (int index = 0; index < static_cast<int>(plan.dense().params().size()); ++index) {
    const Param& param = plan.dense().params()[static_cast<std::size_t>(index)];
    const int owner = plan.owner_of(index);
    if (rank != 0 && rank != owner) continue;
    const Tensor mine = rank == owner ? held(index) : Tensor();
    host.resize(rank == 0 ? static_cast<std::size_t>(param.count * size_of(dtype)) : 0);
    const std::int64_t part = owner == 0 ? param.count : plan.visit_elements();
    for (std::int64_t begin = 0; begin < param.count; begin += part) {
      const std::int64_t count = std::min(part, param.count - begin);
      if (rank != 0) {
        context.world.send(mine.range(begin, count), 0, 0, stream).wait(stream);
        continue;
      }
      const Tensor here = owner == 0 ? mine.range(begin, count) : landing.tensor(dtype, Shape{count});
      if (owner != 0) context.world.recv(here, owner, 0, stream).wait(stream);
      context.device.copy(host.data() + begin * size_of(dtype), here.raw(), here.bytes(), stream);
      stream.synchronize();
    }
    if (rank == 0) visit(param.spec, param.id, Tensor(host.data(), dtype, param.spec.shape()));
  }
}

Tensor range_of(const ParamStore& store, const Tensor& flat, const std::string& name) {
  for (std::size_t i = 0; i < store.params().size(); ++i) {
    if (store.params()[i].spec.name == name) return store.view(flat, static_cast<int>(i));
  }
  return {};
}

}  // namespace pdl
