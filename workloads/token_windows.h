#pragma once
// Samples of text: windows of T tokens that do not overlap; the target of each token is the one after it.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/data/tokenizer.h"
#include "workloads/dataset_definition.h"

namespace pdl {

/// Sequences of tokens and what keeps them in memory. A window never spans two sequences.
struct TokenSequences {
  std::shared_ptr<const void> owner;
  std::vector<std::span<const Token>> sequences;
};

/// Takes the tokens over as one sequence.
TokenSequences sequence_of(std::vector<Token> tokens);

class TokenWindows final : public Dataset {
 public:
  /// `info` brings name, split, source and classes (the vocabulary); the rest is found here. `limit` 0: all windows.
  /// Throws Error(data) when not even one window results.
  TokenWindows(DatasetInfo info, TokenSequences tokens, std::int64_t sequence_length, SplitRule rule,
               std::int64_t limit);

  DatasetInfo info() const override { return info_; }
  std::int64_t size() const override { return info_.samples; }
  TensorSpec input_spec() const override { return {DType::int32, Shape{sequence_length_}}; }
  TensorSpec target_spec() const override { return input_spec(); }
  void read(std::int64_t id, Tensor input, Tensor target) const override;

  /// How often each token is a target, over all samples.
  const std::vector<std::int64_t>& target_counts() const { return target_counts_; }
  void set_unigram_perplexity(double value) { info_.unigram_perplexity = value; }

 private:
  /// The T + 1 tokens of a sample.
  std::span<const Token> window(std::int64_t id) const;

  DatasetInfo info_;
  TokenSequences tokens_;
  std::int64_t sequence_length_;
  SplitRule rule_;
  std::vector<std::int64_t> first_window_;  // of each sequence, and their total at the end
  std::vector<std::int64_t> target_counts_;
};

/// exp of the cross-entropy (nats) of targets that occur `counts` times under the frequencies `train_counts`, each
/// raised by one: what a model reaches that knows how frequent tokens are and nothing else.
double unigram_perplexity(const std::vector<std::int64_t>& train_counts, const std::vector<std::int64_t>& counts);

/// Sets the perplexity of both and puts them together.
DatasetPair pair_of(std::unique_ptr<TokenWindows> train, std::unique_ptr<TokenWindows> validation);

}  // namespace pdl
