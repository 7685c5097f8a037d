#include "parallel/shard/tensor_text.h"

#include <algorithm>
#include <utility>

#include "engine/data/batch_plan.h"
#include "engine/nn/layers/linear.h"
#include "engine/nn/layers/text.h"
#include "parallel/shard/workspace_parts.h"

namespace pdl {

ParamSlice vocabulary_slice(std::int64_t vocabulary, const TensorGroup& group) {
  const Part own = split_evenly(vocabulary, group.size, group.rank);
  return {.axis = 0, .begin = own.begin, .count = own.count};
}

/// With a spread only.
struct VocabularyEmbedding::Scratch {
  Scratch(WorkspaceParts parts, const Shape& whole_y, DType dtype, bool lines_up)
      : y(parts.take(dtype, whole_y)), room(lines_up ? parts.take(dtype, whole_y) : Tensor()), bytes(parts.bytes()) {}
  Tensor y;     // forward: this rank's addend of everybody's y; backward: dy of all ranks
  Tensor room;  // for parts that lie rank by rank
  std::int64_t bytes;
};

VocabularyEmbedding::VocabularyEmbedding(std::string name, const EmbeddingOptions& options, const TensorGroup& group,
                                         SpreadOver spread)
    : name_(std::move(name)), options_(options), group_(group), spread_(spread) {
  PDL_CHECK(spread != SpreadOver::samples, name_, " has the text of all ranks");
}

std::vector<ParamSpec> VocabularyEmbedding::param_specs() const {
  std::vector<ParamSpec> specs = Embedding(name_, options_).param_specs();
  specs[0].slice = vocabulary_slice(options_.vocabulary, group_);
  return specs;
}

std::int64_t VocabularyEmbedding::workspace_bytes(const Shape& x, DType dtype, Backend&) const {
  if (spread_ == SpreadOver::none) return 0;
  return Scratch({}, whole_output(x), dtype, needs_room(x[0])).bytes;
}

VocabularyEmbedding::Scratch VocabularyEmbedding::scratch(const LayerIo& io, DType dtype) const {
  return {WorkspaceParts(io.workspace), whole_output(io.x.shape()), dtype, needs_room(io.x.shape()[0])};
}

DropoutKey VocabularyEmbedding::dropout_key(const LayerIo& io, const Shape& y) const {
  const DropoutKey key = io.dropout_key(options_.dropout, 0);
  return spread_ == SpreadOver::none ? key : on_part_of_sequence(key, y.elements_per_sample(), group_);
}

void VocabularyEmbedding::forward(const LayerIo& io) const {
  const std::int64_t first_token = vocabulary_slice(options_.vocabulary, group_).begin;
  const Tensor positions = group_.rank == 0 ? io.params[1] : Tensor();  // they enter the sum once
  const auto embed = [&](const Tensor& y) {
    io.backend.embedding_forward(y, io.x, io.params[0], positions, first_token, DropoutKey());
  };
  if (spread_ == SpreadOver::none) {
    embed(io.y);
    begin_sum(group_, io.y).wait(*group_.stream);
  } else {
    const Scratch s = scratch(io, io.y.dtype());
    embed(s.y);
    ReduceScatter(group_, io.backend, io.y, s.y, io.y.shape()[0], s.room).finish();
  }
  const DropoutKey key = dropout_key(io, io.y.shape());
  if (key.rate > 0.0) io.backend.dropout(io.y, io.y, key);
}

void VocabularyEmbedding::backward(const LayerIo& io) const {
  const DropoutKey key = dropout_key(io, io.dy.shape());
  if (key.rate > 0.0) io.backend.dropout(io.dy, io.dy, key);
  Tensor dy = io.dy, dwpe = io.grads[1];
  if (spread_ != SpreadOver::none) {
    const Scratch s = scratch(io, io.dy.dtype());
    Gather(group_, io.backend, s.y, io.dy, io.dy.shape()[0], s.room).finish();
    dy = s.y;
    // Everybody's dy gives the whole gradient of the positions, which are to be added up: they count on one rank.
    if (group_.rank != 0) {
      if (io.accumulate[1] == 0) io.backend.fill(dwpe, 0.0);
      dwpe = Tensor();
    }
  }
  io.backend.embedding_backward(io.grads[0], dwpe, dy, io.x, vocabulary_slice(options_.vocabulary, group_).begin,
                                io.accumulate[0] != 0, io.accumulate[1] != 0);
  io.grad_ready(1);
  io.grad_ready(0);
}

VocabularyLoss::VocabularyLoss(std::string name, std::int64_t vocabulary, std::int64_t classes,
                               const TensorGroup& group)
    : name_(std::move(name)), group_(group) {
  const ParamSlice rows = vocabulary_slice(vocabulary, group);
  first_class_ = rows.begin;
  classes_ = std::clamp<std::int64_t>(classes - rows.begin, 0, rows.count);
}

std::vector<TensorSpec> VocabularyLoss::saved_specs(const Shape& x, DType dtype) const {
  const TensorSpec rows = {wide_dtype(dtype), {x.elements() / x.back()}};
  return {rows, rows};
}

std::int64_t VocabularyLoss::workspace_bytes(const Shape& x, DType dtype, Backend&) const {
  WorkspaceParts parts;
  parts.take(wide_dtype(dtype), {group_.size, x.elements() / x.back(), 4});
  return parts.bytes();
}

void VocabularyLoss::forward(const LayerIo& io) const {
  const Tensor logits = as_rows(io.x);  // [M, V_r]
  const Tensor targets = io.batch.target.view({io.batch.target.elements()});
  const Tensor stats =
      WorkspaceParts(io.workspace).take(io.saved[0].dtype(), {group_.size, logits.shape()[0], 4});  // [t, M, 4]
  const Tensor own = stats.rows(group_.rank, 1);
  io.backend.cross_entropy_shard(own, logits, targets, first_class_, classes_);
  group_.ranks->all_gather(stats, own, *group_.stream).wait(*group_.stream);
  io.backend.cross_entropy_join(io.training ? logits : Tensor(), io.saved[0], io.saved[1], logits, targets, stats,
                                first_class_, classes_, io.batch.gradient_scale);
  io.backend.accumulate_sum(io.batch.metrics.range(0, 1), io.saved[0]);
  io.backend.accumulate_sum(io.batch.metrics.range(1, 1), io.saved[1]);
}

}  // namespace pdl
