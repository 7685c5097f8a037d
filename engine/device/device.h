#pragma once
// Where bytes live and in what order work happens. A device hands out tagged memory, streams and events, and copies
// bytes; it computes nothing.
//
// Order of work. Everything queued on one Stream happens in order. A Stream waits for another through an Event. The
// host waits only in `synchronize`. On the CPU a stream is the calling thread: work is done when the call returns, and
// events are no-ops.

#include <cstdint>
#include <memory>
#include <string>

#include "engine/device/memory_tracker.h"
#include "engine/tensor/tensor.h"

namespace pdl {

class Device;

/// A point in a stream's order of work.
class Event {
 public:
  virtual ~Event() = default;
};

/// An order of work on one device.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual std::unique_ptr<Event> make_event() = 0;
  virtual void record(Event& event) = 0;      ///< the event happens after all that is queued so far
  virtual void wait(const Event& event) = 0;  ///< what is queued from now on happens after the event; the host goes on
  virtual void synchronize() = 0;             ///< the host waits for all that is queued
  virtual void* native() const { return nullptr; }  ///< the vendor's handle, for the vendor's own files only
};

/// Memory of one device, given back when destroyed. Move-only. Starts zeroed.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device& device, void* data, std::int64_t bytes, MemoryKind kind)
      : device_(&device), data_(data), bytes_(bytes), kind_(kind) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer();

  std::int64_t bytes() const { return bytes_; }
  void* raw() const { return data_; }
  /// A tensor at `offset_bytes` into the buffer; the caller keeps the buffer alive.
  Tensor tensor(DType dtype, Shape shape, std::int64_t offset_bytes = 0) const;

 private:
  void swap(Buffer& other) noexcept;
  Device* device_ = nullptr;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  MemoryKind kind_ = MemoryKind::workspace;
};

/// What a device is, for `info` and the records.
struct DeviceInfo {
  std::string kind;  ///< "cpu" or "cuda"
  std::string name;  ///< the processor's name
  std::string uuid;  ///< tells two devices apart; empty for the CPU
  std::int64_t memory_bytes = 0;
  int threads = 1;  ///< host threads that compute
};

/// One device and its tagged arena. `seal` closes the arena: an allocation after it is a bug and throws, which is how
/// the rule "no allocation in a step after the first" is enforced.
class Device {
 public:
  /// `memory_limit_bytes` 0 means the device's own size.
  explicit Device(std::int64_t memory_limit_bytes) : memory_limit_bytes_(memory_limit_bytes) {}
  virtual ~Device() = default;

  virtual DeviceInfo info() const = 0;
  virtual Stream& compute_stream() = 0;
  virtual std::unique_ptr<Stream> make_stream(bool high_priority) = 0;
  /// Copies in stream order; either side may be host memory.
  virtual void copy(void* destination, const void* source, std::int64_t bytes, Stream& stream) = 0;

  /// Zeroed memory, aligned to 64 bytes. Throws Error(out_of_memory) with the table by kind when it does not fit.
  Buffer allocate(std::int64_t bytes, MemoryKind kind);
  void seal() { sealed_ = true; }
  void unseal() { sealed_ = false; }

  MemoryTracker& memory() { return memory_; }
  const MemoryTracker& memory() const { return memory_; }
  std::int64_t memory_limit_bytes() const { return memory_limit_bytes_; }

 protected:
  virtual void* raw_allocate(std::int64_t bytes) = 0;  ///< nullptr when it does not fit
  virtual void raw_free(void* data, std::int64_t bytes) noexcept = 0;

 private:
  friend class Buffer;
  void release(void* data, std::int64_t bytes, MemoryKind kind) noexcept;

  MemoryTracker memory_;
  std::int64_t memory_limit_bytes_ = 0;
  bool sealed_ = false;
};

struct DeviceOptions {
  std::string kind = "cpu";  ///< "cpu" or "cuda"
  int threads = 1;           ///< host threads that compute (CPU)
  std::int64_t memory_limit_bytes = 0;
};

/// Throws ConfigError(unsupported) when the build or the machine lacks the kind.
std::unique_ptr<Device> make_device(const DeviceOptions& options);

}  // namespace pdl
