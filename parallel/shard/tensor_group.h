#pragma once
// The ranks among which layers are divided (tensor parallelism), and how whole tensors turn into parts and back.
//
// A tensor [outer, axis, inner] is divided along its axis: part r is [outer, axis / t, inner]. Three movements serve
// both directions of every layer; each pair below is an operator and its conjugate, the backward pass of the one being
// the other. None of them runs when t = 1: layers are the dense ones then.
//
//   operator                          forward          backward         stands
//   f                                 as it is         all_reduce       in front of a column layer
//   g                                 all_reduce       as it is         behind a row layer and the embedding
//   gather of sequences or samples    Gather           ReduceScatter    instead of f, where others see parts
//   reduce-scatter of the same        ReduceScatter    Gather           instead of g
//
// The backward pass of the gather adds up, because behind it stands a divided layer: each rank finds an addend of the
// gradient of everything. Behind a layer that is whole on every rank each would find all of it, and a sum would be t
// times too large; no layer here needs that other backward pass.
//
// Layers that do any of this are not `repeatable`: their stages are not recorded as CUDA graphs. An operation of a
// group is more than what lies in a stream. The host numbers it for the ranks' board, which finds ranks that are out of
// step, counts its bytes, times it with events, and gives its wait a deadline; through host memory it also sends. A
// replay would do none of this.
//
// Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053 (2019), section 3; Korthikanti et al., "Reducing Activation
// Recomputation in Large Transformer Models", arXiv:2205.05198 (2022), section 4.2.

#include <cstdint>

#include "engine/backend/backend.h"
#include "parallel/comm/communicator.h"

namespace pdl {

/// Layers refer to it. `ranks` may come later than the layers, as long as it is there when they run: plans need the
/// numbers only.
struct TensorGroup {
  int rank = 0, size = 1;
  Communicator* ranks = nullptr;
  Stream* stream = nullptr;  ///< on which layers compute
};

/// What is spread over the ranks of a group where layers are whole on each of them.
enum class SpreadOver {
  none,      ///< nothing: all ranks compute the same
  sequence,  ///< text [B, T, C]: each rank has T / t tokens of every sequence ("sequence parallelism")
  samples    ///< images [N, ...]: each rank has samples of its own
};
/// The whole tensor that a rank with x has a part of, and the other way round.
Shape whole_of(const Shape& part, SpreadOver spread, const TensorGroup& group);
Shape part_of(const Shape& whole, SpreadOver spread, const TensorGroup& group);
/// The extents in front of the axis along which it is spread.
inline std::int64_t outer_of(const Shape& part, SpreadOver spread) {
  return spread == SpreadOver::sequence ? part[0] : 1;
}

/// Of a tensor with `per_sample` elements of each sample that is a part of a sequence: masks of whole sequences.
DropoutKey on_part_of_sequence(DropoutKey key, std::int64_t per_sample, const TensorGroup& group);

/// inout = its sum over the group, under way.
inline Work begin_sum(const TensorGroup& group, const Tensor& inout) {
  return group.ranks->all_reduce(inout, ReduceOp::sum, *group.stream);
}

/// Whole tensors are collected in, or parts of them are sent from, a place where they lie rank by rank. That is the
/// whole tensor itself when `outer` is 1, else room that the caller gives, as large as the whole.
constexpr bool needs_room(std::int64_t outer) { return outer > 1; }

/// whole = the ranks' parts, under way from construction to `finish`. Until then `part` stays as it is, and `whole` and
/// `room` belong to it.
class Gather {
 public:
  Gather(const TensorGroup& group, Backend& backend, Tensor whole, Tensor part, std::int64_t outer, Tensor room);
  void finish();

 private:
  const TensorGroup& group_;
  Backend& backend_;
  Tensor whole_, lined_up_;
  std::int64_t outer_;
  Work work_;
};

/// part = this rank's part of the sum of all `whole`, likewise. `whole` may be overwritten.
class ReduceScatter {
 public:
  ReduceScatter(const TensorGroup& group, Backend& backend, Tensor part, Tensor whole, std::int64_t outer, Tensor room);
  void finish() { work_.wait(*group_.stream); }

 private:
  const TensorGroup& group_;
  Work work_;
};

}  // namespace pdl
