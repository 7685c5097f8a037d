#pragma once
// Tensor parallelism as a layer factory: models built with it hold slices of their large parameters on each rank of a
// group and exchange activations. In a group of one rank every layer is the dense one.
//
//   linear, conv2d   in pairs of a column and a row layer, where the model says so      tensor_linear.h, tensor_conv.h
//   attention        whole heads on each rank: heads first to last of a rank are rows of one column layer
//   embedding, head  rows of the vocabulary; the loss works on divided logits           tensor_text.h
//   dropout          on a column layer's outputs: masks are those of the undivided tensor, for any t
//   norms, dropouts, residual sums, the rest: whole on every rank, of everything (SpreadOver::none) or of a part of the
//                    sequences or samples
//
// What an engine has to know
//   - A parameter whose spec has a slice is divided: each rank has the gradient of its slice, complete. All others are
//     the same on every rank; they count once in norms.
//   - Gradients of those others are the same on every rank too, unless `is_partial`: then the group adds them up before
//     they are used.
//   - Without a spread and with SpreadOver::sequence every rank has all samples of the group, and the loss of all in
//   its
//     metrics. With SpreadOver::samples each has samples of its own, as many as the others, and their loss; targets
//     stay with the samples, and MicroBatch::group_sample_ids must be set.
//   - Ranks of a group run the same passes in the same order, forward passes that are repeated included.
//
// Source: Megatron-LM; the classifier in front of which samples are gathered: Krizhevsky, arXiv:1404.5997 (2014).

#include <memory>
#include <string>

#include "engine/nn/model.h"
#include "parallel/comm/comm_ledger.h"
#include "parallel/shard/tensor_group.h"

namespace pdl {

class TensorParallelFactory final : public LayerFactory {
 public:
  /// `group` outlives the factory and its layers. The model has no `obstacle_to_tensor_parallel` for it.
  TensorParallelFactory(const TensorGroup& group, SpreadOver spread) : group_(group), spread_(spread) {}

  std::unique_ptr<Layer> linear(std::string name, const LinearOptions& options) const override;
  std::unique_ptr<Layer> conv2d(std::string name, const ConvOptions& options) const override;
  std::unique_ptr<Layer> dropout(std::string name, double rate, Split below) const override;
  std::unique_ptr<Layer> attention(std::string name, std::int64_t heads, std::int64_t width,
                                   double dropout) const override;
  std::unique_ptr<Layer> embedding(std::string name, const EmbeddingOptions& options) const override;
  std::unique_ptr<Layer> lm_head(std::string name, std::int64_t width, std::int64_t vocabulary,
                                 std::string tied_to) const override;
  std::unique_ptr<Layer> lm_loss(std::string name, std::int64_t vocabulary, std::int64_t classes) const override;
  SequencePart sequence_part() const override;
  bool divides_convolutions() const override { return spread_ != SpreadOver::samples; }

  /// True when each rank finds a part of this parameter's gradient, which the group has to add up.
  bool is_partial(const ParamSpec& spec) const {
    return group_.size > 1 && spread_ != SpreadOver::none && spec.slice.axis < 0;
  }

 private:
  const TensorGroup& group_;
  SpreadOver spread_;
};

/// Why `model` cannot be divided over `parts` ranks, as the end of a sentence about `parts`, with the nearest numbers
/// that can; empty when it can. With `ranks` above 0 only numbers that divide them can.
std::string obstacle_to_tensor_parallel(const ModelDescription& model, SpreadOver spread, int parts, int ranks = 0);

/// What one rank of a group sends in passes over a micro-batch, by operation: "all_reduce" and so on.
struct TensorTraffic {
  CommCounts forward, backward;
};
/// Of layers [first, last) of `model`; `samples` on each rank.
TensorTraffic tensor_traffic(const ModelDescription& model, SpreadOver spread, int parts, int first, int last,
                             std::int64_t samples, DType dtype);

}  // namespace pdl
