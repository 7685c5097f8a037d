#pragma once
// Text to token ids and back. Two vocabularies: the 256 byte values, and byte-level byte-pair encoding (bpe.h).

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pdl {

/// Token ids are kept in 16 bits: every vocabulary here has at most 65,536 entries.
using Token = std::uint16_t;
inline constexpr std::int64_t kMostTokens = 65536;
inline constexpr std::int64_t kByteValues = 256;
/// GPT-2's own vocabulary: 256 bytes, 50,000 merges, the end of a text.
inline constexpr std::int64_t kGpt2Vocabulary = 50257;

/// Thread-safe. Any bytes are text, valid UTF-8 or not: decode(encode(text)) == text.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::string name() const = 0;
  virtual std::int64_t vocabulary_size() const = 0;
  /// Appends the tokens of `text`.
  virtual void encode(std::string_view text, std::vector<Token>& tokens) const = 0;
  /// Throws Error(data) for an id outside the vocabulary.
  virtual std::string decode(std::span<const Token> tokens) const = 0;
  /// The id that ends a text, or -1 when the vocabulary has none. Never produced by `encode`.
  virtual std::int64_t end_of_text() const { return -1; }
};

struct TokenizerOptions {
  std::string name = "bytes";        ///< bytes, bpe or gpt2
  std::int64_t vocabulary_size = 0;  ///< bpe without merges: the size to train; else not looked at
  std::string merges;                ///< a merges file: required by gpt2; for bpe in place of training
};

/// Ids are the byte values.
std::unique_ptr<Tokenizer> make_byte_tokenizer();

/// bytes; bpe, trained on `training_text` unless `merges` names a file; gpt2. Throws ConfigError for options that do
/// not go together, Error(data) for a bad merges file or a text too small for the vocabulary, Error(unsupported) when
/// byte-pair encoding was not built in.
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerOptions& options, std::string_view training_text);

}  // namespace pdl
