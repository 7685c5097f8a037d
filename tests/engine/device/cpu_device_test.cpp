#include "engine/device/cpu_device.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <unistd.h>

#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// A tree of small files that stands in for /proc and /sys; removed at the end.
class FakeRoot {
 public:
  FakeRoot() : path_(std::filesystem::temp_directory_path() / ("pdl_fake_root_" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(path_);
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path file = path_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace

TEST_CASE("this machine has a name and some memory") {
  CHECK(!cpu_name().empty());
  CHECK(host_memory_bytes() > 1 << 20);
  const auto device = make_cpu_device({.kind = "cpu", .threads = 3});
  CHECK(device->info().kind == "cpu");
  CHECK(device->info().threads == 3);
  CHECK(device->info().uuid.empty());
  CHECK(device->memory_limit_bytes() == device->info().memory_bytes);
  CHECK(device->used_bytes() > 1 << 20);
  CHECK(device->state().empty());
}

TEST_CASE("the stopwatch of a CPU runs with the host's clock") {
  const auto device = make_cpu_device({});
  const auto stopwatch = device->make_stopwatch();
  const std::int64_t first = stopwatch->mark();
  CHECK(stopwatch->seconds(first, first) == 0.0);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const std::int64_t second = stopwatch->mark();
  CHECK(stopwatch->seconds(first, second) >= 0.005);
  CHECK(stopwatch->seconds(first, second) < 5.0);
}

TEST_CASE("the processor's name") {
  const FakeRoot root;
  CHECK(!cpu_name(root.path()).empty());
  root.write("proc/cpuinfo",
             "processor\t: 0\nmodel name\t: Some Chip @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: Other\n");
  CHECK(cpu_name(root.path()) == "Some Chip @ 2 GHz");
}

TEST_CASE("memory is the least of what is installed and what the control groups allow") {
  const FakeRoot root;
  CHECK(host_memory_bytes(root.path()) == 0);
  root.write("proc/meminfo", "MemTotal:        1000 kB\nMemFree:   10 kB\n");
  CHECK(host_memory_bytes(root.path()) == 1000 * 1024);

  root.write("proc/self/cgroup", "0::/job/step\n");
  root.write("sys/fs/cgroup/job/step/memory.max", "max\n");
  CHECK(host_memory_bytes(root.path()) == 1000 * 1024);
  root.write("sys/fs/cgroup/job/memory.max", "500000\n");
  CHECK(host_memory_bytes(root.path()) == 500000);

  root.write("proc/self/cgroup", "9:cpu,memory:/not/seen/inside\n3:cpuset:/\n");
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "400000\n");
  CHECK(host_memory_bytes(root.path()) == 400000);
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  CHECK(host_memory_bytes(root.path()) == 1000 * 1024);
}
