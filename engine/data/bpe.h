#pragma once
// Byte-level byte-pair encoding as in GPT-2 (Radford et al. 2019; Sennrich et al. 2016 for the method).
//
// Text is cut into pieces (pre_split.h); inside a piece, neighbouring tokens merge by rank. Ids: 0-255 are the bytes in
// the order 33-126, 161-172, 174-255, then the other 68 ascending; 256 + r is the result of the merge of rank r; with
// an end of text its id is the last. This numbering makes a merges file the whole vocabulary.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/data/pre_split.h"
#include "engine/data/tokenizer.h"

namespace pdl {

/// Token `left` followed by token `right` becomes one token.
struct Merge {
  Token left = 0, right = 0;
  bool operator==(const Merge&) const = default;
};

/// The id of a byte, and the byte of an id below 256.
Token bpe_id_of_byte(unsigned char byte);
unsigned char bpe_byte_of_id(Token id);

/// A piece of text and how often it occurs: what training works on.
struct CountedPiece {
  std::string text;
  std::int64_t count = 1;
};

/// The `merges` merges found by always joining the most frequent pair of neighbours (occurrences that overlap each
/// count); of pairs that are equally frequent, the one with the smaller left id, then the smaller right id. A pair
/// whose joined bytes are a token already is passed over, so that no two ids spell the same bytes. Stops early when no
/// pair occurs twice. Deterministic; the order of `pieces` does not matter.
std::vector<Merge> train_bpe(const std::vector<CountedPiece>& pieces, std::int64_t merges);

/// Merges for a vocabulary of `vocabulary_size` in [256, 65536]. Throws Error(data) when the text is too small for so
/// many.
std::vector<Merge> train_bpe(std::string_view text, std::int64_t vocabulary_size);

/// GPT-2's merges file: an optional "#version" line, then "LEFT RIGHT" per line in rank order, bytes spelt as GPT-2's
/// printable characters. Throws Error(data) with path and line for anything else.
std::vector<Merge> read_merges(const std::string& path);
/// Writes such a file (temporary name, then rename). Throws Error with path and errno.
void write_merges(const std::string& path, const std::vector<Merge>& merges);

class BpeTokenizer final : public Tokenizer {
 public:
  /// `merges` in rank order, each of tokens before it. Throws Error(unsupported) in a build without PCRE2.
  BpeTokenizer(std::string name, std::vector<Merge> merges, bool has_end_of_text);

  std::string name() const override { return name_; }
  std::int64_t vocabulary_size() const override;
  void encode(std::string_view text, std::vector<Token>& tokens) const override;
  std::string decode(std::span<const Token> tokens) const override;
  std::int64_t end_of_text() const override;

  const std::vector<Merge>& merges() const { return merges_; }

 private:
  // Appends the tokens of one piece.
  void encode_piece(std::string_view piece, std::vector<Token>& tokens) const;

  std::string name_;
  std::vector<Merge> merges_;
  bool has_end_of_text_;
  PreSplitter splitter_;
  std::unordered_map<std::uint32_t, Token> joined_;  // left << 16 | right -> id
  std::vector<std::string> spelling_;                // bytes of each id
};

}  // namespace pdl
