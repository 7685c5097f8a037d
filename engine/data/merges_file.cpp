// The merges file of GPT-2. Bytes that do not print in Latin-1 are spelt as the characters U+0100, U+0101, ... in
// ascending order, so that every token is a word without white space.

#include <algorithm>
#include <string>
#include <unordered_map>

#include "engine/base/error.h"
#include "engine/data/bpe.h"
#include "engine/data/input_file.h"
#include "engine/data/output_file.h"

namespace pdl {
namespace {

constexpr Token kPrintingBytes = 188;  // ids below this are bytes that stand for themselves
constexpr int kFirstStandIn = 0x100;   // the character of id 188
constexpr std::string_view kVersionLine = "#version";

// All characters here lie below U+0800: one or two bytes of UTF-8.
void append_character(std::string& text, int code_point) {
  if (code_point < 0x80) {
    text += static_cast<char>(code_point);
  } else {
    text += static_cast<char>(0xC0 | (code_point >> 6));
    text += static_cast<char>(0x80 | (code_point & 0x3F));
  }
}

std::string printable(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    const Token id = bpe_id_of_byte(byte);
    append_character(text, id < kPrintingBytes ? byte : kFirstStandIn + id - kPrintingBytes);
  }
  return text;
}

// Every token's printable spelling to its id.
class Spellings {
 public:
  Spellings() {
    for (Token id = 0; id < 256; ++id) add(printable(std::string(1, static_cast<char>(bpe_byte_of_id(id)))));
  }
  /// False when a token is spelt so already.
  bool add(const std::string& spelling) { return ids_.emplace(spelling, static_cast<Token>(ids_.size())).second; }
  const Token* find(std::string_view spelling) const {
    const auto found = ids_.find(std::string(spelling));
    return found == ids_.end() ? nullptr : &found->second;
  }
  std::int64_t size() const { return static_cast<std::int64_t>(ids_.size()); }

 private:
  std::unordered_map<std::string, Token> ids_;
};

// What is wrong with a line of a merges file, or "" after `merges` and `spellings` have grown by it.
std::string take_line(std::string_view line, Spellings& spellings, std::vector<Merge>& merges) {
  const std::size_t space = line.find(' ');
  if (space == std::string_view::npos || space == 0 || space + 1 == line.size() ||
      line.find(' ', space + 1) != std::string_view::npos)
    return str("expected two tokens with a space between them, got \"", line, "\"");
  const std::string_view left = line.substr(0, space), right = line.substr(space + 1);
  const Token* left_id = spellings.find(left);
  const Token* right_id = spellings.find(right);
  if (left_id == nullptr || right_id == nullptr)
    return str("expected tokens that are bytes or made by an earlier line, got \"", left_id == nullptr ? left : right,
               "\"");
  if (spellings.size() >= kMostTokens) return str("expected at most ", kMostTokens - kByteValues, " merges");
  const Merge merge{*left_id, *right_id};
  if (!spellings.add(std::string(left).append(right)))
    return str("expected a new token, got \"", left, right, "\" again");
  merges.push_back(merge);
  return "";
}

}  // namespace

std::vector<Merge> read_merges(const std::string& path) {
  const std::string text = read_whole_file(path);
  if (text.empty()) throw Error(str(path, ": offset 0: expected merges, got an empty file"), ExitCode::data);
  Spellings spellings;
  std::vector<Merge> merges;
  std::int64_t line_number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = std::string_view(text).substr(begin, end - begin);
    if (line.ends_with('\r')) line.remove_suffix(1);
    begin = end + 1;
    ++line_number;
    if ((line_number == 1 && line.starts_with(kVersionLine)) || (line.empty() && begin >= text.size())) continue;
    if (const std::string fault = take_line(line, spellings, merges); !fault.empty())
      throw Error(str(path, ": line ", line_number, ": ", fault), ExitCode::data);
  }
  return merges;
}

void write_merges(const std::string& path, const std::vector<Merge>& merges) {
  std::vector<std::string> spelling;
  for (Token id = 0; id < 256; ++id)
    spelling.push_back(printable(std::string(1, static_cast<char>(bpe_byte_of_id(id)))));
  std::string text = str(kVersionLine, ": 0.2\n");
  for (const Merge& merge : merges) {
    PDL_CHECK(merge.left < spelling.size() && merge.right < spelling.size(), "merge ", spelling.size() - 256);
    text.append(spelling[merge.left]).append(" ").append(spelling[merge.right]).append("\n");
    spelling.push_back(spelling[merge.left] + spelling[merge.right]);
  }
  OutputFile file(path);
  file.write(text.data(), static_cast<std::int64_t>(text.size()));
  file.commit();
}

}  // namespace pdl
