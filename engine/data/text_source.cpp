#include "engine/data/text_source.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "engine/base/error.h"
#include "engine/data/input_file.h"

namespace pdl {
namespace {

constexpr const char* kKjvCommand = "bible -f gen1:1-rev22:21";

bool is_installed(std::string_view program) {
  const char* variable = std::getenv("PATH");
  std::string_view rest = variable == nullptr ? "" : variable;
  while (!rest.empty()) {
    const std::size_t colon = std::min(rest.find(':'), rest.size());
    const std::string candidate = str(rest.substr(0, colon), "/", program);
    if (::access(candidate.c_str(), X_OK) == 0) return true;
    rest.remove_prefix(std::min(rest.size(), colon + 1));
  }
  return false;
}

std::string output_of_bible_program() {
  if (!is_installed("bible"))
    throw Error(str("the King James text is not installed: install the Debian package ", kKjvPackage,
                    " (it brings the program `bible`), or name a file that holds the output of `", kKjvCommand,
                    "` as \"path\", or use the data set synthetic-learnable"),
                ExitCode::data);
  // Under a launcher only one rank has a standard input, and a program that waits for another's would hang the job.
  const std::string command = str(kKjvCommand, " </dev/null 2>/dev/null");
  std::FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) throw Error(str("`", kKjvCommand, "` cannot be started"), ExitCode::data);
  std::string text;
  std::array<char, 65536> piece;
  for (std::size_t got = 0; (got = std::fread(piece.data(), 1, piece.size(), pipe)) > 0;)
    text.append(piece.data(), got);
  if (const int status = ::pclose(pipe); status != 0)
    throw Error(str("`", kKjvCommand, "` failed with status ", status), ExitCode::data);
  return text;
}

// A verse's label split in two, and what follows it. `chapter` is empty when the line does not start with a label.
struct Verse {
  std::string_view chapter;  // "Ge1", "2Tim3"
  std::string_view text;
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; }

Verse parse_verse(std::string_view line) {
  std::size_t at = 0;
  const auto skip = [&](auto accepts) {
    const std::size_t start = at;
    while (at < line.size() && accepts(line[at])) ++at;
    return at > start;
  };
  skip(is_digit);  // of "1Sm"
  if (!skip(is_letter) || !skip(is_digit)) return {};
  const std::string_view chapter = line.substr(0, at);
  if (at == line.size() || line[at] != ':') return {};
  ++at;
  if (!skip(is_digit) || at == line.size() || line[at] != ' ') return {};
  return {chapter, line.substr(at + 1)};
}

bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// Where to end a block that starts at `begin`.
std::size_t block_end(std::string_view text, std::size_t begin, std::size_t block_bytes) {
  if (text.size() - begin <= block_bytes) return text.size();
  const std::size_t least = begin + block_bytes;
  const std::size_t newline = text.find('\n', least - 1);
  if (newline != std::string_view::npos && newline < least + block_bytes) return newline + 1;
  std::size_t end = least;
  // A character has at most three continuing bytes; more of them is no UTF-8 and may be cut anywhere.
  while (end < text.size() && end < least + 3 && continues_character(text[end])) ++end;
  return end;
}

}  // namespace

std::vector<std::string> chapters_of(std::string_view labelled_verses, const std::string& source) {
  std::vector<std::string> chapters;
  std::string_view chapter;
  std::int64_t line_number = 0;
  for (std::string_view rest = labelled_verses; !rest.empty();) {
    const std::size_t length = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, length);
    rest.remove_prefix(std::min(rest.size(), length + 1));
    ++line_number;
    const Verse verse = parse_verse(line);
    if (verse.chapter.empty())
      throw Error(str(source, ": line ", line_number, ": expected a verse label such as \"Ge1:1 \", got \"",
                      line.substr(0, 40), "\""),
                  ExitCode::data);
    if (verse.chapter != chapter) chapters.emplace_back();
    chapter = verse.chapter;
    chapters.back().append(verse.text).append("\n");
  }
  return chapters;
}

TextPieces read_kjv(const std::string& prepared_path) {
  const bool prepared = !prepared_path.empty();
  const std::string text = prepared ? read_whole_file(prepared_path) : output_of_bible_program();
  TextPieces kjv{prepared ? prepared_path : str("package ", kKjvPackage), {}};
  kjv.pieces = chapters_of(text, prepared ? prepared_path : str("`", kKjvCommand, "`"));
  std::int64_t verses = 0;
  for (const std::string& chapter : kjv.pieces) verses += std::count(chapter.begin(), chapter.end(), '\n');
  const auto chapters = static_cast<std::int64_t>(kjv.pieces.size());
  if (verses != kKjvVerses || chapters != kKjvChapters)
    throw Error(str(kjv.source, ": expected ", kKjvVerses, " verses in ", kKjvChapters, " chapters, got ", verses,
                    " in ", chapters),
                ExitCode::data);
  return kjv;
}

TextPieces read_text_blocks(const std::string& path, std::int64_t block_bytes) {
  PDL_CHECK(block_bytes >= 4, "blocks of ", block_bytes, " bytes");
  const std::string text = read_whole_file(path);
  if (text.empty()) throw Error(str(path, ": offset 0: expected text, got an empty file"), ExitCode::data);
  TextPieces blocks{path, {}};
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = block_end(text, begin, static_cast<std::size_t>(block_bytes));
    blocks.pieces.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return blocks;
}

TextSplit split_every_nth(const std::vector<std::string>& pieces, std::int64_t n) {
  PDL_CHECK(n >= 0, "every ", n, "th piece");
  TextSplit split;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const bool validates = n > 0 && (static_cast<std::int64_t>(i) + 1) % n == 0;
    (validates ? split.validation : split.train) += pieces[i];
  }
  return split;
}

}  // namespace pdl
