// The GPU's activity by CUPTI: buffers of records that CUPTI fills and hands back through two callbacks.
//
// The library is loaded at run time, so that a binary which knows it also runs where it is missing.

#include "engine/device/cuda_profiling.h"

#include <cstdio>

#if __has_include(<cupti.h>)
#include <cuda_runtime_api.h>
#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "engine/base/error.h"

namespace pdl {
namespace {

constexpr std::size_t kBufferBytes = 4 << 20;
constexpr std::size_t kLongestName = 160;  // kernels of templates have names of a thousand letters
constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                         CUPTI_ACTIVITY_KIND_MEMSET};

// CUPTI only ever adds to the end of its records, so these, the first of CUDA 12, serve newer libraries too.
using KernelRecord = CUpti_ActivityKernel9;
using CopyRecord = CUpti_ActivityMemcpy5;
using FillRecord = CUpti_ActivityMemset4;

/// The functions of CUPTI that we call.
struct Cupti {
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks = nullptr;
  decltype(&cuptiActivityRegisterTimestampCallback) register_timestamps = nullptr;
  decltype(&cuptiActivityEnable) enable = nullptr;
  decltype(&cuptiActivityDisable) disable = nullptr;
  decltype(&cuptiActivityFlushAll) flush = nullptr;
  decltype(&cuptiActivityGetNextRecord) next_record = nullptr;
  decltype(&cuptiActivityGetNumDroppedRecords) dropped_records = nullptr;
  decltype(&cuptiGetResultString) result_string = nullptr;
};

/// What the callbacks work on. CUPTI calls them with nothing of ours, from a thread of its own, so there is one of
/// these for the process.
struct Collector {
  Cupti cupti;
  std::string obstacle = "not loaded";  ///< why CUPTI cannot be used; empty when it can
  bool registered = false;              ///< CUPTI knows the callbacks
  std::mutex mutex;
  std::vector<DeviceActivity> found;
  std::size_t dropped = 0;
};

void load(Collector& collector);

Collector& collector() {
  static Collector* const instance = [] {
    auto* const made = new Collector;  // never destroyed: CUPTI may call back while the process ends
    load(*made);
    return made;
  }();
  return *instance;
}

std::string readable(const char* symbol) {
  if (symbol == nullptr) return "kernel";
  int status = 0;
  char* const demangled = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
  std::string name = status == 0 && demangled != nullptr ? demangled : symbol;
  std::free(demangled);
  if (name.starts_with("void ")) name.erase(0, 5);
  if (name.size() > kLongestName) name = name.substr(0, kLongestName) + "...";
  return name;
}

const char* copy_name(std::uint8_t kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD:
      return "copy from the host";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH:
      return "copy to the host";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD:
      return "copy on the device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_PTOP:
      return "copy between devices";
    default:
      return "copy";
  }
}

template <typename Record>
DeviceActivity times_of(const Record& record) {
  DeviceActivity activity;
  activity.stream = record.streamId;
  activity.begin_s = static_cast<double>(record.start) * 1e-9;
  activity.end_s = static_cast<double>(record.end) * 1e-9;
  return activity;
}

/// Appends what `record` says, unless it is of another kind or was not finished.
void add(std::vector<DeviceActivity>& found, const CUpti_Activity& record) {
  DeviceActivity activity;
  if (record.kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL || record.kind == CUPTI_ACTIVITY_KIND_KERNEL) {
    const auto& kernel = reinterpret_cast<const KernelRecord&>(record);
    activity = times_of(kernel);
    activity.name = readable(kernel.name);
  } else if (record.kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
    const auto& copy = reinterpret_cast<const CopyRecord&>(record);
    activity = times_of(copy);
    activity.name = copy_name(copy.copyKind);
    activity.bytes = static_cast<std::int64_t>(copy.bytes);
  } else if (record.kind == CUPTI_ACTIVITY_KIND_MEMSET) {
    const auto& fill = reinterpret_cast<const FillRecord&>(record);
    activity = times_of(fill);
    activity.name = "fill";
    activity.bytes = static_cast<std::int64_t>(fill.bytes);
  }
  if (activity.begin_s > 0.0 && activity.end_s >= activity.begin_s) found.push_back(std::move(activity));
}

std::uint64_t CUPTIAPI steady_nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* most_records) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(64, kBufferBytes));
  *size = *buffer == nullptr ? 0 : kBufferBytes;
  *most_records = 0;  // as many as fit
}

void CUPTIAPI take_buffer(CUcontext context, std::uint32_t stream, std::uint8_t* buffer, std::size_t,
                          std::size_t valid_bytes) {
  Collector& to = collector();
  const std::lock_guard<std::mutex> lock(to.mutex);
  CUpti_Activity* record = nullptr;
  while (valid_bytes > 0 && to.cupti.next_record(buffer, valid_bytes, &record) == CUPTI_SUCCESS) add(to.found, *record);
  std::size_t dropped = 0;
  if (to.cupti.dropped_records(context, stream, &dropped) == CUPTI_SUCCESS) to.dropped += dropped;
  std::free(buffer);
}

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

/// The library of the build's toolkit, or what the system finds under its name.
void* open_library(std::string& error) {
  const std::string versioned = "libcupti.so." + std::to_string(CUPTI_API_VERSION / 10000);
  for (const std::string& name : {std::string(PDL_CUPTI_LIBRARY), versioned, std::string("libcupti.so")}) {
    if (name.empty()) continue;
    if (void* const library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    if (const char* const text = ::dlerror(); text != nullptr && error.empty()) error = text;
  }
  return nullptr;
}

void load(Collector& collector) {
  std::string error;
  void* const library = open_library(error);  // for the rest of the process: CUPTI cannot be unloaded
  if (library == nullptr) {
    collector.obstacle = error;
    return;
  }
  Cupti& cupti = collector.cupti;
  const bool complete = find(library, "cuptiActivityRegisterCallbacks", cupti.register_callbacks) &&
                        find(library, "cuptiActivityRegisterTimestampCallback", cupti.register_timestamps) &&
                        find(library, "cuptiActivityEnable", cupti.enable) &&
                        find(library, "cuptiActivityDisable", cupti.disable) &&
                        find(library, "cuptiActivityFlushAll", cupti.flush) &&
                        find(library, "cuptiActivityGetNextRecord", cupti.next_record) &&
                        find(library, "cuptiActivityGetNumDroppedRecords", cupti.dropped_records) &&
                        find(library, "cuptiGetResultString", cupti.result_string);
  collector.obstacle = complete ? "" : "CUPTI lacks a function that is needed";
}

class CuptiLog final : public ActivityLog {
 public:
  explicit CuptiLog(Collector& collector) : collector_(collector) {}
  ~CuptiLog() override { stop(); }
  CuptiLog(const CuptiLog&) = delete;
  CuptiLog& operator=(const CuptiLog&) = delete;

  /// Throws Error when CUPTI refuses.
  void start() {
    {
      const std::lock_guard<std::mutex> lock(collector_.mutex);
      collector_.found.clear();
      collector_.dropped = 0;
    }
    const Cupti& cupti = collector_.cupti;
    running_ = true;
    if (!collector_.registered) {
      check(cupti.register_timestamps(steady_nanoseconds), "cuptiActivityRegisterTimestampCallback");
      check(cupti.register_callbacks(give_buffer, take_buffer), "cuptiActivityRegisterCallbacks");
      collector_.registered = true;
    }
    for (const CUpti_ActivityKind kind : kKinds) check(cupti.enable(kind), "cuptiActivityEnable");
  }

  void restart() override {
    check(collector_.cupti.flush(0), "cuptiActivityFlushAll");
    const std::lock_guard<std::mutex> lock(collector_.mutex);
    collector_.found.clear();
    collector_.dropped = 0;
  }

  std::vector<DeviceActivity> finish() override {
    cudaDeviceSynchronize();  // what went wrong there is for whoever waits for it next
    stop();
    check(collector_.cupti.flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "cuptiActivityFlushAll");
    const std::lock_guard<std::mutex> lock(collector_.mutex);
    if (collector_.dropped > 0) {
      std::fprintf(stderr, "warning: the trace lacks %zu activities of the GPU that CUPTI had no room for\n",
                   collector_.dropped);
    }
    return std::exchange(collector_.found, {});
  }

 private:
  void stop() {
    if (!std::exchange(running_, false)) return;
    for (const CUpti_ActivityKind kind : kKinds) collector_.cupti.disable(kind);
  }
  void check(CUptiResult result, const char* call) const {
    if (result == CUPTI_SUCCESS) return;
    const char* text = nullptr;
    collector_.cupti.result_string(result, &text);
    throw Error(str(call, ": ", text == nullptr ? "unknown error" : text));
  }

  Collector& collector_;
  bool running_ = false;
};

}  // namespace

std::unique_ptr<ActivityLog> make_cupti_log() {
  std::string obstacle = collector().obstacle;
  try {
    auto log = std::make_unique<CuptiLog>(collector());
    if (obstacle.empty()) {
      log->start();
      return log;
    }
  } catch (const Error& error) {  // another profiler may be there already
    obstacle = error.what();
  }
  std::fprintf(stderr, "warning: the trace will show no kernels: %s\n", obstacle.c_str());
  return nullptr;
}

}  // namespace pdl

#else

namespace pdl {

std::unique_ptr<ActivityLog> make_cupti_log() {
  std::fprintf(stderr, "warning: the trace will show no kernels: this build has no CUPTI\n");
  return nullptr;
}

}  // namespace pdl

#endif
