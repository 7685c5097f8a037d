#include "engine/backend/backend.h"

#include "engine/backend/cpu/cpu_backend.h"

namespace pdl {

#if PDL_WITH_CUDA
std::unique_ptr<Backend> make_cuda_backend(Device& device, const BackendOptions& options);  // cuda/cuda_backend.cpp
#endif

std::unique_ptr<Backend> make_backend(Device& device, const BackendOptions& options) {
  const std::string kind = device.info().kind;
  if (kind == "cpu") return std::make_unique<CpuBackend>(device, options);
#if PDL_WITH_CUDA
  if (kind == "cuda") return make_cuda_backend(device, options);
#endif
  throw ConfigError(str("this build has no backend for device \"", kind, "\""), ExitCode::unsupported);
}

}  // namespace pdl
