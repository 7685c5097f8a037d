#include "parallel/shard/tensor_group.h"

namespace pdl {
namespace {

/// Between whole [outer, t, part] and lined_up [t, outer, part].
void line_up(const TensorGroup& group, Backend& backend, const Tensor& whole, const Tensor& lined_up,
             std::int64_t outer, bool into_whole) {
  const std::int64_t pitch = whole.elements() / outer, part = pitch / group.size;
  for (int rank = 0; rank < group.size; ++rank) {
    const Tensor column = whole.range(rank * part, whole.elements() - rank * part);
    const Tensor block = lined_up.range(rank * outer * part, outer * part);
    if (into_whole) {
      backend.copy_block(column, pitch, block, part, outer, part);
    } else {
      backend.copy_block(block, part, column, pitch, outer, part);
    }
  }
}

void check(const TensorGroup& group, const Tensor& whole, const Tensor& part, std::int64_t outer, const Tensor& room) {
  PDL_CHECK(whole.elements() == group.size * part.elements() && part.elements() % outer == 0, whole.shape().to_string(),
            " of ", group.size, " parts ", part.shape().to_string());
  PDL_CHECK(!needs_room(outer) || room.elements() == whole.elements(), "no room for ", whole.shape().to_string());
}

}  // namespace

Shape whole_of(const Shape& part, SpreadOver spread, const TensorGroup& group) {
  Shape whole = part;
  if (spread != SpreadOver::none) whole[spread == SpreadOver::sequence ? 1 : 0] *= group.size;
  return whole;
}

Shape part_of(const Shape& whole, SpreadOver spread, const TensorGroup& group) {
  if (spread == SpreadOver::none) return whole;
  const int axis = spread == SpreadOver::sequence ? 1 : 0;
  PDL_CHECK(whole[axis] % group.size == 0, whole.to_string(), " on ", group.size, " ranks");
  Shape part = whole;
  part[axis] /= group.size;
  return part;
}

DropoutKey on_part_of_sequence(DropoutKey key, std::int64_t per_sample, const TensorGroup& group) {
  key.local_width = per_sample;
  key.full_width = group.size * per_sample;
  key.first_column = group.rank * per_sample;
  return key;
}

Gather::Gather(const TensorGroup& group, Backend& backend, Tensor whole, Tensor part, std::int64_t outer, Tensor room)
    : group_(group), backend_(backend), whole_(whole), lined_up_(needs_room(outer) ? room : whole), outer_(outer) {
  check(group, whole, part, outer, room);
  work_ = group.ranks->all_gather(lined_up_, part, *group.stream);
}

void Gather::finish() {
  work_.wait(*group_.stream);
  if (needs_room(outer_)) line_up(group_, backend_, whole_, lined_up_, outer_, true);
}

ReduceScatter::ReduceScatter(const TensorGroup& group, Backend& backend, Tensor part, Tensor whole, std::int64_t outer,
                             Tensor room)
    : group_(group) {
  check(group, whole, part, outer, room);
  if (needs_room(outer)) line_up(group, backend, whole, room, outer, false);
  work_ = group.ranks->reduce_scatter(part, needs_room(outer) ? room : whole, ReduceOp::sum, *group.stream);
}

}  // namespace pdl
