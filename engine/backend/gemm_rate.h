#pragma once
// What this very device does in one large product of matrices: the second yardstick beside the maker's peak, which no
// device reaches at its limit of power.

#include <cstdint>

#include "engine/backend/backend.h"

namespace pdl {

/// The extent of the product that GPUs are measured by; CPUs would take minutes for it, and have a smaller one.
inline constexpr std::int64_t kGpuGemmExtent = 8192, kCpuGemmExtent = 1024;

/// Floating-point operations per second, 2 n^3 of each, in the median of several forward products of a linear layer
/// [n, n] x [n, n] of `dtype` on random numbers (zeros would draw less power and run faster). Takes 3 n^2 elements of
/// workspace for that time; call it before training takes its own. Throws Error(out_of_memory) when they are not there.
double measured_gemm_flops_per_s(Device& device, Backend& backend, DType dtype, std::int64_t n);

}  // namespace pdl
