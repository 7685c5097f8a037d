// The rate of a large product on the GPU, by which steps are judged.

#include "engine/backend/gemm_rate.h"

#include "engine/device/peak_flops.h"
#include "tests/support/catch.h"
#include "tests/support/device_testing.h"

using namespace pdl;
using namespace pdl::testing;

TEST_CASE("a large product runs near the peak, in each type") {
  if (gpu() == nullptr) return;
  Device& device = *gpu()->device;
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    INFO(name_of(dtype));
    const double rate = measured_gemm_flops_per_s(device, *gpu()->deterministic, dtype, kGpuGemmExtent);
    CHECK(rate > 1e12);
    const double peak = peak_flops_per_s(device.info().name, std::string(name_of(dtype)));
    if (peak <= 0.0) continue;
    CHECK(rate > 0.5 * peak);
    CHECK(rate < 1.2 * peak);  // clocks may boost beyond the one that the maker reckons with
  }
}
