#include "engine/data/inspect.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iomanip>
#include <sstream>
#include <vector>

#include "engine/base/error.h"
#include "engine/data/bpe.h"
#include "engine/data/idx_reader.h"
#include "engine/data/input_file.h"
#include "engine/data/token_file.h"

namespace pdl {
namespace {

constexpr std::size_t kShown = 16;        // samples of a file that are printed
constexpr std::size_t kShownBytes = 100;  // of a text

class Report {
 public:
  template <typename Value>
  void line(std::string_view key, const Value& value) {
    out_ << key << ": " << value << '\n';
  }
  std::string text() const { return out_.str(); }

 private:
  std::ostringstream out_;
};

template <typename Values>
std::string first_of(const Values& values) {
  std::ostringstream out;
  const std::size_t count = std::min(kShown, values.size());
  for (std::size_t i = 0; i < count; ++i) out << (i == 0 ? "" : " ") << static_cast<std::int64_t>(values[i]);
  if (values.size() > kShown) out << " ...";
  return out.str();
}

// Control and non-ASCII bytes as \xNN, so that any file can be shown on any terminal.
std::string escaped(std::string_view text) {
  std::ostringstream out;
  for (const char c : text.substr(0, kShownBytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out << "\\n";
    } else if (byte < 0x20 || byte >= 0x7F) {
      out << "\\x" << std::hex << std::setw(2) << std::setfill('0') << static_cast<int>(byte) << std::dec;
    } else {
      out << c;
    }
  }
  if (text.size() > kShownBytes) out << " ...";
  return out.str();
}

void describe_images(const std::string& path, Report& report) {
  const IdxImages images = read_idx_images(path);
  report.line("images", images.count);
  report.line("shape", str("[", images.height, ", ", images.width, ", ", images.channels, "]"));
  std::array<double, 256> counts{};
  for (const std::uint8_t pixel : images.pixels) counts[pixel] += 1.0;
  double mean = 0.0, square = 0.0;
  for (std::size_t value = 0; value < counts.size(); ++value) {
    const double share = counts[value] / static_cast<double>(images.pixels.size());
    const double level = static_cast<double>(value) / 255.0;
    mean += share * level;
    square += share * level * level;
  }
  report.line("mean", mean);
  report.line("standard_deviation", std::sqrt(std::max(0.0, square - mean * mean)));
}

void describe_labels(const std::string& path, Report& report) {
  const std::vector<std::uint8_t> labels = read_idx_labels(path, 256);
  report.line("labels", labels.size());
  report.line("largest", static_cast<int>(*std::max_element(labels.begin(), labels.end())));
  report.line("first", first_of(labels));
}

void describe_tokens(const std::string& path, Report& report) {
  const TokenFile file(path, TokenFormat::llmc, kMostTokens);
  report.line("tokens", file.tokens().size());
  report.line("largest", *std::max_element(file.tokens().begin(), file.tokens().end()));
  report.line("first", first_of(file.tokens()));
}

void describe_merges(const std::string& path, Report& report) {
  const std::vector<Merge> merges = read_merges(path);
  report.line("merges", merges.size());
  report.line("vocabulary_size", static_cast<std::int64_t>(merges.size()) + kByteValues);
}

void describe_text(const std::string& path, Report& report) {
  const std::string text = read_whole_file(path);
  report.line("lines", std::count(text.begin(), text.end(), '\n'));
  report.line("bytes_of_text", text.size());
  report.line("first", escaped(text));
}

// Without this line a merges file is a text like any other.
bool looks_like_merges(std::string_view start) { return start.starts_with("#version"); }

bool looks_like_text(std::string_view start) {
  return std::none_of(start.begin(), start.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x20 && byte != '\n' && byte != '\r' && byte != '\t' && byte != '\f';
  });
}

}  // namespace

std::string_view name_of(FileFormat format) {
  switch (format) {
    case FileFormat::idx_images:
      return "IDX images";
    case FileFormat::idx_labels:
      return "IDX labels";
    case FileFormat::llmc_tokens:
      return "llm.c tokens";
    case FileFormat::merges:
      return "byte-pair merges";
    case FileFormat::text:
      return "text";
    case FileFormat::unknown:
      return "unknown";
  }
  return "?";
}

FileFormat sniff_format(const std::string& path) {
  InputFile file(path);
  std::array<char, 4096> bytes;
  const auto size = static_cast<std::size_t>(file.read(bytes.data(), bytes.size()));
  const std::string_view start(bytes.data(), size);
  if (size == 0) return FileFormat::unknown;
  if (size >= 4) {
    std::array<unsigned char, 4> first;
    std::memcpy(first.data(), bytes.data(), 4);
    const std::uint32_t big =
        (std::uint32_t{first[0]} << 24) | (std::uint32_t{first[1]} << 16) | (std::uint32_t{first[2]} << 8) | first[3];
    if (big == kIdxGreyImagesMagic || big == kIdxImagesMagic) return FileFormat::idx_images;
    if (big == kIdxLabelsMagic) return FileFormat::idx_labels;
    std::int32_t little = 0;
    std::memcpy(&little, bytes.data(), 4);
    if (little == kLlmcMagic) return FileFormat::llmc_tokens;
  }
  if (looks_like_merges(start)) return FileFormat::merges;
  return looks_like_text(start) ? FileFormat::text : FileFormat::unknown;
}

std::string inspect(const std::string& path) {
  const FileFormat format = sniff_format(path);
  Report report;
  report.line("path", path);
  report.line("format", name_of(format));
  {
    const InputFile file(path);
    report.line("compressed", file.compressed() ? "gzip" : "no");
    if (!file.compressed()) report.line("bytes", file.most_bytes());
  }
  switch (format) {
    case FileFormat::idx_images:
      describe_images(path, report);
      break;
    case FileFormat::idx_labels:
      describe_labels(path, report);
      break;
    case FileFormat::llmc_tokens:
      describe_tokens(path, report);
      break;
    case FileFormat::merges:
      describe_merges(path, report);
      break;
    case FileFormat::text:
      describe_text(path, report);
      break;
    case FileFormat::unknown:
      report.line(
          "note",
          "no known mark at its start; tokens without a header are used only when their format, nanogpt, is named");
      break;
  }
  return report.text();
}

}  // namespace pdl
