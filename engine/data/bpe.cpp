// The tokenizer itself. Training stands in bpe_train.cpp, the merges file in merges_file.cpp.

#include "engine/data/bpe.h"

#include <array>
#include <queue>

#include "engine/base/error.h"

namespace pdl {
namespace {

constexpr std::string_view kEndOfText = "<|endoftext|>";

struct ByteOrder {
  std::array<Token, 256> id_of{};
  std::array<unsigned char, 256> byte_of{};
};

// GPT-2 puts the bytes that print as themselves in Latin-1 first.
ByteOrder make_byte_order() {
  ByteOrder order;
  const auto prints = [](int byte) {
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  };
  int next = 0;
  for (const bool printing : {true, false}) {
    for (int byte = 0; byte < 256; ++byte) {
      if (prints(byte) != printing) continue;
      order.id_of[static_cast<std::size_t>(byte)] = static_cast<Token>(next);
      order.byte_of[static_cast<std::size_t>(next++)] = static_cast<unsigned char>(byte);
    }
  }
  return order;
}

const ByteOrder& byte_order() {
  static const ByteOrder order = make_byte_order();
  return order;
}

constexpr std::uint32_t pair_key(Token left, Token right) { return (std::uint32_t{left} << 16) | right; }

}  // namespace

Token bpe_id_of_byte(unsigned char byte) { return byte_order().id_of[byte]; }

unsigned char bpe_byte_of_id(Token id) {
  PDL_CHECK(id < 256, "id ", id, " is no single byte");
  return byte_order().byte_of[id];
}

BpeTokenizer::BpeTokenizer(std::string name, std::vector<Merge> merges, bool has_end_of_text)
    : name_(std::move(name)), merges_(std::move(merges)), has_end_of_text_(has_end_of_text) {
  PDL_CHECK(vocabulary_size() <= kMostTokens, vocabulary_size(), " tokens do not fit 16 bits");
  spelling_.reserve(static_cast<std::size_t>(vocabulary_size()));
  for (Token id = 0; id < 256; ++id) spelling_.emplace_back(1, static_cast<char>(bpe_byte_of_id(id)));
  joined_.reserve(merges_.size());
  for (const Merge& merge : merges_) {
    const std::size_t id = spelling_.size();
    PDL_CHECK(merge.left < id && merge.right < id, "merge ", id - 256, " joins tokens that come after it");
    spelling_.push_back(spelling_[merge.left] + spelling_[merge.right]);
    joined_.emplace(pair_key(merge.left, merge.right), static_cast<Token>(id));
  }
  if (has_end_of_text_) spelling_.emplace_back(kEndOfText);
}

std::int64_t BpeTokenizer::vocabulary_size() const {
  return kByteValues + static_cast<std::int64_t>(merges_.size()) + (has_end_of_text_ ? 1 : 0);
}

std::int64_t BpeTokenizer::end_of_text() const { return has_end_of_text_ ? vocabulary_size() - 1 : -1; }

void BpeTokenizer::encode_piece(std::string_view piece, std::vector<Token>& tokens) const {
  // Tokens as a linked list and a heap of joinable neighbours: a piece may be megabytes of one letter, so rescanning it
  // after each merge, as is usual for words, would not end.
  struct Node {
    Token id;
    std::int64_t before, after;  // -1: none
    bool gone = false;
  };
  struct Candidate {
    Token joined;  // grows with the rank
    std::int64_t left;
    Token left_id, right_id;  // as they were: a candidate with other neighbours now is out of date
    bool operator>(const Candidate& other) const {
      return joined != other.joined ? joined > other.joined : left > other.left;
    }
  };
  const auto size = static_cast<std::int64_t>(piece.size());
  std::vector<Node> nodes(piece.size());
  const auto node = [&](std::int64_t i) -> Node& { return nodes[static_cast<std::size_t>(i)]; };
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto consider = [&](std::int64_t left) {
    if (left < 0 || node(left).after < 0) return;
    const Token left_id = node(left).id, right_id = node(node(left).after).id;
    if (const auto found = joined_.find(pair_key(left_id, right_id)); found != joined_.end())
      candidates.push({found->second, left, left_id, right_id});
  };
  for (std::int64_t i = 0; i < size; ++i)
    node(i) = {bpe_id_of_byte(static_cast<unsigned char>(piece[static_cast<std::size_t>(i)])), i - 1,
               i + 1 < size ? i + 1 : -1};
  for (std::int64_t i = 0; i + 1 < size; ++i) consider(i);
  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    Node& left = node(best.left);
    if (left.gone || left.id != best.left_id || left.after < 0 || node(left.after).id != best.right_id) continue;
    Node& right = node(left.after);
    right.gone = true;
    left.id = best.joined;
    left.after = right.after;
    if (left.after >= 0) node(left.after).before = best.left;
    consider(left.before);
    consider(best.left);
  }
  for (std::int64_t i = size == 0 ? -1 : 0; i >= 0; i = node(i).after) tokens.push_back(node(i).id);
}

void BpeTokenizer::encode(std::string_view text, std::vector<Token>& tokens) const {
  // Most pieces are words seen before: where their tokens stand in `known`.
  struct Known {
    std::size_t begin, count;
  };
  constexpr std::size_t kMostKnown = std::size_t{1} << 20;
  std::unordered_map<std::string_view, Known> pieces;
  std::vector<Token> known;
  splitter_.split(text, [&](std::string_view piece) {
    auto found = pieces.find(piece);
    if (found == pieces.end()) {
      if (pieces.size() >= kMostKnown) {
        pieces.clear();
        known.clear();
      }
      const std::size_t begin = known.size();
      encode_piece(piece, known);
      found = pieces.emplace(piece, Known{begin, known.size() - begin}).first;
    }
    const auto first = known.begin() + static_cast<std::ptrdiff_t>(found->second.begin);
    tokens.insert(tokens.end(), first, first + static_cast<std::ptrdiff_t>(found->second.count));
  });
}

std::string BpeTokenizer::decode(std::span<const Token> tokens) const {
  std::string text;
  for (const Token token : tokens) {
    if (token >= spelling_.size())
      throw Error(str("token ", token, " is outside the vocabulary of ", spelling_.size()), ExitCode::data);
    text += spelling_[token];
  }
  return text;
}

}  // namespace pdl
