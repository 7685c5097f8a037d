#pragma once
// NVIDIA's two ways to look inside a process: NVTX, by which it names what it does to Nsight and the like, and CUPTI,
// by which it learns itself what the GPU did.

#include <memory>

#include "engine/device/profiling.h"

namespace pdl {

/// Ranges of the NVTX domain "pdlbench", on the calling thread. Null when the build has no NVTX.
std::unique_ptr<RangeListener> make_nvtx_ranges();

/// Kernels, copies and fills of this process, by CUPTI, which is loaded when first asked for. One log at a time. Null,
/// after a line on stderr, when CUPTI is not in the build or on the machine, or does not work here.
std::unique_ptr<ActivityLog> make_cupti_log();

}  // namespace pdl
