#include "workloads/token_windows.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/data/content_hash.h"

namespace pdl {

TokenSequences sequence_of(std::vector<Token> tokens) {
  auto owner = std::make_shared<const std::vector<Token>>(std::move(tokens));
  std::span<const Token> all(*owner);
  return {std::move(owner), {all}};
}

TokenWindows::TokenWindows(DatasetInfo info, TokenSequences tokens, std::int64_t sequence_length, SplitRule rule,
                           std::int64_t limit)
    : info_(std::move(info)), tokens_(std::move(tokens)), sequence_length_(sequence_length), rule_(rule) {
  PDL_CHECK(sequence_length >= 1 && info_.classes >= 1, "T = ", sequence_length, ", vocabulary ", info_.classes);
  std::int64_t windows = 0, total = 0, dropped = 0;
  for (const auto& sequence : tokens_.sequences) {
    first_window_.push_back(windows);
    const auto size = static_cast<std::int64_t>(sequence.size());
    const std::int64_t whole = std::max<std::int64_t>(0, size - 1) / sequence_length;
    windows += whole;
    total += size;
    dropped += whole == 0 ? size : size - 1 - whole * sequence_length;
  }
  first_window_.push_back(windows);
  info_.samples = rule.size(windows, limit);
  // Of a source that is split by windows, the rest belongs to no split: it is told once.
  info_.dropped = rule.validation && rule.period != 0 ? 0 : dropped;
  if (info_.samples == 0)
    throw Error(str(info_.source, ": ", total, " tokens give no ", info_.split, " sample of ", sequence_length,
                    " tokens and their successors"),
                ExitCode::data);

  ContentHash hash;
  target_counts_.resize(static_cast<std::size_t>(info_.classes));
  for (std::int64_t id = 0; id < info_.samples; ++id) {
    const std::span<const Token> sample = window(id);
    hash.add(sample.data(), sample.size_bytes());
    for (const Token target : sample.subspan(1)) {
      PDL_CHECK(target < info_.classes, "token ", target, " in a vocabulary of ", info_.classes);
      ++target_counts_[target];
    }
  }
  info_.identity = hash.hex();
}

std::span<const Token> TokenWindows::window(std::int64_t id) const {
  const std::int64_t part = rule_.part(id);
  const auto after = std::upper_bound(first_window_.begin(), first_window_.end(), part);
  const auto sequence = static_cast<std::size_t>(after - first_window_.begin()) - 1;
  const std::int64_t begin = (part - first_window_[sequence]) * sequence_length_;
  return tokens_.sequences[sequence].subspan(static_cast<std::size_t>(begin),
                                             static_cast<std::size_t>(sequence_length_) + 1);
}

void TokenWindows::read(std::int64_t id, Tensor input, Tensor target) const {
  PDL_CHECK(id >= 0 && id < info_.samples, "sample ", id, " of ", info_.samples);
  PDL_CHECK(input.elements() == sequence_length_ && target.elements() == sequence_length_, input.shape().to_string());
  const std::span<const Token> sample = window(id);
  std::copy(sample.begin(), sample.end() - 1, input.data<std::int32_t>());
  std::copy(sample.begin() + 1, sample.end(), target.data<std::int32_t>());
}

double unigram_perplexity(const std::vector<std::int64_t>& train_counts, const std::vector<std::int64_t>& counts) {
  PDL_CHECK(train_counts.size() == counts.size(), train_counts.size(), " and ", counts.size(), " tokens");
  std::int64_t train_total = static_cast<std::int64_t>(counts.size()), total = 0;
  for (const std::int64_t count : train_counts) train_total += count;
  for (const std::int64_t count : counts) total += count;
  double cross_entropy = 0.0;
  for (std::size_t token = 0; token < counts.size(); ++token) {
    const double likely = static_cast<double>(train_counts[token] + 1) / static_cast<double>(train_total);
    cross_entropy -= static_cast<double>(counts[token]) / static_cast<double>(total) * std::log(likely);
  }
  return std::exp(cross_entropy);
}

DatasetPair pair_of(std::unique_ptr<TokenWindows> train, std::unique_ptr<TokenWindows> validation) {
  const std::vector<std::int64_t>& frequencies = train->target_counts();
  validation->set_unigram_perplexity(unigram_perplexity(frequencies, validation->target_counts()));
  train->set_unigram_perplexity(unigram_perplexity(frequencies, frequencies));
  return {std::move(train), std::move(validation)};
}

}  // namespace pdl
