#include "engine/device/peak_flops.h"

#include "tests/support/catch.h"

using namespace pdl;

TEST_CASE("peaks of the devices in the table, by precision") {
  for (const char* name : {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}) {
    CHECK(peak_flops_per_s(name, "bf16") == 989.4e12);
    CHECK(peak_flops_per_s(name, "fp16") == 989.4e12);
    CHECK(peak_flops_per_s(name, "tf32") == 494.7e12);
    CHECK(peak_flops_per_s(name, "fp32") == 66.9e12);
    CHECK(peak_flops_per_s(name, "fp64") == 0.0);
  }
}

TEST_CASE("a device that is not in the table has no peak, nor has part of one") {
  for (const char* name : {"Some Chip @ 2 GHz", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA H20",
                           "NVIDIA GH200 480GB", "NVIDIA H200 MIG 1g.18gb", ""}) {
    CHECK(peak_flops_per_s(name, "bf16") == 0.0);
  }
}
