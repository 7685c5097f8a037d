#pragma once
// Text to train on, cut into pieces that a split takes or leaves whole: the chapters of the King James Bible, or blocks
// of any UTF-8 file. Bytes pass through unchanged.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pdl {

/// Pieces in reading order; put together they are the whole text.
struct TextPieces {
  std::string source;  ///< path, or package
  std::vector<std::string> pieces;
};

struct TextSplit {
  std::string train, validation;
};

inline constexpr std::int64_t kKjvVerses = 31102;
inline constexpr std::int64_t kKjvChapters = 1189;
inline constexpr const char* kKjvPackage = "bible-kjv";

/// The 1189 chapters, one verse a line, without verse labels. Runs `bible -f gen1:1-rev22:21` (Debian package
/// bible-kjv), or reads that command's output from `prepared_path` unless it is empty. Throws Error(data) when there is
/// no such program (naming the package), and when a verse is missing.
TextPieces read_kjv(const std::string& prepared_path = "");

/// Cuts lines of the form "Ge1:1 In the beginning ..." into chapters and drops the labels. `source` stands in messages.
/// Throws Error(data) for a line without a label.
std::vector<std::string> chapters_of(std::string_view labelled_verses, const std::string& source);

/// A file in blocks of at least `block_bytes`, each cut after a line's end where one is near, never inside a UTF-8
/// character. Plain or gzip. Throws Error(data) when it cannot be read or is empty.
TextPieces read_text_blocks(const std::string& path, std::int64_t block_bytes = 8192);

/// Pieces n-1, 2n-1, ... become the validation text, so that the language of both parts is alike; n = 0 leaves none.
TextSplit split_every_nth(const std::vector<std::string>& pieces, std::int64_t n);

}  // namespace pdl
