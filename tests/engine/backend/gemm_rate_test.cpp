#include "engine/backend/gemm_rate.h"

#include "tests/support/catch.h"

using namespace pdl;

TEST_CASE("the rate of a product is a number of this machine, and its memory goes back") {
  const auto device = make_device({.kind = "cpu"});
  const auto backend = make_backend(*device, {});
  for (const DType dtype : {DType::fp32, DType::fp64}) {
    const double rate = measured_gemm_flops_per_s(*device, *backend, dtype, 96);
    CHECK(rate > 1e6);
    CHECK(rate < 1e14);
    CHECK(device->memory().current().total() == 0);
    // 3 matrices; the random block of one of them is gone before the product.
    CHECK(device->memory().peak_total() == 4 * 96 * 96 * size_of(dtype));
    device->memory().reset_peak();
  }
}

TEST_CASE("a product that does not fit is out of memory") {
  const auto device = make_device({.kind = "cpu", .memory_limit_bytes = 1 << 20});
  const auto backend = make_backend(*device, {});
  try {
    measured_gemm_flops_per_s(*device, *backend, DType::fp32, 1024);
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::out_of_memory);
  }
}
