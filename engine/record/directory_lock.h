#pragma once
// One run in one directory: a lock file made with O_EXCL that names host, process and start time of its holder.
//
// The holder also keeps an advisory lock (flock) on the file, which the system gives back when the process dies, in
// whatever way. Where the file system has none, the process id decides, on the holder's own host. A lock whose holder
// is dead is taken over; one of another host is refused, because nobody here can tell.

#include <string>

namespace pdl {

class DirectoryLock {
 public:
  /// Takes the lock PATH. Throws ConfigError with the holder's facts when another process has it. `force` takes over a
  /// lock whose holder may or may not live (another host, unreadable), never that of a living process.
  DirectoryLock(std::string path, bool force);
  /// Removes the file.
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  bool create();
  bool take_over(bool force);
  void sign();
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace pdl
