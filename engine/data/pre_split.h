#pragma once
// Cuts text into the pieces within which byte-pair encoding merges: GPT-2's pattern of contractions, words, numbers,
// other characters and white space. Needs PCRE2 for the Unicode classes; a build without it has no byte-pair encoding.

#include <functional>
#include <memory>
#include <string_view>

namespace pdl {

/// Thread-safe once built.
class PreSplitter {
 public:
  /// Throws Error(unsupported) in a build without PCRE2.
  PreSplitter();
  ~PreSplitter();
  PreSplitter(PreSplitter&&) noexcept;
  PreSplitter& operator=(PreSplitter&&) noexcept;

  /// Whether this build can split at all.
  static bool available();

  /// Calls `visit` with each piece in order; the pieces together are `text`. A run of bytes that are no UTF-8 is a
  /// piece of its own.
  void split(std::string_view text, const std::function<void(std::string_view)>& visit) const;

 private:
  struct Pattern;
  std::unique_ptr<Pattern> pattern_;
};

}  // namespace pdl
