#include "engine/device/cpu_device.h"

#include <omp.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>

namespace pdl {
namespace {

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

class CpuEvent final : public Event {};

class CpuStream final : public Stream {
 public:
  std::unique_ptr<Event> make_event() override { return std::make_unique<CpuEvent>(); }
  void record(Event&) override {}
  void wait(const Event&) override {}
  void synchronize() override {}
};

/// Memory that the system holds for this process.
std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<std::int64_t>(::sysconf(_SC_PAGESIZE));
}

/// Work is done when it is queued, so a mark is what the host's clock says, in nanoseconds.
class CpuStopwatch final : public Stopwatch {
 public:
  std::int64_t mark() override {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  }
  double seconds(std::int64_t from, std::int64_t to) override { return static_cast<double>(to - from) / 1e9; }
  void anchor() override {}
  double host_s(std::int64_t mark) override { return static_cast<double>(mark) / 1e9; }
};

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(const DeviceOptions& options)
      : Device(options.memory_limit_bytes > 0 ? options.memory_limit_bytes : host_memory_bytes()),
        info_{.kind = "cpu",
              .name = cpu_name(),
              .uuid = "",
              .memory_bytes = host_memory_bytes(),
              .threads = std::max(1, options.threads)} {
    omp_set_num_threads(info_.threads);  // of parallel regions that this thread, the only one that computes, starts
  }

  DeviceInfo info() const override { return info_; }
  Stream& compute_stream() override { return stream_; }
  std::unique_ptr<Stream> make_stream(bool) override { return std::make_unique<CpuStream>(); }
  std::unique_ptr<Stopwatch> make_stopwatch(Stream&) override { return std::make_unique<CpuStopwatch>(); }
  std::int64_t used_bytes() const override { return resident_bytes(); }

  void copy(void* destination, const void* source, std::int64_t bytes, Stream&) override {
    if (bytes > 0 && destination != source) std::memmove(destination, source, static_cast<std::size_t>(bytes));
  }

 protected:
  void* raw_allocate(std::int64_t bytes) override {
    // Large blocks start on a huge page and ask for such pages: matrix products then miss the address cache less often.
    constexpr std::int64_t kHugePage = 2 << 20;
    const bool large = bytes >= 2 * kHugePage;
    const std::int64_t alignment = large ? kHugePage : 64;
    if (bytes > kNoLimit - alignment) return nullptr;
    const std::int64_t size = (std::max<std::int64_t>(bytes, 1) + alignment - 1) / alignment * alignment;
    void* data = std::aligned_alloc(static_cast<std::size_t>(alignment), static_cast<std::size_t>(size));
    if (data == nullptr) return nullptr;
    if (large) ::madvise(data, static_cast<std::size_t>(size), MADV_HUGEPAGE);  // advice only: refusal is fine
    std::memset(data, 0, static_cast<std::size_t>(size));
    return data;
  }
  void raw_free(void* data, std::int64_t) noexcept override { std::free(data); }
  void* raw_allocate_host(std::int64_t bytes) override {
    return std::malloc(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)));
  }
  void raw_free_host(void* data) noexcept override { std::free(data); }

 private:
  DeviceInfo info_;
  CpuStream stream_;
};

/// The number at the start of a file, kNoLimit when there is none ("max", or no such file).
std::int64_t read_number(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return kNoLimit;
  std::int64_t value = kNoLimit;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  return error == std::errc() && end == word.data() + word.size() ? value : kNoLimit;
}

/// The least limit from a control group up to the root of its tree. Inside a container the tree may be cut short, so
/// that the group's own path does not exist; the root is looked at in any case.
std::int64_t group_limit(const std::string& tree, std::string group, const std::string& file) {
  std::int64_t limit = kNoLimit;
  while (true) {
    limit = std::min(limit, read_number(tree + group + "/" + file));
    if (group.empty()) return limit;
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
}

std::int64_t installed_memory(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  std::string key, unit;
  std::int64_t value = 0;
  while (file >> key >> value) {
    std::getline(file, unit);
    if (key == "MemTotal:") return value * 1024;
  }
  return kNoLimit;
}

}  // namespace

std::unique_ptr<Device> make_cpu_device(const DeviceOptions& options) { return std::make_unique<CpuDevice>(options); }

std::string cpu_name(const std::string& root) {
  std::ifstream file(root + "/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t colon = line.find(':');
    if (!line.starts_with("model name") || colon == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    if (begin != std::string::npos) return line.substr(begin);
  }
  utsname machine{};
  return ::uname(&machine) == 0 ? machine.machine : "unknown processor";
}

std::int64_t host_memory_bytes(const std::string& root) {
  std::int64_t limit = installed_memory(root);
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {  // "id:controllers:path"; version 2 has id 0 and no controllers
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    if (controllers == ",,") {
      limit = std::min(limit, group_limit(root + "/sys/fs/cgroup", group, "memory.max"));
    } else if (controllers.find(",memory,") != std::string::npos) {
      limit = std::min(limit, group_limit(root + "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes"));
    }
  }
  return limit == kNoLimit ? 0 : limit;
}

}  // namespace pdl
