#pragma once
// Models ask a LayerFactory for their layers, in model words. The dense factory gives ordinary layers; the
// tensor-parallel and spatial ones (parallel/shard) give layers that hold a part and communicate, and are the dense
// layers when the part is the whole. The factory never speaks of tricks.

#include <memory>
#include <string>

#include "engine/nn/layer.h"

namespace pdl {

/// Which way a layer with weights may be divided: `column` divides its outputs, `row` its inputs, which are the divided
/// outputs of a column layer.
enum class Split { none, column, row };

struct LinearOptions {
  std::int64_t in = 0, out = 0;
  bool bias = true;
  Activation activation = Activation::none;
  Split split = Split::none;
  /// Inputs lie as [pixels, in / pixels]: a flattened map of channels. A row layer may get some channels of each pixel.
  std::int64_t pixels = 1;
  InitRule weight_init = {}, bias_init = {};
};

struct ConvOptions {
  std::int64_t in = 0, out = 0;
  Conv2dGeometry geometry = {};
  Activation activation = Activation::relu;
  Split split = Split::none;
  InitRule weight_init = {}, bias_init = {};
};

struct EmbeddingOptions {
  std::int64_t vocabulary = 0, positions = 0, width = 0;
  double dropout = 0.0;
  double init_stddev = 0.02;
};

/// Part `index` of `parts` equal parts of each sequence.
struct SequencePart {
  int index = 0, parts = 1;
};

class LayerFactory {
 public:
  virtual ~LayerFactory() = default;
  /// Parameters "NAME.weight" [out, in], "NAME.bias" [out].
  virtual std::unique_ptr<Layer> linear(std::string name, const LinearOptions& options) const;
  /// Parameters "NAME.weight" [K, R, S, C], "NAME.bias" [K].
  virtual std::unique_ptr<Layer> conv2d(std::string name, const ConvOptions& options) const;
  virtual std::unique_ptr<Layer> max_pool(std::string name, std::int64_t kernel) const;
  virtual std::unique_ptr<Layer> adaptive_avg_pool(std::string name, std::int64_t height, std::int64_t width) const;
  /// [N, ...] to [N, rest].
  virtual std::unique_ptr<Layer> flatten(std::string name) const;
  /// `below`: how the layer may be divided whose outputs it drops from.
  virtual std::unique_ptr<Layer> dropout(std::string name, double rate, Split below) const;
  virtual std::unique_ptr<Layer> layernorm(std::string name, std::int64_t width) const;
  /// Causal attention of `heads` heads over qkv [B, T, A, 3, D] packed per head; output [B, T, C]. Heads may be
  /// divided.
  virtual std::unique_ptr<Layer> attention(std::string name, std::int64_t heads, std::int64_t width,
                                           double dropout) const;
  /// Token plus position: "wte.weight" [V, C], "wpe.weight" [positions, C].
  virtual std::unique_ptr<Layer> embedding(std::string name, const EmbeddingOptions& options) const;
  /// Logits [B, T, V] over the transposed embedding: tied to `tied_to`.
  virtual std::unique_ptr<Layer> lm_head(std::string name, std::int64_t width, std::int64_t vocabulary,
                                         std::string tied_to) const;
  /// Softmax cross-entropy over the first `classes` logits against the micro-batch's targets, summed times
  /// gradient_scale.
  virtual std::unique_ptr<Layer> loss(std::string name, std::int64_t classes) const;
  /// The same behind an lm_head of `vocabulary` rows.
  virtual std::unique_ptr<Layer> lm_loss(std::string name, std::int64_t vocabulary, std::int64_t classes) const;
  /// What a rank sees of each sequence between embedding and head, where tokens go their own ways: norms, dropouts and
  /// residual sums.
  virtual SequencePart sequence_part() const { return {}; }
  /// False: pairs of column and row layers begin behind the convolutions.
  virtual bool divides_convolutions() const { return true; }
};

}  // namespace pdl
