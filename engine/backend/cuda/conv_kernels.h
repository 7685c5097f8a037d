#pragma once
// What stands around cuDNN's convolutions: images with too few channels are widened, and the gradient of half precision
// weights joins its fp32 destination.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "engine/tensor/dtype.h"

namespace pdl::cuda {

/// Channels that an image of bf16 or fp16 is widened to: 16 bytes, the width that tensor cores are fed with.
inline constexpr std::int64_t kWideChannels = 8;

/// to [rows, 8] = from [rows, channels], channels < 8, and zeros behind; bf16 or fp16. `to` is aligned to 16 bytes.
void widen_channels(void* to, const void* from, DType dtype, std::int64_t rows, std::int64_t channels,
                    cudaStream_t stream);

/// to fp32 [rows, channels] (+)= the first `channels` columns of from [rows, from_channels].
void add_weight_gradient(float* to, const void* from, DType dtype, std::int64_t rows, std::int64_t channels,
                         std::int64_t from_channels, bool accumulate, cudaStream_t stream);

}  // namespace pdl::cuda
