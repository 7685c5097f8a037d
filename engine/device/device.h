#pragma once
// Where bytes live and in what order work happens. A device hands out tagged memory, streams and events, and copies
// bytes; it computes nothing.
//
// Order of work. Everything queued on one Stream happens in order. A Stream waits for another through an Event. The
// host waits only in `synchronize`. On the CPU a stream is the calling thread: work is done when the call returns, and
// events are no-ops.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "engine/device/device_state.h"
#include "engine/device/host_wait.h"
#include "engine/device/memory_tracker.h"
#include "engine/device/profiling.h"
#include "engine/device/stopwatch.h"
#include "engine/tensor/tensor.h"

namespace pdl {

class Device;

/// Work of a stream that was recorded instead of done.
class Recording {
 public:
  virtual ~Recording() = default;
};

/// A point in a stream's order of work.
class Event {
 public:
  virtual ~Event() = default;
  /// Whether it has happened; never waits. False for an event of work that is recorded into a graph.
  virtual bool passed() const { return true; }
  virtual bool in_graph() const { return false; }
};

/// An order of work on one device.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual std::unique_ptr<Event> make_event() = 0;
  virtual void record(Event& event) = 0;      ///< the event happens after all that is queued so far
  virtual void wait(const Event& event) = 0;  ///< what is queued from now on happens after the event; the host goes on
  virtual void synchronize() = 0;             ///< the host waits, as the device was told to, for all that is queued
  virtual void* native() const { return nullptr; }  ///< the vendor's handle, for the vendor's own files only

  /// Whether this stream can record work and do it again as a whole, which costs host and device less than piece by
  /// piece. Recorded work finds the same memory each time it is replayed; only the contents may differ.
  virtual bool can_record() const { return false; }
  /// What `work` queues on this stream is recorded, not done. `work` must not wait on the host.
  virtual std::unique_ptr<Recording> record_work(const std::function<void()>& work);
  virtual void replay(const Recording& recording);
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

/// Host memory that the device can copy from and to without a detour, given back when destroyed. Move-only.
class HostBuffer {
 public:
  HostBuffer() = default;
  HostBuffer(Device& device, void* data, std::int64_t bytes) : device_(&device), data_(data), bytes_(bytes) {}
  HostBuffer(HostBuffer&& other) noexcept { swap(other); }
  HostBuffer& operator=(HostBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~HostBuffer();

  std::int64_t bytes() const { return bytes_; }
  void* raw() const { return data_; }

 private:
  void swap(HostBuffer& other) noexcept;
  Device* device_ = nullptr;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
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
  /// Of `stream`, which outlives the stopwatch's last mark.
  virtual std::unique_ptr<Stopwatch> make_stopwatch(Stream& stream) = 0;
  std::unique_ptr<Stopwatch> make_stopwatch() { return make_stopwatch(compute_stream()); }
  /// Copies in stream order; either side may be host memory.
  /// Pageable host memory may be changed as soon as the call returns; a HostBuffer only after the stream has come here.
  virtual void copy(void* destination, const void* source, std::int64_t bytes, Stream& stream) = 0;

  /// How the host waits for this device; null, as at first: in the driver. `wait` outlives its use.
  void set_host_wait(HostWait* wait) { host_wait_ = wait; }
  HostWait* host_wait() const { return host_wait_; }

  /// Memory in use as the system sees it: of this process on the CPU, of the whole device, by all processes, on a GPU.
  virtual std::int64_t used_bytes() const = 0;
  /// Clock, power and temperature, when the driver says. Takes milliseconds: not for the middle of a step.
  virtual DeviceState state() { return {}; }

  /// Who hears the names of ranges; null: nobody.
  RangeListener* ranges() const { return ranges_.get(); }
  void name_ranges_to(std::unique_ptr<RangeListener> listener) { ranges_ = std::move(listener); }
  /// From now on ranges are named to the vendor's profiler; false when the build has none for this device.
  virtual bool name_ranges() { return false; }
  /// Null, after a line on stderr where one could be expected, when the device's activity cannot be seen.
  virtual std::unique_ptr<ActivityLog> log_activity() { return nullptr; }

  /// Foretells what will be allocated in all, in a few hundred buffers at most: a device that can takes it from the
  /// system in one piece. Without it, or beyond it, buffers are taken one by one.
  virtual void reserve(std::int64_t) {}
  /// Zeroed memory, aligned to 64 bytes. Throws Error(out_of_memory) with the table by kind when it does not fit.
  Buffer allocate(std::int64_t bytes, MemoryKind kind);
  /// Throws Error(out_of_memory) when the system refuses.
  HostBuffer allocate_host(std::int64_t bytes);
  void seal() { sealed_ = true; }
  void unseal() { sealed_ = false; }

  MemoryTracker& memory() { return memory_; }
  const MemoryTracker& memory() const { return memory_; }
  std::int64_t memory_limit_bytes() const { return memory_limit_bytes_; }
  /// Device memory that libraries and reductions work in, outside the arena.
  std::int64_t library_bytes() const { return library_bytes_; }
  void add_library_bytes(std::int64_t bytes) { library_bytes_ += bytes; }

 protected:
  virtual void* raw_allocate(std::int64_t bytes) = 0;  ///< nullptr when it does not fit
  virtual void raw_free(void* data, std::int64_t bytes) noexcept = 0;
  virtual void* raw_allocate_host(std::int64_t bytes) = 0;  ///< nullptr when the system refuses
  virtual void raw_free_host(void* data) noexcept = 0;

 private:
  friend class Buffer;
  friend class HostBuffer;
  void release(void* data, std::int64_t bytes, MemoryKind kind) noexcept;

  MemoryTracker memory_;
  std::unique_ptr<RangeListener> ranges_;
  std::int64_t memory_limit_bytes_ = 0, library_bytes_ = 0;
  bool sealed_ = false;
  HostWait* host_wait_ = nullptr;
};

struct DeviceOptions {
  std::string kind = "cpu";  ///< "cpu" or "cuda"
  int threads = 1;           ///< host threads that compute (CPU)
  int ordinal = 0;           ///< which of the devices of this host (CUDA)
  std::int64_t memory_limit_bytes = 0;
  bool record_work = true;  ///< the compute stream can record, where the kind of device can
};

/// Devices of this kind that this process can use; 0 when the build or the machine has none.
int device_count(const std::string& kind);

/// Throws ConfigError(unsupported) when the build or the machine lacks the kind.
std::unique_ptr<Device> make_device(const DeviceOptions& options);

}  // namespace pdl
