#include "engine/data/pre_split.h"

#include <cstdint>

#include "engine/base/error.h"

#ifndef PDL_WITH_PCRE2
#define PDL_WITH_PCRE2 0
#endif

#if PDL_WITH_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif

namespace pdl {

#if PDL_WITH_PCRE2

namespace {

// As published with GPT-2.
constexpr const char* kPattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

std::string message_of(int code) {
  PCRE2_UCHAR text[256] = {};
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

// Bytes of the valid UTF-8 character at the start of `text`, or 0: no overlong forms, no surrogates, none past
// U+10FFFF.
std::size_t character_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t size = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < size) return 0;
  for (std::size_t i = 1; i < size; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  const unsigned char second = byte(1);
  const bool valid = (lead != 0xE0 || second >= 0xA0) && (lead != 0xED || second < 0xA0) &&
                     (lead != 0xF0 || second >= 0x90) && (lead != 0xF4 || second < 0x90);
  return valid ? size : 0;
}

// Length of the longest start of `text` that is valid UTF-8 throughout (`valid`), or nowhere.
std::size_t run_length(std::string_view text, bool valid) {
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t bytes = character_bytes(text.substr(at));
    if ((bytes > 0) != valid) break;
    at += valid ? bytes : 1;
  }
  return at;
}

}  // namespace

struct PreSplitter::Pattern {
  pcre2_code* code = nullptr;
  ~Pattern() { pcre2_code_free(code); }

  void split(std::string_view text, const std::function<void(std::string_view)>& visit) const;
};

PreSplitter::PreSplitter() : pattern_(std::make_unique<Pattern>()) {
  int error = 0;
  PCRE2_SIZE where = 0;
  pattern_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(kPattern), PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP,
                                 &error, &where, nullptr);
  PDL_CHECK(pattern_->code != nullptr, "PCRE2 at ", where, ": ", message_of(error));
  // Where the system forbids generated code, matching goes on interpreted.
  pcre2_jit_compile(pattern_->code, PCRE2_JIT_COMPLETE);
}

bool PreSplitter::available() { return true; }

void PreSplitter::Pattern::split(std::string_view text, const std::function<void(std::string_view)>& visit) const {
  const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data(
      pcre2_match_data_create_from_pattern(code, nullptr), pcre2_match_data_free);
  PDL_CHECK(data != nullptr, "PCRE2 out of memory");
  for (std::size_t at = 0; at < text.size();) {
    const int matched = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                                    PCRE2_NO_UTF_CHECK, data.get(), nullptr);
    PDL_CHECK(matched > 0, "PCRE2 at byte ", at, ": ", message_of(matched));
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(data.get());
    // Every character is of one of the pattern's classes, so matches follow each other without gaps.
    PDL_CHECK(bounds[0] == at && bounds[1] > at, "a piece at bytes ", bounds[0], "-", bounds[1], ", expected at ", at);
    visit(text.substr(at, bounds[1] - at));
    at = bounds[1];
  }
}

void PreSplitter::split(std::string_view text, const std::function<void(std::string_view)>& visit) const {
  // PCRE2 would check the whole rest of the text for validity at every match; one pass here replaces that.
  while (!text.empty()) {
    const std::size_t valid = run_length(text, true);
    if (valid > 0) pattern_->split(text.substr(0, valid), visit);
    text.remove_prefix(valid);
    const std::size_t invalid = run_length(text, false);
    if (invalid > 0) visit(text.substr(0, invalid));
    text.remove_prefix(invalid);
  }
}

#else

struct PreSplitter::Pattern {};

PreSplitter::PreSplitter() {
  throw Error(
      "this build has no PCRE2, which byte-pair encoding needs: install libpcre2-dev and build again, or use the "
      "tokenizer bytes",
      ExitCode::unsupported);
}

bool PreSplitter::available() { return false; }

void PreSplitter::split(std::string_view, const std::function<void(std::string_view)>&) const {}

#endif

PreSplitter::~PreSplitter() = default;
PreSplitter::PreSplitter(PreSplitter&&) noexcept = default;
PreSplitter& PreSplitter::operator=(PreSplitter&&) noexcept = default;

}  // namespace pdl
