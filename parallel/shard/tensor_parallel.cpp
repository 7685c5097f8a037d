#include "parallel/shard/tensor_parallel.h"

#include <utility>

#include "engine/nn/layers/elementwise.h"
#include "engine/nn/layers/linear.h"
#include "engine/nn/layers/text.h"
#include "parallel/shard/tensor_conv.h"
#include "parallel/shard/tensor_linear.h"
#include "parallel/shard/tensor_text.h"

namespace pdl {
namespace {

/// This rank's share of an extent that the group divides evenly, in each of `groups` stretches of it.
ParamSlice even_slice(const std::string& name, int axis, std::int64_t extent, const TensorGroup& group,
                      std::int64_t groups = 1) {
  const std::int64_t stretch = extent / groups;
  PDL_CHECK(extent % groups == 0 && stretch % group.size == 0, name, ": ", stretch, " on ", group.size, " ranks");
  const std::int64_t count = stretch / group.size;
  return {.axis = axis, .begin = group.rank * count, .count = count, .groups = groups};
}

/// Dropout where a rank has a part of the tensor: of a column layer's outputs, or of sequences.
class DividedDropout final : public Layer {
 public:
  DividedDropout(std::string name, double rate, bool of_columns, SpreadOver spread, const TensorGroup& group)
      : name_(std::move(name)), rate_(rate), of_columns_(of_columns), spread_(spread), group_(group) {}
  std::string name() const override { return name_; }
  Shape output_shape(const Shape& x) const override { return x; }
  std::vector<TensorSpec> saved_specs(const Shape&, DType) const override { return {}; }
  double flops(const Shape&) const override { return 0.0; }
  void forward(const LayerIo& io) const override { io.backend.dropout(io.y, io.x, key(io)); }
  void backward(const LayerIo& io) const override {
    if (io.wants_input_grad) io.backend.dropout(io.dx, io.dy, key(io));
  }

 private:
  DropoutKey key(const LayerIo& io) const {
    DropoutKey key = io.dropout_key(rate_, 0);
    if (!of_columns_) return on_part_of_sequence(key, io.x.shape().elements_per_sample(), group_);
    if (spread_ == SpreadOver::samples) {
      key.sample_ids = io.batch.group_sample_ids.data<std::int64_t>();
      key.samples = io.x.shape()[0];
    }
    key.local_width = io.x.shape().back();
    key.full_width = group_.size * key.local_width;
    key.first_column = group_.rank * key.local_width;
    return key;
  }

  std::string name_;
  double rate_;
  bool of_columns_;
  SpreadOver spread_;
  const TensorGroup& group_;
};

}  // namespace

std::unique_ptr<Layer> TensorParallelFactory::linear(std::string name, const LinearOptions& options) const {
  if (group_.size == 1 || options.split == Split::none) return LayerFactory::linear(std::move(name), options);
  std::vector<ParamSpec> specs = Linear(name, options).param_specs();
  if (options.split == Split::column) {
    for (ParamSpec& spec : specs) spec.slice = even_slice(name, 0, options.out, group_);
    return std::make_unique<ColumnLinear>(std::move(name), std::move(specs), options.activation, group_, spread_);
  }
  specs[0].slice = even_slice(name, 1, options.in, group_, options.pixels);
  return std::make_unique<RowLinear>(std::move(name), std::move(specs), options.activation, group_, spread_);
}

std::unique_ptr<Layer> TensorParallelFactory::conv2d(std::string name, const ConvOptions& options) const {
  if (group_.size == 1 || options.split == Split::none) return LayerFactory::conv2d(std::move(name), options);
  PDL_CHECK(spread_ == SpreadOver::none, name, " is whole where samples are spread");
  return std::make_unique<TensorConv2d>(std::move(name), options, group_);
}

std::unique_ptr<Layer> TensorParallelFactory::dropout(std::string name, double rate, Split below) const {
  const bool is_whole = below != Split::column && spread_ != SpreadOver::sequence;
  if (group_.size == 1 || is_whole) return LayerFactory::dropout(std::move(name), rate, below);
  return std::make_unique<DividedDropout>(std::move(name), rate, below == Split::column, spread_, group_);
}

std::unique_ptr<Layer> TensorParallelFactory::attention(std::string name, std::int64_t heads, std::int64_t width,
                                                        double dropout) const {
  if (group_.size == 1) return LayerFactory::attention(std::move(name), heads, width, dropout);
  const ParamSlice own = even_slice(name, 0, heads, group_);
  return std::make_unique<Attention>(std::move(name), width / heads, dropout, own.begin);
}

std::unique_ptr<Layer> TensorParallelFactory::embedding(std::string name, const EmbeddingOptions& options) const {
  if (group_.size == 1) return LayerFactory::embedding(std::move(name), options);
  return std::make_unique<VocabularyEmbedding>(std::move(name), options, group_, spread_);
}

std::unique_ptr<Layer> TensorParallelFactory::lm_head(std::string name, std::int64_t width, std::int64_t vocabulary,
                                                      std::string tied_to) const {
  if (group_.size == 1) return LayerFactory::lm_head(std::move(name), width, vocabulary, std::move(tied_to));
  std::vector<ParamSpec> specs = LmHead(name, width, vocabulary, std::move(tied_to)).param_specs();
  specs[0].slice = vocabulary_slice(vocabulary, group_);
  return std::make_unique<ColumnLinear>(std::move(name), std::move(specs), Activation::none, group_, spread_);
}

std::unique_ptr<Layer> TensorParallelFactory::lm_loss(std::string name, std::int64_t vocabulary,
                                                      std::int64_t classes) const {
  if (group_.size == 1) return LayerFactory::lm_loss(std::move(name), vocabulary, classes);
  return std::make_unique<VocabularyLoss>(std::move(name), vocabulary, classes, group_);
}

SequencePart TensorParallelFactory::sequence_part() const {
  if (spread_ != SpreadOver::sequence) return {};
  return {.index = group_.rank, .parts = group_.size};
}

}  // namespace pdl
