#pragma once
// The processors of this host as a device: a stream is the calling thread, so work is done when a call returns and
// events have nothing to do.

#include <cstdint>
#include <memory>
#include <string>

#include "engine/device/device.h"

namespace pdl {

/// Without a limit in the options the limit is `host_memory_bytes`, which all ranks of the host share.
std::unique_ptr<Device> make_cpu_device(const DeviceOptions& options);

/// The processor's name as the kernel gives it, else the machine's architecture. Files are looked up below `root`.
std::string cpu_name(const std::string& root = "");

/// What this process may use of the host's memory: the least of the installed memory and the limits of the control
/// groups around it (version 1 and 2). 0 when the system does not say. Files are looked up below `root`.
std::int64_t host_memory_bytes(const std::string& root = "");

}  // namespace pdl
