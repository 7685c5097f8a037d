#include "engine/backend/backend.h"

#include "engine/backend/cpu/cpu_backend.h"

namespace pdl {

#if PDL_WITH_CUDA
std::unique_ptr<Backend> make_cuda_backend(Device& device, const BackendOptions& options);  // cuda/cuda_backend.cpp
#endif

void check_block(const Tensor& y, std::int64_t y_pitch, const Tensor& x, std::int64_t x_pitch, std::int64_t rows,
                 std::int64_t columns) {
  PDL_CHECK(y.dtype() == x.dtype(), "a block of ", name_of(x.dtype()), " for ", name_of(y.dtype()));
  PDL_CHECK(rows >= 0 && columns >= 0 && columns <= y_pitch && columns <= x_pitch, rows, " rows of ", columns,
            " columns at pitches ", x_pitch, " and ", y_pitch);
  if (rows == 0) return;
  const auto end = [&](std::int64_t pitch) { return (rows - 1) * pitch + columns; };
  PDL_CHECK(end(y_pitch) <= y.elements() && end(x_pitch) <= x.elements(), "a block of ", rows, " rows of ", columns,
            " columns at pitches ", x_pitch, " and ", y_pitch, " from ", x.elements(), " elements to ", y.elements());
}

std::unique_ptr<Backend> make_backend(Device& device, const BackendOptions& options) {
  const std::string kind = device.info().kind;
  if (kind == "cpu") return std::make_unique<CpuBackend>(device, options);
#if PDL_WITH_CUDA
  if (kind == "cuda") return make_cuda_backend(device, options);
#endif
  throw ConfigError(str("this build has no backend for device \"", kind, "\""), ExitCode::unsupported);
}

}  // namespace pdl
