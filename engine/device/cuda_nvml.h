#pragma once
// What NVIDIA's management library (NVML) says about one GPU. The library belongs to the driver, so it is opened at run
// time and may be missing: then every answer is empty. Nothing here changes a setting.

#include <string>

#include "engine/device/device_state.h"

namespace pdl {

class Nvml {
 public:
  /// `uuid` as "GPU-01234567-...": the numbering of NVML is not that of the CUDA runtime.
  explicit Nvml(const std::string& uuid);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  /// Takes a few milliseconds. Never throws: what fails stays empty.
  DeviceState state() const;

 private:
  template <typename Function>
  Function* find(const char* name) const;

  void* library_ = nullptr;
  void* gpu_ = nullptr;
};

/// NVML's mask of reasons as words with commas between them; "none" for an empty mask.
std::string throttle_words(unsigned long long reasons);

}  // namespace pdl
