#include "engine/device/peak_flops.h"

namespace pdl {
namespace {

bool contains(const std::string& text, const char* word) { return text.find(word) != std::string::npos; }

/// H100 and H200 with the full 132 multiprocessors. Their PCIe and NVL siblings have fewer of them or slower clocks,
/// and a part of one (MIG) is less than one, so these are left out, as is the GH200, which comes in several kinds.
bool is_full_hopper(const std::string& name) {
  for (const char* other : {"PCIe", "NVL", "MIG", "GH"}) {
    if (contains(name, other)) return false;
  }
  return contains(name, "H100") || contains(name, "H200");
}

}  // namespace

double peak_flops_per_s(const std::string& device_name, const std::string& dtype) {
  if (!is_full_hopper(device_name)) return 0.0;
  if (dtype == "bf16" || dtype == "fp16") return 989.4e12;
  if (dtype == "tf32") return 494.7e12;
  return dtype == "fp32" ? 66.9e12 : 0.0;
}

}  // namespace pdl
