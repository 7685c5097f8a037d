#pragma once
// How a device is doing at this moment, as its driver says: what explains why two runs of one program differ in speed.

#include <cstdint>
#include <optional>
#include <string>

namespace pdl {

/// What the driver does not say is empty. All of it is, on a CPU.
struct DeviceState {
  std::optional<double> sm_clock_mhz, power_w, temperature_c;
  std::optional<std::string> throttle;            ///< what holds the clock down, in words: "power cap", "none"
  std::optional<std::int64_t> memory_used_bytes;  ///< of the whole device, by all processes

  bool empty() const { return !sm_clock_mhz && !power_w && !temperature_c && !throttle && !memory_used_bytes; }
};

}  // namespace pdl
