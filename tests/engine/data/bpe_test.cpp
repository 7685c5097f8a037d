#include "engine/data/bpe.h"

#include <algorithm>
#include <map>
#include <set>

#include "engine/base/random.h"
#include "engine/data/text_source.h"
#include "tests/engine/data/data_files.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

bool built_in() {
  if (!PreSplitter::available()) WARN("skipped: built without PCRE2");
  return PreSplitter::available();
}

std::vector<Token> encoded(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<Token> tokens;
  tokenizer.encode(text, tokens);
  return tokens;
}

std::vector<std::string> pieces_of(std::string_view text) {
  std::vector<std::string> pieces;
  PreSplitter().split(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

/// How merges spell: "es", "est", ...
std::vector<std::string> spellings(const std::vector<Merge>& merges) {
  std::vector<std::string> all;
  for (Token id = 0; id < 256; ++id) all.emplace_back(1, static_cast<char>(bpe_byte_of_id(id)));
  for (const Merge& merge : merges) all.push_back(all[merge.left] + all[merge.right]);
  return {all.begin() + 256, all.end()};
}

std::string random_bytes(std::uint64_t id, std::size_t count, std::uint32_t alphabet) {
  const RandomStream stream(5, RandomUse::synthetic, id);
  std::string bytes;
  for (std::size_t i = 0; i < count; ++i) bytes += static_cast<char>(stream.below(i, alphabet));
  return bytes;
}

std::vector<Token> byte_ids(const std::string& text) {
  std::vector<Token> ids;
  for (const char c : text) ids.push_back(bpe_id_of_byte(static_cast<unsigned char>(c)));
  return ids;
}

/// Joins every occurrence of a pair, left to right.
std::vector<Token> joined(const std::vector<Token>& tokens, Merge pair, Token id) {
  std::vector<Token> out;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const bool joins = i + 1 < tokens.size() && Merge{tokens[i], tokens[i + 1]} == pair;
    out.push_back(joins ? id : tokens[i]);
    i += joins ? 1 : 0;
  }
  return out;
}

/// Training by recounting everything for each merge.
std::vector<Merge> train_slowly(const std::vector<CountedPiece>& pieces, std::size_t wanted) {
  std::vector<std::vector<Token>> tokens;
  for (const CountedPiece& piece : pieces) tokens.push_back(byte_ids(piece.text));
  std::vector<Merge> merges;
  while (merges.size() < wanted) {
    std::map<std::pair<Token, Token>, std::int64_t> counts;
    for (std::size_t p = 0; p < pieces.size(); ++p)
      for (std::size_t i = 1; i < tokens[p].size(); ++i) counts[{tokens[p][i - 1], tokens[p][i]}] += pieces[p].count;
    const std::vector<std::string> known = spellings(merges);
    std::int64_t best = 1;
    Merge merge;
    for (const auto& [pair, count] : counts) {
      std::vector<Merge> extended = merges;
      extended.push_back({pair.first, pair.second});
      if (count <= best || std::ranges::find(known, spellings(extended).back()) != known.end()) continue;
      best = count;
      merge = {pair.first, pair.second};
    }
    if (best < 2) break;
    for (auto& piece : tokens) piece = joined(piece, merge, static_cast<Token>(256 + merges.size()));
    merges.push_back(merge);
  }
  return merges;
}

/// Encoding of one piece by applying every merge in order of rank.
std::vector<Token> encode_slowly(const std::string& piece, const std::vector<Merge>& merges) {
  std::vector<Token> tokens = byte_ids(piece);
  for (std::size_t rank = 0; rank < merges.size(); ++rank)
    tokens = joined(tokens, merges[rank], static_cast<Token>(256 + rank));
  return tokens;
}

}  // namespace

TEST_CASE("BPE: bytes are numbered as in GPT-2") {
  CHECK(bpe_id_of_byte('!') == 0);
  CHECK(bpe_id_of_byte('~') == 93);
  CHECK(bpe_id_of_byte(161) == 94);
  CHECK(bpe_id_of_byte(172) == 105);
  CHECK(bpe_id_of_byte(174) == 106);
  CHECK(bpe_id_of_byte(255) == 187);
  CHECK(bpe_id_of_byte(0) == 188);
  CHECK(bpe_id_of_byte('\n') == 198);
  CHECK(bpe_id_of_byte(' ') == 220);
  CHECK(bpe_id_of_byte(127) == 221);
  CHECK(bpe_id_of_byte(160) == 254);
  CHECK(bpe_id_of_byte(173) == 255);
  for (int byte = 0; byte < 256; ++byte)
    CHECK(bpe_byte_of_id(bpe_id_of_byte(static_cast<unsigned char>(byte))) == byte);
}

TEST_CASE("pre-split: GPT-2's pieces") {
  if (!built_in()) return;
  using Pieces = std::vector<std::string>;
  CHECK(pieces_of("Hello world") == Pieces{"Hello", " world"});
  CHECK(pieces_of("I'm we'll don't O'Neil") == Pieces{"I", "'m", " we", "'ll", " don", "'t", " O", "'", "Neil"});
  CHECK(pieces_of("in 1984,  (so)\n\n she") == Pieces{"in", " 1984", ",", " ", " (", "so", ")", "\n\n", " she"});
  CHECK(pieces_of("end  \n") == Pieces{"end", "  \n"});
  CHECK(pieces_of("gr\u00fc\u00df dich \u0661\u0662 \u4e2d\u6587!") ==
        Pieces{"gr\u00fc\u00df", " dich", " \u0661\u0662", " \u4e2d\u6587", "!"});
  CHECK(pieces_of("").empty());
}

TEST_CASE("pre-split: bytes that are no UTF-8 are pieces of their own") {
  if (!built_in()) return;
  using Pieces = std::vector<std::string>;
  CHECK(pieces_of("ab\xff\xfe cd") == Pieces{"ab", "\xff\xfe", " cd"});
  CHECK(pieces_of("\xe4\xb8") == Pieces{"\xe4\xb8"});                  // a character cut short
  CHECK(pieces_of("x\xc0\xaf") == Pieces{"x", "\xc0\xaf"});            // overlong
  CHECK(pieces_of("\xed\xa0\x80y") == Pieces{"\xed\xa0\x80", "y"});    // a surrogate
  CHECK(pieces_of("\xf4\x90\x80\x80") == Pieces{"\xf4\x90\x80\x80"});  // past the last code point
  CHECK(pieces_of("\xf0\x9f\x98\x80") == Pieces{"\xf0\x9f\x98\x80"});  // a valid one
  for (std::uint64_t id = 0; id < 50; ++id) {
    const std::string bytes = random_bytes(id, 2000, 256);
    std::string together;
    for (const std::string& piece : pieces_of(bytes)) together += piece;
    CHECK(together == bytes);
  }
}

TEST_CASE("BPE training: an example worked by hand") {
  // Pairs at first: es 9, st 9, we 8, lo 7, ow 7, ... ; of equals the smaller left id wins, ids follow the alphabet.
  const std::vector<CountedPiece> pieces = {{"low", 5}, {"lower", 2}, {"newest", 6}, {"widest", 3}};
  const std::vector<Merge> merges = train_bpe(pieces, 100);
  CHECK(spellings(merges) == std::vector<std::string>{"es", "est", "lo", "low", "ew", "new", "newest", "dest", "idest",
                                                      "widest", "er", "lower"});
  CHECK(merges[0] == Merge{bpe_id_of_byte('e'), bpe_id_of_byte('s')});
  CHECK(merges[1] == Merge{256, bpe_id_of_byte('t')});
  CHECK(train_bpe(pieces, 3) == std::vector<Merge>(merges.begin(), merges.begin() + 3));
  CHECK(train_bpe(pieces, 0).empty());
  CHECK(train_bpe(std::vector<CountedPiece>{{"abc", 1}}, 5).empty());
}

TEST_CASE("BPE training: keeping counts up to date gives what recounting gives") {
  for (std::uint64_t id = 0; id < 60; ++id) {
    const RandomStream stream(6, RandomUse::synthetic, id);
    std::vector<CountedPiece> pieces;
    const std::uint32_t alphabet = 1 + static_cast<std::uint32_t>(id % 4);
    for (std::uint64_t p = 0; p < 12; ++p) {
      std::string text = random_bytes(1000 * id + p, 1 + stream.below(2 * p, 14), alphabet);
      for (char& c : text) c = static_cast<char>('a' + c);
      pieces.push_back({text, 1 + stream.below(2 * p + 1, 5)});
    }
    const std::vector<Merge> merges = train_bpe(pieces, 30);
    CHECK(merges == train_slowly(pieces, 30));
    std::ranges::reverse(pieces);
    CHECK(merges == train_bpe(pieces, 30));
    const std::vector<std::string> spelt = spellings(merges);
    CHECK(std::set<std::string>(spelt.begin(), spelt.end()).size() == spelt.size());
  }
}

TEST_CASE("BPE: encoding joins by rank, as applying all merges in turn does") {
  if (!built_in()) return;
  std::vector<CountedPiece> pieces;
  for (std::uint64_t p = 0; p < 40; ++p) {
    std::string text = random_bytes(p, 20, 3);
    for (char& c : text) c = static_cast<char>('a' + c);
    pieces.push_back({text, 1});
  }
  const std::vector<Merge> merges = train_bpe(pieces, 40);
  const BpeTokenizer tokenizer("test", merges, false);
  CHECK(tokenizer.vocabulary_size() == 256 + static_cast<std::int64_t>(merges.size()));
  for (std::uint64_t id = 100; id < 200; ++id) {
    std::string word = random_bytes(id, 1 + id % 40, 3);
    for (char& c : word) c = static_cast<char>('a' + c);
    CHECK(encoded(tokenizer, word) == encode_slowly(word, merges));
  }
  // Pieces of a megabyte must not take the square of it.
  const std::string letters(1000000, 'a'), spaces(1000000, ' ');
  CHECK(tokenizer.decode(encoded(tokenizer, letters)) == letters);
  CHECK(tokenizer.decode(encoded(tokenizer, spaces)) == spaces);
}

TEST_CASE("BPE: any bytes come back") {
  if (!built_in()) return;
  const std::string text = "The cat sat on the mat; th\u00e9 \u4e2d\u6587 cat sat, that cat. It's the cat's mat.\n";
  const BpeTokenizer tokenizer("test", train_bpe(text + text, 280), true);
  CHECK(tokenizer.decode(encoded(tokenizer, text)) == text);
  CHECK(encoded(tokenizer, text).size() < text.size());
  CHECK(encoded(tokenizer, "").empty());
  for (std::uint64_t id = 0; id < 50; ++id) {
    const std::string bytes = random_bytes(id, 3000, id % 2 == 0 ? 256 : 128);
    CHECK(tokenizer.decode(encoded(tokenizer, bytes)) == bytes);
  }
  std::string unicode;
  for (int i = 0; i < 300; ++i) unicode += "\u00e4 \U0001F600\u0301x\u00a0\u3000'll ";
  CHECK(tokenizer.decode(encoded(tokenizer, unicode)) == unicode);
  CHECK(tokenizer.end_of_text() == tokenizer.vocabulary_size() - 1);
  CHECK(tokenizer.decode(std::vector<Token>{static_cast<Token>(tokenizer.end_of_text())}) == "<|endoftext|>");
  CHECK(std::ranges::count(encoded(tokenizer, "<|endoftext|>"), static_cast<Token>(tokenizer.end_of_text())) == 0);
  failure([&] { tokenizer.decode(std::vector<Token>{static_cast<Token>(tokenizer.vocabulary_size())}); });
}

TEST_CASE("BPE: a merges file gives the same vocabulary back") {
  const DataFiles files;
  std::vector<CountedPiece> pieces;
  for (std::uint64_t p = 0; p < 30; ++p) pieces.push_back({random_bytes(p % 10, 40, 256), 3});
  const std::vector<Merge> merges = train_bpe(pieces, 200);
  REQUIRE(merges.size() == 200);
  write_merges(files.path("m.txt"), merges);
  CHECK(read_merges(files.path("m.txt")) == merges);
  CHECK_THAT(files.read("m.txt"), StartsWith("#version: 0.2\n"));
  // Neither the first line nor the last line's end is needed, and lines may end as on Windows.
  std::string text = files.read("m.txt").substr(14);
  text.pop_back();
  CHECK(read_merges(files.write("bare", text)) == merges);
  CHECK(read_merges(files.write("windows", "#version: 0.2\r\na b\r\n")) ==
        std::vector<Merge>{{bpe_id_of_byte('a'), bpe_id_of_byte('b')}});
  CHECK_THAT(failure([&] { write_merges(files.path("no/m.txt"), merges); }), ContainsSubstring("No such file"));
}

TEST_CASE("BPE: a damaged merges file is refused by line") {
  const DataFiles files;
  const auto message = [&](const std::string& text) { return failure([&] { read_merges(files.write("m", text)); }); };
  CHECK_THAT(message(""), ContainsSubstring("empty"));
  CHECK_THAT(message("#version: 0.2\na b\nab\n"), ContainsSubstring("line 3: expected two tokens"));
  CHECK_THAT(message("a b c\n"), ContainsSubstring("line 1: expected two tokens"));
  CHECK_THAT(message("a b\n\nb c\n"), ContainsSubstring("line 2: expected two tokens"));
  CHECK_THAT(message("a b\nabc d\n"), ContainsSubstring("line 2") && ContainsSubstring("\"abc\""));
  CHECK_THAT(message("a b\na b\n"), ContainsSubstring("line 2: expected a new token"));
  CHECK_THAT(message("a \xff\n"), ContainsSubstring("line 1"));
}

TEST_CASE("BPE: training on text, alike each time") {
  if (!built_in()) return;
  std::string text;
  for (std::uint64_t word = 0; word < 3000; ++word) {
    const std::uint32_t which = RandomStream(8, RandomUse::synthetic, 0).below(word, 200);
    std::string letters = random_bytes(which, 2 + which % 7, 26);
    for (char& c : letters) c = static_cast<char>('a' + c);
    text += letters + " ";
  }
  const std::vector<Merge> merges = train_bpe(text, 400);
  CHECK(merges.size() == 144);
  CHECK(merges == train_bpe(text, 400));
  CHECK(train_bpe(text, 300) == std::vector<Merge>(merges.begin(), merges.begin() + 44));
  CHECK_THAT(failure([&] { train_bpe(text, 60000); }),
             ContainsSubstring("too small for a vocabulary of 60000") && ContainsSubstring(" entries"));
}

TEST_CASE("BPE: the King James text") {
  if (!built_in() || !kjv_installed()) return;
  const std::string text = split_every_nth(read_kjv().pieces, 0).train;
  const BpeTokenizer tokenizer("bpe-1024", train_bpe(text, 1024), false);
  const std::vector<Token> tokens = encoded(tokenizer, text);
  CHECK(tokens.size() == 1355492);
  CHECK(tokenizer.decode(tokens) == text);
  CHECK(spellings(tokenizer.merges())[0] == "th");
}

TEST_CASE("BPE: GPT-2's vocabulary") {
  const std::string path = gpt2_merges();
  if (path.empty() || !built_in()) return;
  const std::unique_ptr<Tokenizer> gpt2 = make_tokenizer({"gpt2", 0, path}, "");
  CHECK(gpt2->name() == "gpt2");
  CHECK(gpt2->vocabulary_size() == 50257);
  CHECK(gpt2->end_of_text() == 50256);
  using Tokens = std::vector<Token>;
  CHECK(encoded(*gpt2, "Hello world") == Tokens{15496, 995});
  CHECK(encoded(*gpt2, "hello world") == Tokens{31373, 995});
  CHECK(encoded(*gpt2, "The quick brown fox") == Tokens{464, 2068, 7586, 21831});
  CHECK(encoded(*gpt2, "I'm") == Tokens{40, 1101});
  CHECK(encoded(*gpt2, "!\n\n\n ") == Tokens{0, 628, 198, 220});
  if (!kjv_installed()) return;
  const std::string text = split_every_nth(read_kjv().pieces, 0).train;
  const Tokens tokens = encoded(*gpt2, text);
  CHECK(tokens.size() == 1024544);
  CHECK(gpt2->decode(tokens) == text);
}
