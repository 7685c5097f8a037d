#include "engine/device/cuda_nvml.h"

#include <dlfcn.h>

#include <cstdio>

namespace pdl {
namespace {

// The part of NVML's interface that is used here. Its header comes with some toolkits only, and the numbers are part of
// the library's binary interface.
constexpr int kSuccess = 0;
constexpr int kClockSm = 1;
constexpr int kTemperatureGpu = 0;
constexpr double kWattsPerMilliwatt = 1e-3;

struct MemoryInfo {
  unsigned long long total, free, used;
};

using Init = int();
using HandleByUuid = int(const char* uuid, void** gpu);
using ReadClock = int(void* gpu, int clock, unsigned* megahertz);
using ReadPower = int(void* gpu, unsigned* milliwatts);
using ReadTemperature = int(void* gpu, int sensor, unsigned* celsius);
using ReadReasons = int(void* gpu, unsigned long long* reasons);
using ReadMemory = int(void* gpu, MemoryInfo* memory);

constexpr struct {
  unsigned long long bit;
  const char* words;
} kReasons[] = {
    {0x1, "idle"},
    {0x2, "application clocks"},
    {0x4, "power cap"},
    {0x8, "hardware slowdown"},
    {0x10, "sync boost"},
    {0x20, "software thermal slowdown"},
    {0x40, "hardware thermal slowdown"},
    {0x80, "power brake"},
    {0x100, "display clocks"},
};

}  // namespace

std::string throttle_words(unsigned long long reasons) {
  std::string text;
  const auto add = [&text](const std::string& words) { text += (text.empty() ? "" : ", ") + words; };
  for (const auto& reason : kReasons) {
    if (reasons & reason.bit) add(reason.words);
    reasons &= ~reason.bit;
  }
  if (reasons != 0) {
    char unknown[32];
    std::snprintf(unknown, sizeof unknown, "0x%llx", reasons);
    add(unknown);
  }
  return text.empty() ? "none" : text;
}

template <typename Function>
Function* Nvml::find(const char* name) const {
  return reinterpret_cast<Function*>(::dlsym(library_, name));
}

Nvml::Nvml(const std::string& uuid) {
  library_ = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) return;
  const auto init = find<Init>("nvmlInit_v2");
  if (init == nullptr || init() != kSuccess) {
    ::dlclose(library_);
    library_ = nullptr;
    return;
  }
  const auto handle_by_uuid = find<HandleByUuid>("nvmlDeviceGetHandleByUUID");
  if (handle_by_uuid == nullptr || handle_by_uuid(uuid.c_str(), &gpu_) != kSuccess) gpu_ = nullptr;
}

Nvml::~Nvml() {
  if (library_ == nullptr) return;
  if (const auto shutdown = find<Init>("nvmlShutdown")) shutdown();
  ::dlclose(library_);
}

DeviceState Nvml::state() const {
  DeviceState state;
  if (gpu_ == nullptr) return state;
  unsigned number = 0;
  const auto clock = find<ReadClock>("nvmlDeviceGetClockInfo");
  if (clock != nullptr && clock(gpu_, kClockSm, &number) == kSuccess) state.sm_clock_mhz = number;
  const auto power = find<ReadPower>("nvmlDeviceGetPowerUsage");
  if (power != nullptr && power(gpu_, &number) == kSuccess) state.power_w = number * kWattsPerMilliwatt;
  const auto temperature = find<ReadTemperature>("nvmlDeviceGetTemperature");
  if (temperature != nullptr && temperature(gpu_, kTemperatureGpu, &number) == kSuccess) state.temperature_c = number;
  auto reasons = find<ReadReasons>("nvmlDeviceGetCurrentClocksEventReasons");
  if (reasons == nullptr) reasons = find<ReadReasons>("nvmlDeviceGetCurrentClocksThrottleReasons");  // until R535
  unsigned long long mask = 0;
  if (reasons != nullptr && reasons(gpu_, &mask) == kSuccess) state.throttle = throttle_words(mask);
  MemoryInfo memory{};
  const auto read_memory = find<ReadMemory>("nvmlDeviceGetMemoryInfo");
  if (read_memory != nullptr && read_memory(gpu_, &memory) == kSuccess) {
    state.memory_used_bytes = static_cast<std::int64_t>(memory.used);
  }
  return state;
}

}  // namespace pdl
