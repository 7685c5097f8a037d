#pragma once
// Sums down the columns of a matrix: the gradient of every bias.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "engine/device/cuda_device.h"
#include "engine/tensor/dtype.h"

namespace pdl::cuda {

/// out[c] (+)= sum over rows of x[r][c]: x [rows, columns] of a compute type, out [columns] fp32, both in device
/// memory. The order of the sum follows from the extents and the alignment of x, so the same call gives the same bits.
/// Works in `scratch`.
void column_sums(float* out, const void* x, DType dtype, std::int64_t rows, std::int64_t columns, bool accumulate,
                 CudaScratch& scratch, cudaStream_t stream);

}  // namespace pdl::cuda
