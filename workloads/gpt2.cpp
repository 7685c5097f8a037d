// GPT-2 (Radford et al. 2019): token and position embedding, pre-norm blocks, a last norm, and logits over the
// transposed token embedding.
//
//   x = dropout(wte[token] + wpe[t]);  x = h.0(x) ... h.L-1(x);  logits = ln_f(x) wte^T
//
// Parameters carry the published names, with two differences in layout: linear weights lie as [out, in], and the
// columns of attn.c_attn go by head, [A, 3, D], so that a group of heads is one contiguous slice.
//
// Initial values are GPT-2's: normal(0, 0.02), projections onto the residual stream 0.02 / sqrt(2 L), biases 0,
// norms 1.

#include <algorithm>

#include "engine/nn/layers/transformer_block.h"
#include "workloads/models.h"

namespace pdl {

ModelFamily gpt2_models();

namespace {

constexpr std::int64_t kVocabulary = 50257;
constexpr std::int64_t kPublishedPositions = 1024;

struct Gpt2Size {
  const char* name;
  const char* summary;
  std::int64_t layers, width, heads;
  bool published;
};

constexpr Gpt2Size kSizes[] = {
    {"gpt2-tiny", "GPT-2 of 2 layers, width 64, 2 heads: for tests", 2, 64, 2, false},
    {"gpt2-mini", "GPT-2 of 4 layers, width 256, 4 heads: trains on a CPU", 4, 256, 4, false},
    {"gpt2-small", "GPT-2 of 12 layers, width 768, 12 heads", 12, 768, 12, true},
    {"gpt2-medium", "GPT-2 of 24 layers, width 1024, 16 heads", 24, 1024, 16, true},
    {"gpt2-large", "GPT-2 of 36 layers, width 1280, 20 heads", 36, 1280, 20, true},
    {"gpt2-xl", "GPT-2 of 48 layers, width 1600, 25 heads", 48, 1600, 25, true},
};

struct Gpt2Options {
  std::int64_t sequence_length = 128, positions = 1024;
  std::int64_t layers = 0, width = 0, heads = 0;
  double dropout = 0.1;
  std::int64_t vocabulary_multiple = 1;
  Recompute recompute = Recompute::nothing;

  /// Rows of the token embedding.
  std::int64_t padded(std::int64_t vocabulary) const {
    return (vocabulary + vocabulary_multiple - 1) / vocabulary_multiple * vocabulary_multiple;
  }
};

Gpt2Options read_gpt2(const Gpt2Size& size, const ConfigReader& workload) {
  Gpt2Options options;
  options.sequence_length = workload.get<std::int64_t>("sequence_length", 128, "tokens of one sample", {1, 1 << 20});
  options.layers = workload.get<std::int64_t>("layers", size.layers, "transformer blocks", {1, 1000});
  options.width = workload.get<std::int64_t>("width", size.width, "width of the residual stream", {1, 1 << 20});
  options.heads =
      workload.get<std::int64_t>("heads", size.heads, "attention heads; they divide the width", {1, 1 << 16});
  options.dropout = workload.get(
      "dropout", 0.1, "rate after the embedding, on attention weights and on both branches of a block", {0, 1});
  const std::int64_t published = size.published ? kPublishedPositions : 0;
  options.positions =
      workload.get<std::int64_t>("positions", std::max(published, options.sequence_length),
                                 "rows of the position embedding, at least sequence_length", {1, 1 << 20});
  options.vocabulary_multiple = workload.get<std::int64_t>(
      "make_vocab_size_divisible_by", 1,
      "the token embedding gets rows that no token uses up to a multiple of this: GPUs like 64", {1, 1 << 16});
  const std::string recompute =
      workload.choice("recompute", "nothing", {"nothing", "gelu", "gelu_and_norms"},
                      "what the backward pass computes again to save memory; the numbers stay the same");
  options.recompute = recompute == "gelu"             ? Recompute::gelu
                      : recompute == "gelu_and_norms" ? Recompute::gelu_and_norms
                                                      : Recompute::nothing;
  if (options.width % options.heads != 0) {
    std::int64_t nearest = options.heads;
    while (options.width % nearest != 0) --nearest;
    workload.problem("heads",
                     str(options.heads, " heads do not divide a width of ", options.width, "; nearest: ", nearest));
  }
  if (options.positions < options.sequence_length) {
    workload.problem("positions",
                     str("must be at least sequence_length, ", options.sequence_length, ", got ", options.positions));
  }
  if (options.dropout >= 1.0) workload.problem("dropout", "must be below 1: nothing would be left");
  return options;
}

LayerList build_gpt2(const Gpt2Options& options, std::int64_t vocabulary, const LayerFactory& factory) {
  LayerList layers;
  const std::int64_t rows = options.padded(vocabulary);
  layers.push_back(factory.embedding(
      "embedding",
      {.vocabulary = rows, .positions = options.positions, .width = options.width, .dropout = options.dropout}));
  const TransformerBlockOptions block = {.width = options.width,
                                         .heads = options.heads,
                                         .layers = options.layers,
                                         .dropout = options.dropout,
                                         .recompute = options.recompute};
  for (std::int64_t layer = 0; layer < options.layers; ++layer) {
    layers.push_back(make_transformer_block(str("h.", layer), block, factory));
  }
  layers.push_back(factory.layernorm("ln_f", options.width));
  layers.push_back(factory.lm_head("lm_head", options.width, rows, "wte.weight"));
  layers.push_back(factory.lm_loss("loss", rows, vocabulary));
  return layers;
}

/// Of one sample. Matrix parameters cost 6 operations a token (2 forward, 4 backward); each layer's two causal T x T
/// products cost 6 C T. No credit for masked products, lookups, norms, biases or a padded vocabulary.
double training_flops(const Gpt2Options& options, std::int64_t vocabulary) {
  const auto length = static_cast<double>(options.sequence_length), layers = static_cast<double>(options.layers);
  const auto width = static_cast<double>(options.width);
  const double matrices = 12.0 * layers * width * width + static_cast<double>(vocabulary) * width;
  return length * (6.0 * matrices + 6.0 * layers * width * length);
}

/// Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B: 6 N + 12 L C T a token, N all
/// parameters but the position embedding. It counts the products that the causal mask discards, too; others quote it.
double palm_flops(const Gpt2Options& options, std::int64_t vocabulary) {
  const auto length = static_cast<double>(options.sequence_length), layers = static_cast<double>(options.layers);
  const auto width = static_cast<double>(options.width);
  const double block = 12.0 * width * width + 13.0 * width;  // matrices; their biases and two norms
  const double parameters = layers * block + static_cast<double>(vocabulary) * width + 2.0 * width;
  return length * (6.0 * parameters + 12.0 * layers * width * length);
}

ModelOptions read_model(const std::string& name, const ConfigReader& workload) {
  const auto* const size =
      std::find_if(std::begin(kSizes), std::end(kSizes), [&](const Gpt2Size& s) { return name == s.name; });
  PDL_CHECK(size != std::end(kSizes), name);
  const Gpt2Options options = read_gpt2(*size, workload);
  ModelOptions model;
  model.sample_input = {DType::int32, {options.sequence_length}};
  model.sample_target = {DType::int32, {options.sequence_length}};
  model.usual_outputs = kVocabulary;
  model.build = [options](std::int64_t vocabulary) {
    ModelDescription description;
    description.build = [options, vocabulary](const LayerFactory& factory) {
      return build_gpt2(options, vocabulary, factory);
    };
    description.predictions_per_sample = options.sequence_length;
    description.hidden_size = options.width;
    description.training_flops_per_sample = training_flops(options, vocabulary);
    description.flops_formula = "matrix parameters and causal attention: T (6 (12 L C^2 + V C) + 6 L C T)";
    description.palm_flops_per_sample = palm_flops(options, vocabulary);
    description.palm_formula = "PaLM: T (6 N + 12 L C T), N all parameters but the position embedding";
    // GELU and norms have no products of matrices in them, and nothing else counts.
    if (options.recompute != Recompute::nothing) description.recomputed_flops_per_sample = 0.0;
    return description;
  };
  return model;
}

}  // namespace

ModelFamily gpt2_models() {
  ModelFamily family;
  family.name = "gpt2";
  for (const Gpt2Size& size : kSizes) family.members.push_back({size.name, size.summary});
  family.read = read_model;
  return family;
}

}  // namespace pdl
