#pragma once
// Reductions in a fixed order: what makes results independent of who adds first.

#include <cstdint>
#include <vector>

#include "engine/tensor/dtype.h"
#include "parallel/comm/communicator.h"

namespace pdl {

/// out[i] = ((c0[i] op c1[i]) op c2[i]) op ..., in the type's own arithmetic; bf16 and fp16 in fp32, rounded once at
/// the end. `out` may be one of the contributions. A NaN in any of them gives NaN. All pointers are host memory of
/// `count` elements.
void reduce_in_rank_order(void* out, const std::vector<const void*>& contributions, std::int64_t count, DType dtype,
                          ReduceOp op);

/// IEEE half and bfloat16 as fp32, and back rounding to the nearest, ties to even.
float fp16_to_fp32(std::uint16_t bits);
float bf16_to_fp32(std::uint16_t bits);
std::uint16_t fp32_to_fp16(float value);
std::uint16_t fp32_to_bf16(float value);

}  // namespace pdl
