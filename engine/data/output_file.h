#pragma once
// A file that appears whole or not at all: written under a temporary name beside it, flushed to disk, then renamed.

#include <cstdint>
#include <string>

namespace pdl {

class OutputFile {
 public:
  /// Throws Error(data) with path and reason, as do `write` and `commit`.
  explicit OutputFile(std::string path);
  /// Removes what was written unless `commit` succeeded.
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, std::int64_t bytes);
  /// Overwrites `bytes` at `offset`, which were written before; for a header known only at the end.
  void overwrite(std::int64_t offset, const void* data, std::int64_t bytes);
  /// Makes the file visible under its name. Nothing may be written after it.
  void commit();

 private:
  [[noreturn]] void fail(const char* what) const;
  void flush();

  std::string path_, temporary_, pending_;
  std::int64_t offset_ = 0;  // of what was handed to the system
  int descriptor_ = -1;
};

}  // namespace pdl
