#include "engine/data/input_file.h"

#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "engine/base/error.h"

namespace pdl {
namespace {

gzFile as_gz(void* stream) { return static_cast<gzFile>(stream); }

// What deflate can reach at best: 258 bytes from 2 bits, and some slack for headers.
constexpr std::int64_t kBestRatio = 1040;

}  // namespace

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  struct stat status {};
  if (::stat(path_.c_str(), &status) != 0)
    throw Error(str(path_, ": cannot be opened: ", std::strerror(errno)), ExitCode::data);
  if (!S_ISREG(status.st_mode)) throw Error(str(path_, ": is not a regular file"), ExitCode::data);
  file_bytes_ = status.st_size;
  errno = 0;
  stream_ = ::gzopen(path_.c_str(), "rb");
  if (stream_ == nullptr)
    throw Error(str(path_, ": cannot be opened: ", errno != 0 ? std::strerror(errno) : "out of memory"),
                ExitCode::data);
  ::gzbuffer(as_gz(stream_), 1 << 17);
  compressed_ = ::gzdirect(as_gz(stream_)) == 0;
}

InputFile::~InputFile() { ::gzclose_r(as_gz(stream_)); }

std::int64_t InputFile::most_bytes() const { return compressed_ ? file_bytes_ * kBestRatio : file_bytes_; }

std::int64_t InputFile::read(void* destination, std::int64_t bytes) {
  constexpr std::int64_t kLargestCall = std::int64_t{1} << 30;  // zlib counts in unsigned int
  std::int64_t total = 0;
  while (total < bytes) {
    const auto want = static_cast<unsigned>(std::min(bytes - total, kLargestCall));
    const int got = ::gzread(as_gz(stream_), static_cast<char*>(destination) + total, want);
    if (got > 0) {
      total += got;
      offset_ += got;
      continue;
    }
    int code = Z_OK;
    const char* text = ::gzerror(as_gz(stream_), &code);
    if (code == Z_BUF_ERROR) fail(offset_, "more of the gzip stream", "the end of the file: it is truncated");
    if (code == Z_ERRNO) fail(offset_, "readable data", std::strerror(errno));
    if (code != Z_OK && code != Z_STREAM_END) fail(offset_, "an intact gzip stream", text);
    break;
  }
  return total;
}

void InputFile::read_exactly(void* destination, std::int64_t bytes, std::string_view what) {
  const std::int64_t start = offset_;
  const std::int64_t got = read(destination, bytes);
  if (got == bytes) return;
  const char* why = start == 0 && got == 0 ? " (the file is empty)" : " (the file is truncated)";
  fail(start, str(bytes, " bytes of ", what), str(got, " bytes", why));
}

void InputFile::expect_end() {
  const std::int64_t end = offset_;
  char extra;
  if (read(&extra, 1) != 0) fail(end, "the end of the file", "more bytes");
}

void InputFile::fail(std::int64_t offset, std::string_view expected, std::string_view got) const {
  throw Error(str(path_, ": offset ", offset, ": expected ", expected, ", got ", got), ExitCode::data);
}

std::string read_whole_file(const std::string& path) {
  InputFile file(path);
  std::string text;
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  // A plain file's size is known; that of a compressed one is found by reading on until nothing comes.
  std::size_t room = file.compressed() ? kPiece : static_cast<std::size_t>(file.most_bytes()) + 1;
  while (true) {
    const std::size_t before = text.size();
    text.resize(before + room);
    const auto got = static_cast<std::size_t>(file.read(text.data() + before, static_cast<std::int64_t>(room)));
    text.resize(before + got);
    if (got < room) return text;
    room = std::max(kPiece, text.size());
  }
}

}  // namespace pdl
