#include "engine/data/token_file.h"

#include <numeric>
#include <span>
#include <utility>

#include "engine/data/inspect.h"
#include "engine/data/pre_split.h"
#include "engine/data/prepare.h"
#include "tests/engine/data/data_files.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

const std::vector<Token> kTokens = {5, 0, 50256, 17, 5};

std::vector<Token> tokens_of(const std::string& path, TokenFormat format = TokenFormat::llmc,
                             std::int64_t vocabulary = kMostTokens) {
  const TokenFile file(path, format, vocabulary);
  return {file.tokens().begin(), file.tokens().end()};
}

}  // namespace

TEST_CASE("token files: llm.c and nanoGPT") {
  const DataFiles files;
  CHECK(tokens_of(files.write("l.bin", llmc_file(kTokens))) == kTokens);
  CHECK(tokens_of(files.write("n.bin", llmc_file(kTokens).substr(1024)), TokenFormat::nanogpt) == kTokens);
  TokenFile first(files.path("l.bin"), TokenFormat::llmc, kMostTokens);
  const TokenFile moved = std::move(first);
  CHECK(moved.tokens().size() == 5);
  CHECK(moved.path() == files.path("l.bin"));
}

TEST_CASE("token files: one cut anywhere is refused") {
  const DataFiles files;
  const std::string whole = llmc_file(kTokens);
  for (std::size_t length = 0; length < whole.size(); length += length < 1000 ? 97 : 1) {
    const std::string path = files.write("cut", whole.substr(0, length));
    const std::string message = failure([&] { tokens_of(path); });
    INFO(length << ": " << message);
    CHECK_THAT(message, StartsWith(path + ": offset "));
    CHECK_THAT(message, ContainsSubstring("expected ") && ContainsSubstring(", got "));
  }
  failure([&] { tokens_of(files.write("longer", whole + "xx")); });
  failure([&] { tokens_of(files.write("odd", whole + "x")); });
}

TEST_CASE("token files: wrong headers and tokens are refused with their offset") {
  const DataFiles files;
  const auto message = [&](std::size_t at, std::uint32_t word) {
    std::string bytes = llmc_file(kTokens);
    bytes.replace(at, 4, little_endian(word));
    return failure([&] { tokens_of(files.write("t", bytes)); });
  };
  CHECK_THAT(message(0, 20240801), ContainsSubstring("offset 0: expected magic number 20240520"));
  CHECK_THAT(message(4, 7), ContainsSubstring("offset 4: expected version 1 (16-bit tokens), got 7"));
  CHECK_THAT(message(8, 6), ContainsSubstring("offset 8") && ContainsSubstring("got 6"));
  CHECK_THAT(message(8, 0), ContainsSubstring("got 0"));
  CHECK_THAT(message(8, 0x80000005), ContainsSubstring("got -2147483643"));
  CHECK_THAT(failure([&] { tokens_of(files.write("none", llmc_file({}))); }), ContainsSubstring("got 0"));
  const std::string path = files.write("t", llmc_file(kTokens));
  CHECK(tokens_of(path, TokenFormat::llmc, 50257) == kTokens);
  CHECK_THAT(failure([&] { tokens_of(path, TokenFormat::llmc, 50256); }),
             ContainsSubstring("offset 1028: expected a token below the vocabulary's size 50256, got 50256"));
  CHECK_THAT(failure([&] { tokens_of(files.write("odd", "abc"), TokenFormat::nanogpt); }), ContainsSubstring("even"));
  CHECK_THAT(failure([&] { tokens_of(files.path("missing")); }), ContainsSubstring("No such file"));
  CHECK_THAT(failure([&] { tokens_of(files.path("")); }), ContainsSubstring("not a regular file"));
}

TEST_CASE("token files: what is written is what is read, and nothing shows before it is whole") {
  const DataFiles files;
  std::vector<Token> many(3000000);
  std::iota(many.begin(), many.end(), Token{0});
  {
    TokenFileWriter writer(files.path("t.bin"));
    for (std::size_t at = 0; at < many.size(); at += 700000)
      writer.write(std::span(many).subspan(at, std::min<std::size_t>(700000, many.size() - at)));
    CHECK_FALSE(std::filesystem::exists(files.path("t.bin")));
    writer.commit();
  }
  CHECK(tokens_of(files.path("t.bin")) == many);
  { TokenFileWriter(files.path("dropped.bin")).write(many); }
  CHECK(std::distance(std::filesystem::directory_iterator(files.path("")), {}) == 1);
  CHECK_THAT(failure([&] { TokenFileWriter writer(files.path("no/t.bin")); }), ContainsSubstring("No such file"));
}

TEST_CASE("token files: a pattern names files in order") {
  const DataFiles files;
  for (const char* name : {"b_2.bin", "b_1.bin", "c.bin"}) files.write(name, "x");
  CHECK(matching_files(files.path("b_*.bin")) ==
        std::vector<std::string>{files.path("b_1.bin"), files.path("b_2.bin")});
  CHECK(matching_files("plain.bin") == std::vector<std::string>{"plain.bin"});
  CHECK_THAT(failure([&] { matching_files(files.path("d*")); }), ContainsSubstring("no file matches"));
}

TEST_CASE("inspect: formats are told by content") {
  const DataFiles files;
  const std::string images = idx_images(2, 2, 2, std::string("\0\xff\0\xff\0\xff\0\xff", 8));
  CHECK(sniff_format(files.write("a", images)) == FileFormat::idx_images);
  CHECK(sniff_format(files.write_gzip("b", images)) == FileFormat::idx_images);
  CHECK(sniff_format(files.write("c", idx_labels(1, "\3"))) == FileFormat::idx_labels);
  CHECK(sniff_format(files.write("d", llmc_file(kTokens))) == FileFormat::llmc_tokens);
  CHECK(sniff_format(files.write("e", "#version: 0.2\na b\n")) == FileFormat::merges);
  CHECK(sniff_format(files.write("f", "gr\u00fc\u00df dich\n")) == FileFormat::text);
  CHECK(sniff_format(files.write("g", llmc_file(kTokens).substr(1024))) == FileFormat::unknown);
  CHECK(sniff_format(files.write("h", "")) == FileFormat::unknown);
  failure([&] { sniff_format(files.path("missing")); });

  CHECK_THAT(inspect(files.path("a")), ContainsSubstring("format: IDX images") && ContainsSubstring("images: 2\n") &&
                                           ContainsSubstring("shape: [2, 2, 1]") && ContainsSubstring("mean: 0.5\n"));
  CHECK_THAT(inspect(files.path("b")), ContainsSubstring("compressed: gzip"));
  CHECK_THAT(inspect(files.path("c")), ContainsSubstring("labels: 1\n") && ContainsSubstring("largest: 3\n"));
  CHECK_THAT(inspect(files.path("d")),
             ContainsSubstring("tokens: 5\n") && ContainsSubstring("first: 5 0 50256 17 5\n"));
  CHECK_THAT(inspect(files.path("e")), ContainsSubstring("vocabulary_size: 257\n"));
  CHECK_THAT(inspect(files.path("f")), ContainsSubstring("lines: 1\n") && ContainsSubstring("gr\\xc3\\xbc"));
  CHECK_THAT(inspect(files.path("g")), ContainsSubstring("unknown") && ContainsSubstring("nanogpt"));
  failure([&] { inspect(files.write("i", images + "x")); });
}

TEST_CASE("prepare: text becomes a token file") {
  const DataFiles files;
  const std::string one = "Hello, hello.\nYes?\n", two = "No.";
  PrepareOptions options;
  options.inputs = {files.write("one", one), files.write_gzip("two", two)};
  options.output = files.path("t.bin");
  std::vector<std::int64_t> heard;
  const PrepareResult result = prepare_tokens(options, [&](std::int64_t done, std::int64_t total) {
    heard.push_back(done);
    CHECK(total == 22);
  });
  CHECK(result.tokenizer == "bytes");
  CHECK(result.bytes == 22);
  CHECK(result.tokens == 22);
  CHECK(heard == std::vector<std::int64_t>{0, 19, 22});
  CHECK(make_byte_tokenizer()->decode(tokens_of(options.output)) == one + two);

  options.inputs = {files.write("empty", "")};
  failure([&] { prepare_tokens(options); });
  options.inputs = {};
  failure([&] { prepare_tokens(options); }, ExitCode::usage);
  options.inputs = {files.path("one")};
  options.end_of_text_per_line = true;
  CHECK_THAT(failure([&] { prepare_tokens(options); }, ExitCode::usage), ContainsSubstring("gpt2"));
}

TEST_CASE("prepare: trained merges stand beside the tokens, and stretches do not show") {
  if (!PreSplitter::available()) return;
  const DataFiles files;
  std::string text;
  while (text.size() < 9000000)
    text += "the cat sat \n\n on  the mat's edge; " + std::to_string(text.size()) + "\nthen\n";
  PrepareOptions options;
  options.inputs = {files.write("text", text)};
  options.output = files.path("t.bin");
  options.tokenizer = {"bpe", 300, ""};
  int calls = 0;
  const PrepareResult result = prepare_tokens(options, [&](std::int64_t, std::int64_t) { ++calls; });
  CHECK(calls == 4);
  CHECK(result.vocabulary_size == 300);
  CHECK(result.merges_path == options.output + ".merges.txt");
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer({"bpe", 300, result.merges_path}, "");
  std::vector<Token> whole;
  tokenizer->encode(text, whole);
  CHECK(tokens_of(options.output) == whole);
}

TEST_CASE("prepare: GPT-2's end of text after each line") {
  const std::string merges = gpt2_merges();
  if (merges.empty() || !PreSplitter::available()) return;
  const DataFiles files;
  PrepareOptions options;
  options.inputs = {files.write("t", "Hello world\n\nHello world")};
  options.output = files.path("t.bin");
  options.tokenizer = {"gpt2", 0, merges};
  options.end_of_text_per_line = true;
  prepare_tokens(options);
  CHECK(tokens_of(options.output) == std::vector<Token>{15496, 995, 198, 50256, 198, 50256, 15496, 995, 50256});
}

TEST_CASE("safe_cut: after a line between visible characters only") {
  CHECK(safe_cut("ab\ncd\nef", 8) == 6);
  CHECK(safe_cut("ab\ncd\nef", 5) == 3);
  CHECK(safe_cut("ab\n\ncd", 6) == 0);
  CHECK(safe_cut("ab \ncd", 6) == 0);
  CHECK(safe_cut("ab\n cd", 6) == 0);
  CHECK(safe_cut("ab\n\u00a0x", 6) == 0);
  CHECK(safe_cut("ab\n", 3) == 0);
  CHECK(safe_cut("", 3) == 0);
}
