#pragma once
// Files whose content survives a crash, and whose failures are never silent. Everything here uses plain system calls
// and checks every one: buffered streams lose the error of a full disk. Failures are Error(internal) with path and
// cause.

#include <cstdint>
#include <string>
#include <string_view>

namespace pdl {

/// A file that only grows by whole pieces of text: each is one write to a descriptor in append mode, so that a process
/// killed at any moment leaves whole pieces and at most one partial one at the end.
class AppendFile {
 public:
  /// Opens or creates PATH.
  explicit AppendFile(std::string path);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  /// All of `text` or, after a throw, none of it.
  void append(std::string_view text);
  /// Keeps the first `bytes` bytes.
  void truncate(std::int64_t bytes);
  /// Returns when the content is on the medium. Throws when the file is no longer where it was opened.
  void sync();
  std::int64_t size() const;
  const std::string& path() const { return path_; }

 private:
  void require_in_place() const;
  std::string path_;
  int descriptor_ = -1;
};

/// Puts `text` in place of PATH's content: readers see the old content or the new, even after a power cut. Writes
/// PATH.tmp, syncs it, renames it, syncs the directory. On failure the old content stays.
void replace_file(const std::string& path, const std::string& text);

/// The whole content. Throws Error(data) when PATH cannot be read.
std::string read_file(const std::string& path);
bool file_exists(const std::string& path);
/// No error when it is not there.
void remove_file(const std::string& path);

/// Creates PATH and its parents.
void create_directory(const std::string& path);
/// Makes creations, renames and removals in PATH durable.
void sync_directory(const std::string& path);

/// Throws "cannot WHAT PATH: No space left on device".
[[noreturn]] void fail_io(const std::string& what, const std::string& path, int error_number);

}  // namespace pdl
