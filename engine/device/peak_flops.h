#pragma once
// The denominators of "how much of what the device could do": peaks of arithmetic as its maker states them.

#include <string>

namespace pdl {

/// Floating-point operations per second of dense matrix products with `dtype` ("bf16", "fp16", "tf32", "fp32") on the
/// device with this name. 0 when the device or the pair is not in the table: better no ratio than a wrong one.
///
/// The figures hold at the clock that the maker reckons with, so a device that boosts beyond it can exceed them a
/// little, and one at its power limit cannot reach them.
double peak_flops_per_s(const std::string& device_name, const std::string& dtype);

}  // namespace pdl
