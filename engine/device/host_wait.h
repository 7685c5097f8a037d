#pragma once
// How the host waits for a device whose work depends on others, such as kernels that wait for other ranks.
//
// The driver's own waits end only with the work. Whoever queues work that may never end tells the device how to wait
// instead (Device::set_host_wait), so that code which waits for a stream need not know what is on it.

#include <functional>

namespace pdl {

class HostWait {
 public:
  virtual ~HostWait() = default;
  /// Returns once `over` says true; it never waits and is asked again and again. Throws Error when there is no hope
  /// left; then nothing on the device waits for others any more.
  virtual void until(const std::function<bool()>& over) = 0;
  /// Ends whatever waits for others, its results lost, so that memory can be given back without them.
  virtual void abandon() noexcept = 0;
};

}  // namespace pdl
