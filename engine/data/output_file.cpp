#include "engine/data/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "engine/base/error.h"

namespace pdl {
namespace {

constexpr std::size_t kPending = std::size_t{1} << 20;

// False with errno set when not all bytes could be written.
bool write_at(int descriptor, const char* data, std::int64_t bytes, std::int64_t offset) {
  while (bytes > 0) {
    const ssize_t wrote = ::pwrite(descriptor, data, static_cast<std::size_t>(bytes), offset);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    data += wrote;
    bytes -= wrote;
    offset += wrote;
  }
  return true;
}

}  // namespace

OutputFile::OutputFile(std::string path)
    : path_(std::move(path)), temporary_(str(path_, ".", static_cast<long>(::getpid()), ".tmp")) {
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail("cannot be created");
}

OutputFile::~OutputFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void OutputFile::write(const void* data, std::int64_t bytes) {
  pending_.append(static_cast<const char*>(data), static_cast<std::size_t>(bytes));
  if (pending_.size() >= kPending) flush();
}

void OutputFile::overwrite(std::int64_t offset, const void* data, std::int64_t bytes) {
  flush();
  PDL_CHECK(offset >= 0 && offset + bytes <= offset_, "bytes ", offset, "+", bytes, " of ", offset_);
  if (!write_at(descriptor_, static_cast<const char*>(data), bytes, offset)) fail("cannot be written");
}

void OutputFile::flush() {
  const auto bytes = static_cast<std::int64_t>(pending_.size());
  if (!write_at(descriptor_, pending_.data(), bytes, offset_)) fail("cannot be written");
  offset_ += bytes;
  pending_.clear();
}

void OutputFile::commit() {
  flush();
  // A full disk may show as late as here.
  if (::fsync(descriptor_) != 0) fail("cannot be flushed to disk");
  if (::close(std::exchange(descriptor_, -1)) != 0 || std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int reason = errno;
    ::unlink(temporary_.c_str());
    errno = reason;
    fail("cannot be completed");
  }
}

void OutputFile::fail(const char* what) const {
  throw Error(str(path_, ": ", what, ": ", std::strerror(errno)), ExitCode::data);
}

}  // namespace pdl
