#pragma once
// What follows a matrix product when cuBLASLt does not do it itself.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "engine/backend/backend.h"

namespace pdl::cuda {

/// y = activation(sums + bias), [rows, columns] of a compute type; `sums` receives sums + bias when there is a bias. y
/// may be sums; then only y stays. `bias` [columns] need not be aligned; without one (null) sums is only read.
void bias_activation(void* y, void* sums, const void* bias, std::int64_t rows, std::int64_t columns, DType dtype,
                     Activation activation, cudaStream_t stream);

}  // namespace pdl::cuda
