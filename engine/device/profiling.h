#pragma once
// What a device tells about its work beyond its own clock: names of ranges, for a profiler that watches the process
// from outside, and a log of what ran when, for traces of our own. Both are off until asked for; off, a range costs a
// look at a null pointer.

#include <cstdint>
#include <string>
#include <vector>

namespace pdl {

/// Hears the names of pieces of work while they are queued. Ranges nest.
class RangeListener {
 public:
  virtual ~RangeListener() = default;
  virtual void push(const std::string& name) = 0;
  virtual void pop() = 0;
};

/// A range as long as this object lives.
class NamedRange {
 public:
  /// `name()` makes the name; it is not called when `listener` is null, which means that nobody listens.
  template <typename Name>
  NamedRange(RangeListener* listener, const Name& name) : listener_(listener) {
    if (listener_ != nullptr) listener_->push(name());
  }
  ~NamedRange() {
    if (listener_ != nullptr) listener_->pop();
  }
  NamedRange(const NamedRange&) = delete;
  NamedRange& operator=(const NamedRange&) = delete;

 private:
  RangeListener* listener_;
};

/// A kernel, a copy or a fill, as the device did it.
struct DeviceActivity {
  std::string name;
  std::int64_t stream = 0;            ///< the driver's number of its stream
  double begin_s = 0.0, end_s = 0.0;  ///< on the host's steady clock
  std::int64_t bytes = 0;             ///< of a copy or a fill; 0 for a kernel
};

/// A log of all that a device does, from when it was made to `finish`. Keeping it slows the device down a little. Work
/// that is replayed is in it if it was recorded while some log was kept.
class ActivityLog {
 public:
  virtual ~ActivityLog() = default;
  /// Forgets what is done by now.
  virtual void restart() = 0;
  /// Ends the log. Waits for all that is queued on the device.
  virtual std::vector<DeviceActivity> finish() = 0;
};

}  // namespace pdl
