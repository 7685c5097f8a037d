#include "engine/data/tokenizer.h"

#include "engine/data/bpe.h"
#include "tests/engine/data/data_files.h"

using namespace pdl;
using namespace pdl::testing;

TEST_CASE("byte tokenizer: ids are the bytes") {
  const std::unique_ptr<Tokenizer> bytes = make_tokenizer({}, "");
  CHECK(bytes->name() == "bytes");
  CHECK(bytes->vocabulary_size() == 256);
  CHECK(bytes->end_of_text() == -1);
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  std::vector<Token> tokens = {7};
  bytes->encode(all, tokens);
  REQUIRE(tokens.size() == 257);
  CHECK(tokens[0] == 7);
  CHECK(tokens[256] == 255);
  CHECK(bytes->decode(std::span(tokens).subspan(1)) == all);
  failure([&] { bytes->decode(std::vector<Token>{256}); });
}

TEST_CASE("make_tokenizer: what does not go together is refused") {
  const DataFiles files;
  const auto refused = [](const TokenizerOptions& options, ExitCode code) {
    return failure([&] { make_tokenizer(options, "some text, some text"); }, code);
  };
  CHECK_THAT(refused({"words", 0, ""}, ExitCode::usage), ContainsSubstring("bytes, bpe, gpt2"));
  CHECK_THAT(refused({"gpt2", 0, ""}, ExitCode::usage), ContainsSubstring("merges"));
  CHECK_THAT(refused({"bpe", 0, ""}, ExitCode::usage), ContainsSubstring("vocabulary_size"));
  CHECK_THAT(refused({"bpe", 70000, ""}, ExitCode::usage), ContainsSubstring("65536"));
  const std::string merges = files.write("m", "a b\nab c\n");
  CHECK_THAT(refused({"gpt2", 0, merges}, ExitCode::data),
             ContainsSubstring("expected the 50000 merges of GPT-2, got 2"));
}

TEST_CASE("make_tokenizer: bpe trains, or takes a merges file whatever size it has") {
  if (!PreSplitter::available()) {
    CHECK_THAT(failure(
                   [] {
                     make_tokenizer({"bpe", 258, ""}, "aa aa aa");
                   },
                   ExitCode::unsupported),
               ContainsSubstring("PCRE2"));
    return;
  }
  const DataFiles files;
  const std::unique_ptr<Tokenizer> trained = make_tokenizer({"bpe", 258, ""}, "aaa aaa aaa aaa");
  CHECK(trained->vocabulary_size() == 258);
  CHECK(trained->name() == "bpe-258");
  write_merges(files.path("m"), dynamic_cast<const BpeTokenizer&>(*trained).merges());
  const std::unique_ptr<Tokenizer> loaded = make_tokenizer({"bpe", 4096, files.path("m")}, "");
  CHECK(loaded->vocabulary_size() == 258);
  std::vector<Token> one, other;
  trained->encode("aaa b aa", one);
  loaded->encode("aaa b aa", other);
  CHECK(one == other);
}
