#include "engine/data/tokenizer.h"

#include "engine/base/error.h"
#include "engine/data/bpe.h"

namespace pdl {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return "bytes"; }
  std::int64_t vocabulary_size() const override { return kByteValues; }

  void encode(std::string_view text, std::vector<Token>& tokens) const override {
    tokens.reserve(tokens.size() + text.size());
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  }

  std::string decode(std::span<const Token> tokens) const override {
    std::string text;
    text.reserve(tokens.size());
    for (const Token token : tokens) {
      if (token >= kByteValues)
        throw Error(str("token ", token, " is outside the vocabulary of ", kByteValues), ExitCode::data);
      text += static_cast<char>(token);
    }
    return text;
  }
};

std::unique_ptr<Tokenizer> make_gpt2_tokenizer(const TokenizerOptions& options) {
  if (options.merges.empty())
    throw ConfigError(
        "tokenizer gpt2 needs \"merges\", the path of GPT-2's merges file (merges.txt, also called vocab.bpe)");
  std::vector<Merge> merges = read_merges(options.merges);
  constexpr std::int64_t kMerges = kGpt2Vocabulary - kByteValues - 1;
  if (static_cast<std::int64_t>(merges.size()) != kMerges)
    throw Error(str(options.merges, ": expected the ", kMerges, " merges of GPT-2, got ", merges.size()),
                ExitCode::data);
  return std::make_unique<BpeTokenizer>("gpt2", std::move(merges), true);
}

std::unique_ptr<Tokenizer> make_bpe_tokenizer(const TokenizerOptions& options, std::string_view training_text) {
  const bool trains = options.merges.empty();
  if (trains && (options.vocabulary_size < kByteValues || options.vocabulary_size > kMostTokens))
    throw ConfigError(str("tokenizer bpe needs \"vocabulary_size\" between ", kByteValues, " and ", kMostTokens,
                          ", got ", options.vocabulary_size));
  std::vector<Merge> merges = trains ? train_bpe(training_text, options.vocabulary_size) : read_merges(options.merges);
  const std::int64_t size = kByteValues + static_cast<std::int64_t>(merges.size());
  return std::make_unique<BpeTokenizer>(str("bpe-", size), std::move(merges), false);
}

}  // namespace

std::unique_ptr<Tokenizer> make_byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerOptions& options, std::string_view training_text) {
  if (options.name == "bytes") return make_byte_tokenizer();
  if (options.name == "bpe") return make_bpe_tokenizer(options, training_text);
  if (options.name == "gpt2") return make_gpt2_tokenizer(options);
  throw ConfigError(str("tokenizer \"", options.name, "\" is not one of bytes, bpe, gpt2"));
}

}  // namespace pdl
