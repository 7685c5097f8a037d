#include "engine/data/token_file.h"

#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "engine/base/error.h"

namespace pdl {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are mapped as they are");

using Header = std::array<std::int32_t, 256>;
static_assert(sizeof(Header) == kLlmcHeaderBytes);

[[noreturn]] void fail(const std::string& path, std::int64_t offset, const std::string& expected,
                       const std::string& got) {
  throw Error(str(path, ": offset ", offset, ": expected ", expected, ", got ", got), ExitCode::data);
}

}  // namespace

TokenFile::TokenFile(std::string path, TokenFormat format, std::int64_t vocabulary_size) : path_(std::move(path)) {
  const int descriptor = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) throw Error(str(path_, ": cannot be opened: ", std::strerror(errno)), ExitCode::data);
  struct stat status {};
  const bool known = ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
  bytes_ = known ? status.st_size : 0;
  if (bytes_ > 0) mapping_ = ::mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ, MAP_SHARED, descriptor, 0);
  const int reason = errno;
  ::close(descriptor);
  if (!known) throw Error(str(path_, ": is not a regular file"), ExitCode::data);
  if (bytes_ == 0) fail(path_, 0, "tokens", "an empty file");
  if (mapping_ == MAP_FAILED) throw Error(str(path_, ": cannot be mapped: ", std::strerror(reason)), ExitCode::data);
  try {
    tokens_ = checked_tokens(format, vocabulary_size);
  } catch (...) {
    ::munmap(mapping_, static_cast<std::size_t>(bytes_));
    throw;
  }
}

TokenFile::TokenFile(TokenFile&& other) noexcept
    : path_(std::move(other.path_)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      tokens_(std::exchange(other.tokens_, {})) {}

TokenFile::~TokenFile() {
  if (mapping_ != nullptr) ::munmap(mapping_, static_cast<std::size_t>(bytes_));
}

std::span<const Token> TokenFile::checked_tokens(TokenFormat format, std::int64_t vocabulary_size) const {
  const auto* bytes = static_cast<const char*>(mapping_);
  std::int64_t start = 0;
  if (format == TokenFormat::llmc) {
    start = kLlmcHeaderBytes;
    Header header{};
    std::memcpy(header.data(), bytes, static_cast<std::size_t>(std::min(bytes_, start)));
    if (bytes_ >= 4 && header[0] != kLlmcMagic)
      fail(path_, 0, str("magic number ", kLlmcMagic, " of a token file"),
           str(header[0], " (a file without header needs its format named: nanogpt)"));
    if (bytes_ < start) fail(path_, 0, str(start, " bytes of header"), str(bytes_, " bytes (the file is truncated)"));
    if (header[1] != kLlmcVersion) fail(path_, 4, str("version ", kLlmcVersion, " (16-bit tokens)"), str(header[1]));
    const std::int64_t held = (bytes_ - start) / 2;
    if (header[2] < 1 || header[2] != held || (bytes_ - start) % 2 != 0)
      fail(path_, 8, str("the number of tokens that ", bytes_, " bytes hold, ", held), str(header[2]));
  } else if (bytes_ % 2 != 0) {
    fail(path_, bytes_ - 1, "16-bit tokens and hence an even size", str(bytes_, " bytes"));
  }
  const std::span<const Token> tokens(reinterpret_cast<const Token*>(bytes + start),
                                      static_cast<std::size_t>((bytes_ - start) / 2));
  const auto wrong =
      std::find_if(tokens.begin(), tokens.end(), [&](Token token) { return std::int64_t{token} >= vocabulary_size; });
  if (wrong != tokens.end())
    fail(path_, start + 2 * (wrong - tokens.begin()), str("a token below the vocabulary's size ", vocabulary_size),
         str(*wrong));
  return tokens;
}

TokenFileWriter::TokenFileWriter(const std::string& path) : file_(path) {
  const Header empty{};
  file_.write(empty.data(), sizeof empty);
}

void TokenFileWriter::write(std::span<const Token> tokens) {
  tokens_ += static_cast<std::int64_t>(tokens.size());
  if (tokens_ > std::numeric_limits<std::int32_t>::max())
    throw Error("a token file holds at most 2147483647 tokens: split the text over several files", ExitCode::data);
  file_.write(tokens.data(), static_cast<std::int64_t>(tokens.size_bytes()));
}

void TokenFileWriter::commit() {
  Header header{};
  header[0] = kLlmcMagic;
  header[1] = kLlmcVersion;
  header[2] = static_cast<std::int32_t>(tokens_);
  file_.overwrite(0, header.data(), sizeof header);
  file_.commit();
}

std::vector<std::string> matching_files(const std::string& pattern) {
  if (pattern.find_first_of("*?[") == std::string::npos) return {pattern};
  glob_t found{};
  const int code = ::glob(pattern.c_str(), 0, nullptr, &found);
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + (code == 0 ? found.gl_pathc : 0));
  ::globfree(&found);
  if (paths.empty()) throw Error(str(pattern, ": no file matches"), ExitCode::data);
  return paths;
}

}  // namespace pdl
