#include "engine/record/durable_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "engine/base/error.h"

namespace pdl {
namespace {

/// A write beyond the file size limit of the shell raises SIGXFSZ, which would end the process without a word. Held
/// back on this thread, the write fails with EFBIG like any other.
class HoldFileSizeSignal {
 public:
  HoldFileSizeSignal() {
    ::sigemptyset(&signal_);
    ::sigaddset(&signal_, SIGXFSZ);
    ::pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~HoldFileSizeSignal() {
    const timespec at_once{};
    while (::sigtimedwait(&signal_, nullptr, &at_once) > 0) {
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  HoldFileSizeSignal(const HoldFileSizeSignal&) = delete;
  HoldFileSizeSignal& operator=(const HoldFileSizeSignal&) = delete;

 private:
  sigset_t signal_{}, before_{};
};

/// How far a write came, and the errno that stopped it (0: all is written).
struct Written {
  std::size_t bytes = 0;
  int error = 0;
};

/// One write unless the system takes only part of it.
Written write_all(int descriptor, std::string_view text) {
  const HoldFileSizeSignal hold;
  Written written;
  while (written.bytes < text.size()) {
    const ssize_t count = ::write(descriptor, text.data() + written.bytes, text.size() - written.bytes);
    if (count > 0) {
      written.bytes += static_cast<std::size_t>(count);
    } else if (count == 0 || errno != EINTR) {
      written.error = count == 0 ? EIO : errno;
      break;
    }
  }
  return written;
}

/// What cannot be synced (some network and special files) says so with EINVAL: nothing is lost by going on.
int sync_error(int descriptor) {
  while (::fsync(descriptor) != 0) {
    if (errno != EINTR) return errno == EINVAL || errno == ENOTSUP ? 0 : errno;
  }
  return 0;
}

std::string parent_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

/// Writes and syncs the temporary file; returns errno and what failed.
std::pair<int, const char*> write_temporary(const std::string& path, const std::string& text) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor < 0) return {errno, "create"};
  std::pair<int, const char*> failure{write_all(descriptor, text).error, "write"};
  if (failure.first == 0) failure = {sync_error(descriptor), "sync"};
  // Network file systems report a full quota as late as here.
  if (::close(descriptor) != 0 && failure.first == 0) failure = {errno, "close"};
  return failure;
}

}  // namespace

void fail_io(const std::string& what, const std::string& path, int error_number) {
  throw Error(str("cannot ", what, " ", path, ": ", std::strerror(error_number)));
}

AppendFile::AppendFile(std::string path) : path_(std::move(path)) {
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail_io("open", path_, errno);
}

AppendFile::~AppendFile() {
  // Nothing to report: whoever cares about the content has called sync.
  ::close(descriptor_);
}

void AppendFile::append(std::string_view text) {
  require_in_place();
  const std::int64_t before = size();
  const Written written = write_all(descriptor_, text);
  if (written.error == 0) return;
  // The part that fitted would make the next piece unreadable. If this fails too, readers still drop the partial end.
  if (written.bytes > 0) [[maybe_unused]]
    const int undone = ::ftruncate(descriptor_, before);
  fail_io("write to", path_, written.error);
}

void AppendFile::truncate(std::int64_t bytes) {
  if (::ftruncate(descriptor_, bytes) != 0) fail_io("shorten", path_, errno);
}

void AppendFile::sync() {
  if (const int error = sync_error(descriptor_); error != 0) fail_io("sync", path_, error);
  require_in_place();
}

std::int64_t AppendFile::size() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail_io("examine", path_, errno);
  return status.st_size;
}

void AppendFile::require_in_place() const {
  // An open file that was removed takes writes without complaint, and they vanish with it.
  struct stat ours {
  }, named{};
  if (::fstat(descriptor_, &ours) != 0) fail_io("examine", path_, errno);
  if (::stat(path_.c_str(), &named) != 0) fail_io("find", path_, errno);
  if (ours.st_dev != named.st_dev || ours.st_ino != named.st_ino) {
    throw Error(str("cannot write to ", path_, ": another file was put in its place"));
  }
}

void replace_file(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".tmp";
  auto [error, what] = write_temporary(temporary, text);
  if (error == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) {
    error = errno;
    what = "rename";
  }
  if (error != 0) {
    ::unlink(temporary.c_str());
    fail_io(what, temporary, error);
  }
  sync_directory(parent_of(path));
}

std::string read_file(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  int error = descriptor < 0 ? errno : 0;
  std::string text;
  while (error == 0) {
    char piece[65536];
    const ssize_t count = ::read(descriptor, piece, sizeof piece);
    if (count > 0) text.append(piece, static_cast<std::size_t>(count));
    if (count < 0 && errno != EINTR) error = errno;
    if (count == 0) break;
  }
  if (descriptor >= 0) ::close(descriptor);
  if (error != 0) throw Error(str("cannot read ", path, ": ", std::strerror(error)), ExitCode::data);
  return text;
}

bool file_exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

void remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) fail_io("remove", path, errno);
}

void create_directory(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) fail_io("create", path, error.value());
  if (!std::filesystem::is_directory(path, error)) fail_io("create", path, ENOTDIR);
}

void sync_directory(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail_io("open", path, errno);
  const int error = sync_error(descriptor);
  ::close(descriptor);
  if (error != 0) fail_io("sync", path, error);
}

}  // namespace pdl
