#include "parallel/pipeline/staged_parameters.h"

#include <algorithm>

namespace pdl {

void StagedParameters::prepare() {
  account_ = context_.device.allocate(sizeof(Account), MemoryKind::communication);
  if (context_.world.rank() != 0) return;
  landing_ = context_.device.allocate(plan_.visit_elements() * size_of(wide_dtype(context_.training.dtype)),
                                      MemoryKind::communication);
}

std::int64_t StagedParameters::predicted_bytes() const {
  const std::int64_t landing =
      context_.world.rank() == 0 ? plan_.visit_elements() * size_of(wide_dtype(context_.training.dtype)) : 0;
  return landing + static_cast<std::int64_t>(sizeof(Account));
}

void StagedParameters::send(const HeldPart& part) {
  Stream& stream = context_.device.compute_stream();
  const Account account = {part.slice.axis,   part.slice.begin, part.slice.count,
                           part.slice.groups, part.first,       part.values.defined() ? part.values.elements() : 0};
  context_.device.copy(words().raw(), &account, sizeof account, stream);
  context_.world.send(words(), 0, 0, stream).wait(stream);
  const std::int64_t most = plan_.visit_elements();
  for (std::int64_t begin = 0; begin < account.elements; begin += most) {
    context_.world.send(part.values.range(begin, std::min(most, account.elements - begin)), 0, 0, stream).wait(stream);
  }
  stream.synchronize();
}

/// On rank 0: a part to its place in the whole.
void StagedParameters::take(int holder, const HeldPart& own, const ParamSpec& dense, const Tensor& whole) {
  Stream& stream = context_.device.compute_stream();
  HeldPart part = own;
  std::int64_t elements = own.values.defined() ? own.values.elements() : 0;
  if (holder != 0) {
    Account account;
    context_.world.recv(words(), holder, 0, stream).wait(stream);
    context_.device.copy(&account, words().raw(), sizeof account, stream);
    stream.synchronize();
    part.slice = {static_cast<int>(account.axis), account.begin, account.count, account.groups};
    part.first = account.first;
    elements = account.elements;
  }
  ParamSpec spec = dense;
  spec.slice = part.slice;
  const std::int64_t most = holder == 0 ? elements : plan_.visit_elements();
  for (std::int64_t begin = 0; begin < elements; begin += most) {
    const std::int64_t count = std::min(most, elements - begin);
    const Tensor here = holder == 0 ? part.values : landing_.tensor(whole.dtype(), Shape{count});
    if (holder != 0) context_.world.recv(here, holder, 0, stream).wait(stream);
    piece_.resize(static_cast<std::size_t>(here.bytes()));
    context_.device.copy(piece_.data(), here.raw(), here.bytes(), stream);
    stream.synchronize();
    place_slice(whole, Tensor(piece_.data(), whole.dtype(), Shape{count}), spec, part.first + begin);
  }
}

void StagedParameters::visit(const std::function<std::vector<int>(int dense_index)>& holders,
                             const std::function<HeldPart(int dense_index)>& held,
                             const Engine::ParameterVisitor& visit) {
  const DType dtype = wide_dtype(context_.training.dtype);
  const int rank = context_.world.rank();
  std::vector<char> memory;
  for (int index = 0; index < static_cast<int>(plan_.dense().params().size()); ++index) {
    const Param& param = plan_.dense().params()[static_cast<std::size_t>(index)];
    memory.resize(rank == 0 ? static_cast<std::size_t>(param.count * size_of(dtype)) : 0);
    const Tensor whole(memory.data(), dtype, param.spec.shape());
    for (const int holder : holders(index)) {
      const HeldPart own = rank == holder ? held(index) : HeldPart();
      if (rank == 0) take(holder, own, param.spec, whole);
      if (rank == holder && rank != 0) send(own);
    }
    if (rank == 0) visit(param.spec, param.id, whole);
  }
}

Tensor range_of(const ParamStore& store, const Tensor& flat, const std::string& name) {
  for (std::size_t i = 0; i < store.params().size(); ++i) {
    if (store.params()[i].spec.name == name) return store.view(flat, static_cast<int>(i));
  }
  return {};
}

}  // namespace pdl
