#pragma once
// What a data file is, told by its content: for `pdlbench data inspect`.

#include <string>
#include <string_view>

namespace pdl {

enum class FileFormat { idx_images, idx_labels, llmc_tokens, merges, text, unknown };

/// "IDX images", "llm.c tokens", ...
std::string_view name_of(FileFormat format);

/// Looks at the start of a file, decompressed if need be. Files of bare tokens have no mark and are never guessed: they
/// come out as `unknown` or `text`. Throws Error(data) when the file cannot be read.
FileFormat sniff_format(const std::string& path);

/// A few lines "key: value" about the file: format, size, counts, ranges, the first samples. Reads and checks it whole,
/// so a damaged file throws Error(data).
std::string inspect(const std::string& path);

}  // namespace pdl
