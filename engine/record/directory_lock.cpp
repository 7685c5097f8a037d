#include "engine/record/directory_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "engine/base/error.h"
#include "engine/record/durable_file.h"
#include "engine/record/records.h"

namespace pdl {
namespace {

constexpr int kAttempts = 10;
constexpr int kLookingTimeMs = 500;  // far longer than anybody needs to look at a lock

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

/// First line of a file of the system, "" where there is none.
std::string system_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// When a process started, in ticks since boot: with the boot's id it tells a process from a later one of the same
/// number. "" when there is no such process, or only its remains; "?" where the system does not say.
std::string process_start(pid_t process) {
  if (::kill(process, 0) != 0 && errno == ESRCH) return "";
  const std::string line = system_line(str("/proc/", process, "/stat"));
  const std::size_t name_end = line.rfind(')');  // the name in front may hold anything
  if (name_end == std::string::npos) return "?";
  std::istringstream fields(line.substr(name_end + 1));
  std::string field;
  fields >> field;
  if (field == "Z" || field == "X") return "";
  for (int i = 4; i <= 22; ++i) fields >> field;
  return field;
}

std::string boot_id() { return system_line("/proc/sys/kernel/random/boot_id"); }

using Facts = std::map<std::string, std::string>;

Facts read_facts(int descriptor) {
  char text[1024];
  const ssize_t count = ::pread(descriptor, text, sizeof text, 0);
  std::istringstream lines(std::string(text, count > 0 ? static_cast<std::size_t>(count) : 0));
  Facts facts;
  for (std::string line; std::getline(lines, line);) {
    const std::size_t equals = line.find('=');
    if (equals != std::string::npos) facts[line.substr(0, equals)] = line.substr(equals + 1);
  }
  return facts;
}

enum class Holder { living, dead, unknown };

/// Of a lock file that nobody keeps locked, as far as the file system can tell (`can_tell`).
Holder judge(Facts facts, bool can_tell) {
  // Killed between creating and signing it; one that is about to sign it will find out and step back.
  if (facts.empty() && can_tell) return Holder::dead;
  if (facts["host"] != host_name() || facts["pid"].empty()) return Holder::unknown;
  if (facts["boot"] != boot_id()) return Holder::dead;
  const std::string start = process_start(static_cast<pid_t>(std::strtol(facts["pid"].c_str(), nullptr, 10)));
  return start.empty() || start != facts["process_start"] ? Holder::dead : Holder::living;
}

bool is_at(int descriptor, const std::string& path) {
  struct stat ours {
  }, named{};
  return ::fstat(descriptor, &ours) == 0 && ::stat(path.c_str(), &named) == 0 && ours.st_dev == named.st_dev &&
         ours.st_ino == named.st_ino;
}

/// Waits out those who only look. False when somebody else keeps it; true as well where there are no such locks.
bool lock_new_file(int descriptor) {
  for (int waited_ms = 0; waited_ms < kLookingTimeMs; ++waited_ms) {
    if (::flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return true;
    ::usleep(1000);
  }
  return false;
}

[[noreturn]] void refuse(const std::string& path, Facts facts, const char* why) {
  const bool readable = !facts["host"].empty();
  const std::string holder =
      readable ? str("process ", facts["pid"], " on ", facts["host"], " since ", facts["start"]) : "an unnamed process";
  throw ConfigError(str(path, " is held by ", holder, why));
}

}  // namespace

DirectoryLock::DirectoryLock(std::string path, bool force) : path_(std::move(path)) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (create() || take_over(force)) return;
  }
  throw ConfigError(str(path_, ": other processes are taking this lock at the same time"));
}

DirectoryLock::~DirectoryLock() {
  // Removed while still locked: whoever has opened it meanwhile sees that it is gone and tries again.
  if (is_at(descriptor_, path_)) ::unlink(path_.c_str());
  ::close(descriptor_);
}

/// False when the file is there already, or was taken from under us before we had signed it.
bool DirectoryLock::create() {
  descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (descriptor_ < 0 && errno != EEXIST) fail_io("create", path_, errno);
  if (descriptor_ < 0) return false;
  if (lock_new_file(descriptor_) && is_at(descriptor_, path_)) {
    sign();
    return true;
  }
  ::close(descriptor_);
  return false;
}

/// False when the file changed hands meanwhile: try again from the start.
bool DirectoryLock::take_over(bool force) {
  const int descriptor = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0 && errno != ENOENT) fail_io("open", path_, errno);
  if (descriptor < 0) return false;
  const int lock_error = ::flock(descriptor, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
  const Facts facts = read_facts(descriptor);
  const Holder holder = lock_error == EWOULDBLOCK ? Holder::living : judge(facts, lock_error == 0);
  const bool same = is_at(descriptor, path_);
  if (same && (holder == Holder::dead || (holder == Holder::unknown && force))) {
    descriptor_ = descriptor;
    sign();
    return true;
  }
  ::close(descriptor);
  if (same && holder == Holder::living) refuse(path_, facts, ", which is still running; use another --out");
  if (same) refuse(path_, facts, "; if that run is gone, delete the file, or use --force to replace its records");
  return false;
}

/// Writes who we are into the file that we hold.
void DirectoryLock::sign() {
  const std::string facts = str("host=", host_name(), "\npid=", ::getpid(), "\nstart=", utc_now(),
                                "\nprocess_start=", process_start(::getpid()), "\nboot=", boot_id(), "\n");
  const bool written = ::ftruncate(descriptor_, 0) == 0 &&
                       ::pwrite(descriptor_, facts.data(), facts.size(), 0) == static_cast<ssize_t>(facts.size());
  if (written) return;
  const int error = errno;
  ::unlink(path_.c_str());
  ::close(descriptor_);
  fail_io("write to", path_, error);
}

}  // namespace pdl
