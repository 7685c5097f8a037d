#include "engine/device/cuda_device.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <vector>

#include "engine/device/cuda_nvml.h"
#include "engine/device/cuda_profiling.h"

namespace pdl {
namespace {

/// What a query says.
bool is_over(cudaError_t status, const char* what) {
  if (status == cudaErrorNotReady) {
    cudaGetLastError();  // not an error
    return false;
  }
  check_cuda(status, what);
  return true;
}

/// Host memory that the driver has to copy through memory of its own.
bool is_pageable(const void* data) {
  cudaPointerAttributes attributes{};
  PDL_CUDA(cudaPointerGetAttributes(&attributes, data));
  return attributes.type == cudaMemoryTypeUnregistered;
}

class CudaEvent final : public Event {
 public:
  CudaEvent() { PDL_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~CudaEvent() override { cudaEventDestroy(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  cudaEvent_t get() const { return event_; }

  void record(cudaStream_t stream) {
    // To ask for an event that belongs to a graph is an error, and would spoil the recording.
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    PDL_CUDA(cudaStreamIsCapturing(stream, &capture));
    in_graph_ = capture != cudaStreamCaptureStatusNone;
    PDL_CUDA(cudaEventRecord(event_, stream));
  }
  bool passed() const override { return !in_graph_ && is_over(cudaEventQuery(event_), "cudaEventQuery"); }
  bool in_graph() const override { return in_graph_; }

 private:
  cudaEvent_t event_ = nullptr;
  bool in_graph_ = false;
};

/// A CUDA graph, ready to be launched.
class CudaRecording final : public Recording {
 public:
  explicit CudaRecording(cudaGraph_t graph) { PDL_CUDA(cudaGraphInstantiate(&executable_, graph, 0)); }
  ~CudaRecording() override { cudaGraphExecDestroy(executable_); }
  CudaRecording(const CudaRecording&) = delete;
  CudaRecording& operator=(const CudaRecording&) = delete;
  cudaGraphExec_t get() const { return executable_; }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

class CudaStream final : public Stream {
 public:
  CudaStream(const Device& device, bool high_priority, bool can_record = false)
      : device_(device), can_record_(can_record) {
    int lowest = 0, highest = 0;
    PDL_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    PDL_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, high_priority ? highest : lowest));
  }
  ~CudaStream() override { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  std::unique_ptr<Event> make_event() override { return std::make_unique<CudaEvent>(); }
  void record(Event& event) override { static_cast<CudaEvent&>(event).record(stream_); }
  void wait(const Event& event) override {
    PDL_CUDA(cudaStreamWaitEvent(stream_, static_cast<const CudaEvent&>(event).get(), 0));
  }
  void synchronize() override { wait_on_host(device_, stream_); }
  void* native() const override { return stream_; }

  bool can_record() const override { return can_record_; }
  std::unique_ptr<Recording> record_work(const std::function<void()>& work) override {
    // Other threads, which load data, may go on calling what a recording thread must not.
    PDL_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    cudaGraph_t graph = nullptr;
    try {
      work();
    } catch (...) {
      cudaStreamEndCapture(stream_, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      cudaGetLastError();  // what went wrong is in flight already
      throw;
    }
    PDL_CUDA(cudaStreamEndCapture(stream_, &graph));
    const std::unique_ptr<CUgraph_st, cudaError_t (*)(cudaGraph_t)> owner(graph, cudaGraphDestroy);
    return std::make_unique<CudaRecording>(graph);
  }
  void replay(const Recording& recording) override {
    PDL_CUDA(cudaGraphLaunch(static_cast<const CudaRecording&>(recording).get(), stream_));
  }

 private:
  const Device& device_;
  cudaStream_t stream_ = nullptr;
  bool can_record_;
};

/// A ring of timed events. Each event's time is found from the one before: the runtime gives differences in single
/// precision, exact enough between neighbours however long the whole run is.
class CudaStopwatch final : public Stopwatch {
 public:
  CudaStopwatch(const Device& device, cudaStream_t stream)
      : device_(device), stream_(stream), times_s_(kRemembered, 0.0) {}
  ~CudaStopwatch() override {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  CudaStopwatch(const CudaStopwatch&) = delete;
  CudaStopwatch& operator=(const CudaStopwatch&) = delete;

  std::int64_t mark() override {
    // While work is recorded into a graph, nothing runs and no event of ours may get into the graph: time stands still.
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    PDL_CUDA(cudaStreamIsCapturing(stream_, &capture));
    if (capture != cudaStreamCaptureStatusNone) {
      PDL_CHECK(marks_ > 0, "the first mark lies inside a graph");
      return marks_ - 1;
    }
    // The slot that comes next, and the one behind it, from which the next difference is taken, must have been read.
    if (marks_ - timed_ >= kRemembered - 1) read_times(marks_ - kRemembered / 2);
    if (marks_ < kRemembered) {
      cudaEvent_t event = nullptr;
      PDL_CUDA(cudaEventCreate(&event));
      events_.push_back(event);
    }
    PDL_CUDA(cudaEventRecord(events_[slot(marks_)], stream_));
    return marks_++;
  }

  double seconds(std::int64_t from, std::int64_t to) override {
    PDL_CHECK(from <= to && to < marks_ && from >= std::max<std::int64_t>(0, marks_ - kRemembered), "time from mark ",
              from, " to mark ", to, " of ", marks_);
    read_times(to);
    return times_s_[slot(to)] - times_s_[slot(from)];
  }

  void anchor() override {
    PDL_CUDA(cudaStreamSynchronize(stream_));
    const double before_s = steady_seconds();
    const std::int64_t now = mark();
    PDL_CUDA(cudaEventSynchronize(events_[slot(now)]));
    anchor_host_s_ = 0.5 * (before_s + steady_seconds());
    read_times(now);
    anchor_time_s_ = times_s_[slot(now)];
    anchored_ = true;
  }

  double host_s(std::int64_t mark) override {
    PDL_CHECK(anchored_, "a mark on the host's clock without an anchor");
    PDL_CHECK(mark < marks_ && mark >= std::max<std::int64_t>(0, marks_ - kRemembered), "mark ", mark, " of ", marks_);
    read_times(mark);
    return anchor_host_s_ + times_s_[slot(mark)] - anchor_time_s_;
  }

 private:
  static std::size_t slot(std::int64_t mark) { return static_cast<std::size_t>(mark % kRemembered); }
  static double steady_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  /// Up to and including mark `last`; earlier ones have passed when it has.
  void read_times(std::int64_t last) {
    if (timed_ > last) return;
    wait_on_host(device_, events_[slot(last)]);
    for (; timed_ <= last; ++timed_) {
      if (timed_ == 0) continue;  // the moment from which times count
      float passed_ms = 0.0F;
      PDL_CUDA(cudaEventElapsedTime(&passed_ms, events_[slot(timed_ - 1)], events_[slot(timed_)]));
      times_s_[slot(timed_)] = times_s_[slot(timed_ - 1)] + static_cast<double>(passed_ms) * 1e-3;
    }
  }

  const Device& device_;
  cudaStream_t stream_;
  std::vector<cudaEvent_t> events_;
  std::vector<double> times_s_;
  std::int64_t marks_ = 0, timed_ = 0;  // made; of these, read
  // One moment on both clocks: the host's, and that of times_s_.
  double anchor_host_s_ = 0.0, anchor_time_s_ = 0.0;
  bool anchored_ = false;
};

std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char byte[4];
    std::snprintf(byte, sizeof byte, "%02x", static_cast<unsigned>(static_cast<unsigned char>(uuid.bytes[i])));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += "-";
    text += byte;
  }
  return text;
}

DeviceInfo describe(int ordinal) {
  cudaDeviceProp properties{};
  PDL_CUDA(cudaGetDeviceProperties(&properties, ordinal));
  return {.kind = "cuda",
          .name = properties.name,
          .uuid = uuid_text(properties.uuid),
          .memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem),
          .threads = 1};
}

/// The piece of device memory that buffers are cut from, end to end. What is given back is used again only when all is:
/// buffers live as long as their engine.
class Arena {
 public:
  ~Arena() { cudaFree(block_); }
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Leaves the arena as it was when the system refuses, or while buffers live in it.
  void reserve(std::int64_t bytes) {
    if (buffers_ > 0 || bytes <= bytes_) return;
    cudaFree(block_);
    block_ = nullptr;
    bytes_ = used_ = 0;
    void* block = nullptr;
    if (cudaMalloc(&block, static_cast<std::size_t>(bytes)) != cudaSuccess) {
      cudaGetLastError();  // the buffer that does not fit is told of, with all that are held
      return;
    }
    block_ = static_cast<char*>(block);
    bytes_ = bytes;
  }
  /// nullptr when there is no room.
  void* take(std::int64_t bytes) {
    const std::int64_t whole = padded(bytes);
    if (used_ + whole > bytes_) return nullptr;
    void* const piece = block_ + used_;
    used_ += whole;
    ++buffers_;
    return piece;
  }
  /// False when it is not from here.
  bool give_back(const void* piece) {
    const auto place = reinterpret_cast<std::uintptr_t>(piece), start = reinterpret_cast<std::uintptr_t>(block_);
    if (place < start || place >= start + static_cast<std::uintptr_t>(bytes_)) return false;
    if (--buffers_ == 0) used_ = 0;
    return true;
  }
  /// What cutting pieces may cost: their starts are aligned.
  static constexpr std::int64_t kSlack = 1 << 20;

 private:
  static constexpr std::int64_t kAlignment = 512;  // as cudaMalloc's
  static std::int64_t padded(std::int64_t bytes) {
    return (std::max<std::int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  }

  char* block_ = nullptr;
  std::int64_t bytes_ = 0, used_ = 0, buffers_ = 0;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(const DeviceOptions& options, const DeviceInfo& info)
      : Device(options.memory_limit_bytes > 0 ? options.memory_limit_bytes : info.memory_bytes),
        info_(info),
        compute_(*this, false, options.record_work) {}

  DeviceInfo info() const override { return info_; }
  Stream& compute_stream() override { return compute_; }
  std::unique_ptr<Stream> make_stream(bool high_priority) override {
    return std::make_unique<CudaStream>(*this, high_priority);
  }
  std::unique_ptr<Stopwatch> make_stopwatch(Stream& stream) override {
    return std::make_unique<CudaStopwatch>(*this, native_stream(stream));
  }
  std::int64_t used_bytes() const override {
    std::size_t available = 0, total = 0;
    PDL_CUDA(cudaMemGetInfo(&available, &total));
    return static_cast<std::int64_t>(total - available);
  }
  DeviceState state() override {
    if (!nvml_) nvml_.emplace(info_.uuid);
    return nvml_->state();
  }
  bool name_ranges() override {
    name_ranges_to(make_nvtx_ranges());
    return ranges() != nullptr;
  }
  std::unique_ptr<ActivityLog> log_activity() override { return make_cupti_log(); }

  void reserve(std::int64_t bytes) override { arena_.reserve(bytes + Arena::kSlack); }
  void copy(void* destination, const void* source, std::int64_t bytes, Stream& stream) override {
    if (bytes <= 0 || destination == source) return;
    // The driver waits for the stream before it copies to pageable memory, and from it unless there is little to copy.
    constexpr std::int64_t kCopiedAtOnce = 64 << 10;
    const bool watched = host_wait() != nullptr;
    if (watched && (is_pageable(destination) || (bytes > kCopiedAtOnce && is_pageable(source)))) stream.synchronize();
    PDL_CUDA(cudaMemcpyAsync(destination, source, static_cast<std::size_t>(bytes), cudaMemcpyDefault,
                             native_stream(stream)));
  }

 protected:
  void* raw_allocate(std::int64_t bytes) override {
    const auto size = static_cast<std::size_t>(bytes > 0 ? bytes : 1);
    void* data = arena_.take(bytes);
    if (data == nullptr) {
      const cudaError_t status = cudaMalloc(&data, size);
      if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // it is told once, by the caller
        return nullptr;
      }
      check_cuda(status, "cudaMalloc");
    }
    PDL_CUDA(cudaMemsetAsync(data, 0, size, native_stream(compute_)));
    compute_.synchronize();
    return data;
  }
  void raw_free(void* data, std::int64_t) noexcept override {
    if (arena_.give_back(data)) {
      cudaDeviceSynchronize();  // work may still use it; cudaFree waits by itself
    } else {
      cudaFree(data);
    }
  }
  void* raw_allocate_host(std::int64_t bytes) override {
    void* data = nullptr;
    if (cudaMallocHost(&data, static_cast<std::size_t>(bytes > 0 ? bytes : 1)) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    return data;
  }
  void raw_free_host(void* data) noexcept override { cudaFreeHost(data); }

 private:
  DeviceInfo info_;
  Arena arena_;
  CudaStream compute_;
  std::optional<Nvml> nvml_;  // opened when first asked for
};

}  // namespace

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  const bool memory = status == cudaErrorMemoryAllocation;
  throw Error(str("CUDA: ", what, ": ", cudaGetErrorName(status), ", ", cudaGetErrorString(status)),
              memory ? ExitCode::out_of_memory : ExitCode::internal);
}

void wait_on_host(const Device& device, cudaStream_t stream) {
  if (device.host_wait() == nullptr) return PDL_CUDA(cudaStreamSynchronize(stream));
  device.host_wait()->until([stream] { return is_over(cudaStreamQuery(stream), "cudaStreamQuery"); });
}

void wait_on_host(const Device& device, cudaEvent_t event) {
  if (device.host_wait() == nullptr) return PDL_CUDA(cudaEventSynchronize(event));
  device.host_wait()->until([event] { return is_over(cudaEventQuery(event), "cudaEventQuery"); });
}

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

std::unique_ptr<Device> make_cuda_device(const DeviceOptions& options) {
  const int count = cuda_device_count();
  if (count == 0) {
    throw ConfigError(
        "device \"cuda\" cannot be used: no GPU is visible here; use \"cpu\" or look at nvidia-smi and "
        "CUDA_VISIBLE_DEVICES",
        ExitCode::unsupported);
  }
  PDL_CHECK(options.ordinal >= 0 && options.ordinal < count, "GPU ", options.ordinal, " of ", count);
  PDL_CUDA(cudaSetDevice(options.ordinal));
  return std::make_unique<CudaDevice>(options, describe(options.ordinal));
}

CudaScratch::~CudaScratch() {
  for (void* const piece : pieces_) cudaFree(piece);
  device_.add_library_bytes(-total_bytes_);
}

void* CudaScratch::get(std::int64_t bytes) {
  if (bytes > bytes_ || pieces_.empty()) {
    void* piece = nullptr;
    PDL_CUDA(cudaMalloc(&piece, static_cast<std::size_t>(bytes > 0 ? bytes : 1)));
    pieces_.push_back(piece);
    bytes_ = bytes;
    total_bytes_ += bytes;
    device_.add_library_bytes(bytes);
  }
  return pieces_.back();
}

}  // namespace pdl
