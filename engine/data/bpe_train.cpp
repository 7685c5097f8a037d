// Learns merges. Counts of pairs are kept up to date instead of recounted: a merge touches only the pieces that hold
// its pair.

#include <algorithm>
#include <queue>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "engine/base/error.h"
#include "engine/data/bpe.h"

namespace pdl {
namespace {

using PairKey = std::uint32_t;  // left << 16 | right, so that the order of keys is that of (left, right)

constexpr PairKey key_of(Token left, Token right) { return (PairKey{left} << 16) | right; }

struct Piece {
  std::vector<Token> tokens;
  std::int64_t count = 0;
};

struct PairState {
  std::int64_t count = 0;
  std::vector<std::uint32_t> pieces;  // that held the pair when it arose there: some may hold it no longer
};

struct Candidate {
  std::int64_t count;
  PairKey pair;
  // The greatest candidate is the next merge.
  bool operator<(const Candidate& other) const {
    return count != other.count ? count < other.count : pair > other.pair;
  }
};

class Trainer {
 public:
  explicit Trainer(const std::vector<CountedPiece>& pieces);
  std::vector<Merge> run(std::int64_t merges);

 private:
  // The most frequent pair that may be joined and occurs at least twice; false when there is none.
  bool take_best(PairKey& pair);
  // Joins `pair` to `id` wherever it stands.
  void join(PairKey pair, Token id);
  void join_in_piece(std::uint32_t index, PairKey pair, Token id);

  std::vector<Piece> pieces_;
  std::unordered_map<PairKey, PairState> pairs_;
  std::priority_queue<Candidate> candidates_;
  std::vector<std::string> spelling_;
  std::unordered_set<std::string> spellings_;
  std::vector<PairKey> arisen_;  // pairs that the current merge made
};

Trainer::Trainer(const std::vector<CountedPiece>& pieces) {
  for (Token id = 0; id < 256; ++id) spelling_.emplace_back(1, static_cast<char>(bpe_byte_of_id(id)));
  pieces_.reserve(pieces.size());
  for (const CountedPiece& piece : pieces) {
    const auto index = static_cast<std::uint32_t>(pieces_.size());
    Piece& added = pieces_.emplace_back();
    added.count = piece.count;
    for (const char c : piece.text) added.tokens.push_back(bpe_id_of_byte(static_cast<unsigned char>(c)));
    for (std::size_t i = 1; i < added.tokens.size(); ++i) {
      PairState& state = pairs_[key_of(added.tokens[i - 1], added.tokens[i])];
      state.count += piece.count;
      if (state.pieces.empty() || state.pieces.back() != index) state.pieces.push_back(index);
    }
  }
  for (const auto& [pair, state] : pairs_) candidates_.push({state.count, pair});
}

std::vector<Merge> Trainer::run(std::int64_t merges) {
  std::vector<Merge> found;
  PairKey pair = 0;
  while (static_cast<std::int64_t>(found.size()) < merges && take_best(pair)) {
    const Merge merge{static_cast<Token>(pair >> 16), static_cast<Token>(pair & 0xffff)};
    spelling_.push_back(spelling_[merge.left] + spelling_[merge.right]);
    spellings_.insert(spelling_.back());
    join(pair, static_cast<Token>(spelling_.size() - 1));
    found.push_back(merge);
  }
  return found;
}

bool Trainer::take_best(PairKey& pair) {
  while (!candidates_.empty()) {
    const Candidate best = candidates_.top();
    candidates_.pop();
    const std::int64_t count = pairs_[best.pair].count;
    if (count < 2) continue;
    // Counts of pairs in the heap only fall: one that fell goes back with its true count.
    if (count != best.count) {
      candidates_.push({count, best.pair});
      continue;
    }
    // Two ids with one spelling could not be told apart in a merges file.
    if (spellings_.contains(spelling_[best.pair >> 16] + spelling_[best.pair & 0xffff])) continue;
    pair = best.pair;
    return true;
  }
  return false;
}

void Trainer::join(PairKey pair, Token id) {
  arisen_.clear();
  const std::vector<std::uint32_t> holders = std::move(pairs_[pair].pieces);
  for (const std::uint32_t index : holders) join_in_piece(index, pair, id);
  pairs_.erase(pair);
  std::sort(arisen_.begin(), arisen_.end());
  arisen_.erase(std::unique(arisen_.begin(), arisen_.end()), arisen_.end());
  for (const PairKey made : arisen_) candidates_.push({pairs_[made].count, made});
}

void Trainer::join_in_piece(std::uint32_t index, PairKey pair, Token id) {
  Piece& piece = pieces_[index];
  std::vector<Token>& tokens = piece.tokens;
  const auto holds = [&](std::size_t at) {
    return at + 1 < tokens.size() && key_of(tokens[at], tokens[at + 1]) == pair;
  };
  std::size_t at = 0;
  while (at + 1 < tokens.size() && !holds(at)) ++at;
  if (!holds(at)) return;
  for (std::size_t i = 1; i < tokens.size(); ++i) pairs_[key_of(tokens[i - 1], tokens[i])].count -= piece.count;
  std::size_t kept = at;
  for (; at < tokens.size(); ++kept) {
    const bool joins = holds(at);
    tokens[kept] = joins ? id : tokens[at];
    at += joins ? 2 : 1;
  }
  tokens.resize(kept);
  for (std::size_t i = 1; i < tokens.size(); ++i) {
    const PairKey made = key_of(tokens[i - 1], tokens[i]);
    PairState& state = pairs_[made];
    state.count += piece.count;
    if (tokens[i - 1] != id && tokens[i] != id) continue;
    if (state.pieces.empty() || state.pieces.back() != index) state.pieces.push_back(index);
    arisen_.push_back(made);
  }
}

std::vector<CountedPiece> count_pieces(std::string_view text) {
  std::unordered_map<std::string_view, std::int64_t> counts;
  PreSplitter().split(text, [&](std::string_view piece) { ++counts[piece]; });
  std::vector<CountedPiece> pieces;
  pieces.reserve(counts.size());
  for (const auto& [piece, count] : counts) pieces.push_back({std::string(piece), count});
  return pieces;
}

}  // namespace

std::vector<Merge> train_bpe(const std::vector<CountedPiece>& pieces, std::int64_t merges) {
  PDL_CHECK(merges >= 0 && merges <= kMostTokens - kByteValues, merges, " merges do not fit 16-bit ids");
  return Trainer(pieces).run(merges);
}

std::vector<Merge> train_bpe(std::string_view text, std::int64_t vocabulary_size) {
  PDL_CHECK(vocabulary_size >= kByteValues && vocabulary_size <= kMostTokens, "vocabulary of ", vocabulary_size);
  const std::int64_t wanted = vocabulary_size - kByteValues;
  std::vector<Merge> merges = train_bpe(count_pieces(text), wanted);
  const auto got = static_cast<std::int64_t>(merges.size());
  if (got < wanted)
    throw Error(str("a text of ", text.size(), " bytes is too small for a vocabulary of ", vocabulary_size,
                    ": no pair of tokens occurs twice after ", kByteValues + got, " entries"),
                ExitCode::data);
  return merges;
}

}  // namespace pdl
