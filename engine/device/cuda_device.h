#pragma once
// One NVIDIA GPU as a device: an arena, streams and events of the CUDA runtime. Only files below engine/backend/cuda
// and engine/device/cuda_* see CUDA's headers.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/device/device.h"

namespace pdl {

/// Throws Error, out_of_memory or internal, when `status` is not success. `what` is the call.
void check_cuda(cudaError_t status, const char* what);
#define PDL_CUDA(call) ::pdl::check_cuda((call), #call)

inline cudaStream_t native_stream(const Stream& stream) { return static_cast<cudaStream_t>(stream.native()); }

/// The host waits, in the device's HostWait or else in the driver, until all that is queued on the stream is done, or
/// until the event has passed.
void wait_on_host(const Device& device, cudaStream_t stream);
void wait_on_host(const Device& device, cudaEvent_t event);

/// The GPU with number `options.ordinal` among those that this process sees. Throws ConfigError(unsupported) when there
/// is none.
std::unique_ptr<Device> make_cuda_device(const DeviceOptions& options);

/// GPUs that this process sees; 0 without a driver.
int cuda_device_count();

/// Device memory outside the arena that a library or a kernel works in. Grows when asked for more, which only first
/// steps do; outgrown pieces stay, as recorded work may still use them. Its bytes are in Device::library_bytes().
class CudaScratch {
 public:
  explicit CudaScratch(Device& device) : device_(device) {}
  ~CudaScratch();
  CudaScratch(const CudaScratch&) = delete;
  CudaScratch& operator=(const CudaScratch&) = delete;

  /// At least `bytes`, aligned to 256; contents are undefined. What an earlier call returned is gone.
  void* get(std::int64_t bytes);

 private:
  Device& device_;
  std::vector<void*> pieces_;  ///< the last one is in use
  std::int64_t bytes_ = 0;     ///< of that one
  std::int64_t total_bytes_ = 0;
};

}  // namespace pdl
