// The CUDA device's clock and what its driver says.

#include <algorithm>
#include <chrono>
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
