#pragma once
// Files of token ids, 16 bits each, little-endian:
//
//   llmc     256 int32 of header (magic 20240520, version 1, number of tokens, zeros), then the tokens; as llm.c reads
//   it nanogpt  the tokens and nothing else; never guessed, because any file of even size would do
//
// Files are mapped, not read: ranks of one host share the pages.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/data/output_file.h"
#include "engine/data/tokenizer.h"

namespace pdl {

enum class TokenFormat { llmc, nanogpt };

inline constexpr std::int32_t kLlmcMagic = 20240520;
inline constexpr std::int32_t kLlmcVersion = 1;
inline constexpr std::int64_t kLlmcHeaderBytes = 256 * 4;

class TokenFile {
 public:
  /// Throws Error(data) with path, offset, expected and got: a wrong magic number or version, a size that is not the
  /// header's, no tokens, a token outside `vocabulary_size`.
  TokenFile(std::string path, TokenFormat format, std::int64_t vocabulary_size);
  ~TokenFile();
  TokenFile(TokenFile&& other) noexcept;
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;
  TokenFile& operator=(TokenFile&&) = delete;

  const std::string& path() const { return path_; }
  std::span<const Token> tokens() const { return tokens_; }

 private:
  // Checks the file against `format` and says where the tokens are.
  std::span<const Token> checked_tokens(TokenFormat format, std::int64_t vocabulary_size) const;

  std::string path_;
  void* mapping_ = nullptr;
  std::int64_t bytes_ = 0;
  std::span<const Token> tokens_;
};

/// Writes an llmc file; it appears when `commit` succeeds.
class TokenFileWriter {
 public:
  explicit TokenFileWriter(const std::string& path);
  /// Throws Error(data) beyond 2^31 - 1 tokens, the most that the header can say.
  void write(std::span<const Token> tokens);
  void commit();
  std::int64_t tokens() const { return tokens_; }

 private:
  OutputFile file_;
  std::int64_t tokens_ = 0;
};

/// The files that `pattern` (with * ? [...]) names, sorted; a pattern without such characters is itself. Throws
/// Error(data) when there is none.
std::vector<std::string> matching_files(const std::string& pattern);

}  // namespace pdl
