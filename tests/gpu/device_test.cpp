// The CUDA device's clocks, how the host waits for it, what its driver says, and what it tells profilers.

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "engine/device/cuda_nvml.h"
#include "engine/device/peak_flops.h"
#include "tests/support/catch.h"
#include "tests/support/device_testing.h"

using namespace pdl;
using namespace pdl::testing;

TEST_CASE("reasons for a slow clock are words") {
  CHECK(throttle_words(0) == "none");
  CHECK(throttle_words(0x1) == "idle");
  CHECK(throttle_words(0x24) == "power cap, software thermal slowdown");
  CHECK(throttle_words(0x8008) == "hardware slowdown, 0x8000");
}

TEST_CASE("a GPU that the driver does not know has an empty state") {
  CHECK(Nvml("GPU-00000000-0000-0000-0000-000000000000").state().empty());
}

TEST_CASE("the stopwatch measures work, not its queueing, and remembers thousands of marks") {
  if (gpu() == nullptr) return;
  Device& device = *gpu()->device;
  constexpr std::int64_t kBytes = 256 << 20;
  const Buffer from = device.allocate(kBytes, MemoryKind::workspace),
               to = device.allocate(kBytes, MemoryKind::workspace);
  const auto stopwatch = device.make_stopwatch();
  device.copy(to.raw(), from.raw(), kBytes, device.compute_stream());
  device.compute_stream().synchronize();

  const auto before = std::chrono::steady_clock::now();
  const std::int64_t first = stopwatch->mark();
  constexpr int kCopies = 50;
  for (int i = 0; i < kCopies; ++i) device.copy(to.raw(), from.raw(), kBytes, device.compute_stream());
  const std::int64_t last = stopwatch->mark();
  const double device_s = stopwatch->seconds(first, last);
  const double host_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
  CHECK(device_s > kCopies * 2.0 * static_cast<double>(kBytes) / 20e12);  // no memory moves 20 TB/s
  CHECK(device_s <= host_s);
  CHECK(device_s > 0.5 * host_s);

  // Three times around the ring: neighbours add up to the whole, and marks are in order.
  std::int64_t mark = stopwatch->mark();
  const std::int64_t start = mark + 3 * Stopwatch::kRemembered;
  double sum_s = 0.0;
  while (mark < start + 1000) {
    const std::int64_t next = stopwatch->mark();
    const double passed_s = next % 3 == 0 ? stopwatch->seconds(mark, next) : 0.0;
    CHECK(passed_s >= 0.0);
    if (mark >= start) sum_s += stopwatch->seconds(mark, next);
    mark = next;
  }
  CHECK(stopwatch->seconds(start, mark) == Approx(sum_s));
  CHECK_THROWS_AS(stopwatch->seconds(start - Stopwatch::kRemembered, mark), Error);
}

TEST_CASE("recorded work is not done until it is replayed, and then on what memory holds by that time") {
  if (gpu() == nullptr) return;
  Stream& stream = gpu()->device->compute_stream();
  REQUIRE(stream.can_record());
  const std::unique_ptr<Backend> backend = make_backend(*gpu()->device, {});
  backend->set_stream(stream);
  const Values first = {1.0, 2.0, 3.0}, second = {4.0, 5.0, 6.0};
  DeviceTensor from(DType::fp32, {3}), to(DType::fp32, {3});
  from.set(first);
  to.poison();
  const auto recording = stream.record_work([&] {
    backend->copy(to.tensor(), from.tensor());
    backend->scale(to.tensor(), 2.0);
  });
  CHECK(to.values() != Values{2.0, 4.0, 6.0});
  stream.replay(*recording);
  CHECK(to.values() == Values{2.0, 4.0, 6.0});
  from.set(second);
  stream.replay(*recording);
  CHECK(to.values() == Values{8.0, 10.0, 12.0});

  CHECK_THROWS_AS(stream.record_work([] { throw Error("on the way"); }), Error);
  stream.replay(*recording);
  CHECK(to.values() == Values{8.0, 10.0, 12.0});
}

TEST_CASE("reserved memory is cut into buffers, and more is there beyond it") {
  if (gpu() == nullptr) return;
  constexpr std::int64_t kPiece = 1 << 20;
  const std::unique_ptr<Device> device = make_device({.kind = "cuda"});
  device->reserve(3 * kPiece);
  for (int round = 0; round < 2; ++round) {  // what was given back altogether is there again
    std::vector<Buffer> buffers;
    for (int i = 0; i < 8; ++i) buffers.push_back(device->allocate(kPiece - 8 * i, MemoryKind::workspace));
    std::vector<char> zeros(kPiece, 1), ones(kPiece, 1);
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      CHECK(reinterpret_cast<std::uintptr_t>(buffers[i].raw()) % 512 == 0);
      device->copy(zeros.data(), buffers[i].raw(), buffers[i].bytes(), device->compute_stream());
      device->copy(buffers[i].raw(), ones.data(), buffers[i].bytes(), device->compute_stream());
      device->compute_stream().synchronize();
      CHECK(std::count(zeros.begin(), zeros.begin() + buffers[i].bytes(), 0) == buffers[i].bytes());
    }
    const auto distance = static_cast<const char*>(buffers[1].raw()) - static_cast<const char*>(buffers[0].raw());
    CHECK(distance == kPiece);
    CHECK(device->memory().current().total() == 8 * kPiece - 8 * 28);
  }
  CHECK(device->memory().current().total() == 0);
}

TEST_CASE("marks of any stream can be brought to the host's clock") {
  if (gpu() == nullptr) return;
  Device& device = *gpu()->device;
  const auto stream = device.make_stream(true);
  constexpr std::int64_t kBytes = 256 << 20;
  const Buffer from = device.allocate(kBytes, MemoryKind::workspace),
               to = device.allocate(kBytes, MemoryKind::workspace);
  const auto other = device.make_stopwatch(*stream), compute = device.make_stopwatch();
  CHECK_THROWS_AS(compute->host_s(compute->mark()), Error);  // no anchor yet
  other->anchor();
  compute->anchor();
  const auto host_s = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  const double before_s = host_s();
  const std::int64_t first = other->mark();
  for (int i = 0; i < 20; ++i) device.copy(to.raw(), from.raw(), kBytes, *stream);
  const std::int64_t last = other->mark();
  const auto done = stream->make_event();
  stream->record(*done);
  device.compute_stream().wait(*done);
  const std::int64_t behind = compute->mark();
  device.compute_stream().synchronize();
  const double after_s = host_s();
  constexpr double kSlack_s = 200e-6;
  CHECK(other->host_s(first) > before_s - kSlack_s);
  CHECK(other->host_s(last) < after_s + kSlack_s);
  CHECK(other->host_s(last) - other->host_s(first) == Approx(other->seconds(first, last)));
  CHECK(compute->host_s(behind) > other->host_s(last) - kSlack_s);  // it waited for the other stream
  CHECK(compute->host_s(behind) < other->host_s(last) + 0.01);
}

TEST_CASE("the log of activity holds kernels and copies at the time when they ran") {
  if (gpu() == nullptr) return;
  Device& device = *gpu()->device;
  Stream& stream = device.compute_stream();
  const Buffer memory = device.allocate(64 << 20, MemoryKind::workspace);
  const Tensor tensor = memory.tensor(DType::fp32, Shape{16 << 20});
  std::vector<float> host(1 << 20, 1.0F);
  const auto stopwatch = device.make_stopwatch();
  for (int again = 0; again < 2; ++again) {
    gpu()->fast->fill(tensor, 3.0);  // outside of the log
    stopwatch->anchor();
    const auto log = device.log_activity();
    if (!log) {
      WARN("no CUPTI: not tested");
      return;
    }
    gpu()->fast->fill(tensor, 4.0);
    stream.synchronize();
    log->restart();  // forgets the fill
    const std::int64_t first = stopwatch->mark();
    gpu()->fast->scale(tensor, 2.0);
    device.copy(tensor.raw(), host.data(), 4 << 20, stream);
    const std::int64_t last = stopwatch->mark();
    const std::vector<DeviceActivity> found = log->finish();
    gpu()->fast->scale(tensor, 2.0);
    int kernels = 0, copies = 0;
    for (const DeviceActivity& activity : found) {
      INFO(activity.name);
      kernels += activity.bytes == 0;
      copies += activity.name == "copy from the host";
      if (activity.name == "copy from the host") CHECK(activity.bytes > 0);
      CHECK(activity.end_s >= activity.begin_s);
      constexpr double kSlack_s = 500e-6;
      CHECK(activity.begin_s > stopwatch->host_s(first) - kSlack_s);
      CHECK(activity.end_s < stopwatch->host_s(last) + kSlack_s);
    }
    CHECK(kernels == 1);
    CHECK(copies >= 1);
  }
}

TEST_CASE("replayed work is in the log when it was recorded while one was kept") {
  if (gpu() == nullptr) return;
  Device& device = *gpu()->device;
  Stream& stream = device.compute_stream();
  const auto log = device.log_activity();
  if (!log) {
    WARN("no CUPTI: not tested");
    return;
  }
  const std::unique_ptr<Backend> backend = make_backend(device, {});
  backend->set_stream(stream);
  DeviceTensor values(DType::fp32, {1000});
  values.set(Values(1000, 1.0));
  const auto recording = stream.record_work([&] {
    backend->scale(values.tensor(), 2.0);
    backend->scale(values.tensor(), 3.0);
  });
  stream.replay(*recording);  // the first one uploads it
  stream.synchronize();
  log->restart();
  stream.replay(*recording);
  std::int64_t kernels = 0;
  for (const DeviceActivity& activity : log->finish()) kernels += activity.bytes == 0;
  CHECK(kernels == 2);
}

TEST_CASE("ranges are named to NVTX, whether a profiler listens or not") {
  if (gpu() == nullptr) return;
  Device& device = *gpu()->device;
  if (!device.name_ranges()) {
    WARN("no NVTX in this build: not tested");
    return;
  }
  {
    const NamedRange outer(device.ranges(), [] { return std::string("outer"); });
    const NamedRange inner(device.ranges(), [] { return std::string(1000, 'x'); });
  }
  device.name_ranges_to(nullptr);
  CHECK(device.ranges() == nullptr);
}

TEST_CASE("the host waits for a GPU as its device was told to") {
  if (gpu() == nullptr) return;
  struct CountedWait final : HostWait {
    void until(const std::function<bool()>& over) override {
      ++waits;
      while (!over()) continue;
    }
    void abandon() noexcept override {}
    int waits = 0;
  } wait;
  Device& device = *gpu()->device;
  Stream& stream = device.compute_stream();
  constexpr std::int64_t kBytes = 1 << 20;
  const Buffer buffer = device.allocate(kBytes, MemoryKind::workspace);
  const HostBuffer pinned = device.allocate_host(kBytes);
  std::vector<char> pageable(kBytes, 7);
  const auto stopwatch = device.make_stopwatch();
  const auto waits_of = [&](const std::function<void()>& action) {
    device.set_host_wait(&wait);
    wait.waits = 0;
    action();
    device.set_host_wait(nullptr);
    return wait.waits;
  };
  CHECK(waits_of([&] { stream.synchronize(); }) == 1);
  // Where the driver would wait for the stream, the device waits first.
  CHECK(waits_of([&] { device.copy(buffer.raw(), pageable.data(), kBytes, stream); }) == 1);
  CHECK(waits_of([&] { device.copy(pageable.data(), buffer.raw(), 8, stream); }) == 1);
  CHECK(waits_of([&] { device.copy(buffer.raw(), pageable.data(), 8, stream); }) == 0);
  CHECK(waits_of([&] { device.copy(pinned.raw(), buffer.raw(), kBytes, stream); }) == 0);
  CHECK(waits_of([&] { device.copy(buffer.raw(), pinned.raw(), kBytes, stream); }) == 0);
  CHECK(waits_of([&] {
          const std::int64_t first = stopwatch->mark();
          stopwatch->seconds(first, stopwatch->mark());
        }) == 1);
  CHECK(waits_of([&] { device.allocate(kBytes, MemoryKind::workspace); }) == 1);
  stream.synchronize();
  CHECK(static_cast<const char*>(pinned.raw())[kBytes - 1] == 7);
}

TEST_CASE("used memory follows what is allocated, and the driver agrees") {
  if (gpu() == nullptr) return;
  Device& device = *gpu()->device;
  const std::int64_t before = device.used_bytes();
  CHECK(before > 0);
  {
    const Buffer buffer = device.allocate(512 << 20, MemoryKind::workspace);
    CHECK(device.used_bytes() >= before + (500 << 20));
  }
  const DeviceState state = device.state();
  if (state.empty()) {
    WARN("no management library: clock, power and temperature are not known");
    return;
  }
  if (state.sm_clock_mhz) CHECK(*state.sm_clock_mhz > 100.0);
  if (state.temperature_c) CHECK(*state.temperature_c > 0.0);
  if (state.power_w) CHECK(*state.power_w > 10.0);
  if (state.throttle) CHECK_FALSE(state.throttle->empty());
  if (state.memory_used_bytes) CHECK(*state.memory_used_bytes > 0);
}
