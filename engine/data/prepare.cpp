#include "engine/data/prepare.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/data/bpe.h"
#include "engine/data/input_file.h"
#include "engine/data/token_file.h"

namespace pdl {
namespace {

constexpr std::size_t kStretch = std::size_t{4} << 20;  // bytes tokenized between two calls of `progress`

bool is_visible(char c) { return c > 0x20 && c < 0x7F; }

void check(const PrepareOptions& options) {
  if (options.inputs.empty()) throw ConfigError("no text files to prepare");
  if (options.output.empty()) throw ConfigError("no output file for the tokens");
  if (options.end_of_text_per_line && options.tokenizer.name != "gpt2")
    throw ConfigError(
        str("the tokenizer ", options.tokenizer.name, " has no end-of-text token to put after each line: use gpt2"));
}

// Text is held whole: training needs all of it at once, and tokenizing peaks at three bytes a byte.
std::vector<std::string> read_inputs(const std::vector<std::string>& paths) {
  std::vector<std::string> texts;
  for (const std::string& path : paths) {
    texts.push_back(read_whole_file(path));
    if (texts.back().empty()) throw Error(str(path, ": offset 0: expected text, got an empty file"), ExitCode::data);
  }
  return texts;
}

std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += text;
  return all;
}

void encode_lines(std::string_view text, const Tokenizer& tokenizer, std::vector<Token>& tokens) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size() - 1) + 1;
    tokenizer.encode(text.substr(0, end), tokens);
    tokens.push_back(static_cast<Token>(tokenizer.end_of_text()));
    text.remove_prefix(end);
  }
}

// The next stretch to tokenize: about kStretch bytes, cut where cutting changes nothing.
std::size_t stretch_length(std::string_view text) {
  for (std::size_t limit = kStretch; limit < text.size(); limit *= 2)
    if (const std::size_t cut = safe_cut(text, limit); cut > 0) return cut;
  return text.size();
}

}  // namespace

std::size_t safe_cut(std::string_view text, std::size_t limit) {
  for (std::size_t cut = std::min(limit, text.size() - std::min<std::size_t>(1, text.size())); cut >= 2; --cut)
    if (text[cut - 1] == '\n' && is_visible(text[cut - 2]) && is_visible(text[cut])) return cut;
  return 0;
}

PrepareResult prepare_tokens(const PrepareOptions& options,
                             const std::function<void(std::int64_t done, std::int64_t total)>& progress) {
  check(options);
  const std::vector<std::string> texts = read_inputs(options.inputs);
  const bool trains = options.tokenizer.name == "bpe" && options.tokenizer.merges.empty();
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(options.tokenizer, trains ? joined(texts) : "");

  PrepareResult result;
  result.tokenizer = tokenizer->name();
  result.vocabulary_size = tokenizer->vocabulary_size();
  std::int64_t total = 0;
  for (const std::string& text : texts) total += static_cast<std::int64_t>(text.size());
  TokenFileWriter writer(options.output);
  std::vector<Token> tokens;
  if (progress) progress(0, total);
  for (const std::string& text : texts) {
    for (std::string_view rest = text; !rest.empty();) {
      const std::string_view stretch = rest.substr(0, stretch_length(rest));
      rest.remove_prefix(stretch.size());
      tokens.clear();
      options.end_of_text_per_line ? encode_lines(stretch, *tokenizer, tokens) : tokenizer->encode(stretch, tokens);
      writer.write(tokens);
      result.bytes += static_cast<std::int64_t>(stretch.size());
      if (progress) progress(result.bytes, total);
    }
  }
  result.tokens = writer.tokens();
  if (trains) {
    result.merges_path = options.output + ".merges.txt";
    write_merges(result.merges_path, dynamic_cast<const BpeTokenizer&>(*tokenizer).merges());
  }
  writer.commit();
  return result;
}

}  // namespace pdl
