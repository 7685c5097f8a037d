#pragma once
// A data file read from front to back, plain or gzip. Every failure is an Error(data) that says path, offset, what was
// expected and what was found. Offsets count bytes after decompression.

#include <cstdint>
#include <string>
#include <string_view>

namespace pdl {

class InputFile {
 public:
  /// Throws Error(data) when `path` is no readable regular file. Compression is told by the content, not by the name.
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  bool compressed() const { return compressed_; }
  std::int64_t offset() const { return offset_; }
  /// The size of a plain file; for gzip the most that so small a file can hold. Checked against before memory is taken
  /// for what a header promises.
  std::int64_t most_bytes() const;

  /// Reads up to `bytes`; fewer only at the end. Throws for a broken or truncated gzip stream.
  std::int64_t read(void* destination, std::int64_t bytes);
  /// Reads exactly `bytes` of `what` ("header", "pixels"), else throws.
  void read_exactly(void* destination, std::int64_t bytes, std::string_view what);
  /// Throws when anything follows.
  void expect_end();
  /// Throws Error(data) "PATH: offset N: expected ..., got ...".
  [[noreturn]] void fail(std::int64_t offset, std::string_view expected, std::string_view got) const;

 private:
  std::string path_;
  void* stream_ = nullptr;  // zlib's gzFile
  std::int64_t file_bytes_ = 0, offset_ = 0;
  bool compressed_ = false;
};

/// The whole content of a file, decompressed.
std::string read_whole_file(const std::string& path);

}  // namespace pdl
