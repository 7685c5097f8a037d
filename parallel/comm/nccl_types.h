#pragma once
// NCCL's names of our types.

#include <nccl.h>

#include "engine/base/error.h"
#include "parallel/comm/communicator.h"

namespace pdl {

inline ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::fp64:
      return ncclFloat64;
    case DType::fp32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::fp16:
      return ncclFloat16;
    case DType::int64:
      return ncclInt64;
    case DType::int32:
      return ncclInt32;
    case DType::uint8:
      return ncclUint8;
  }
  throw Error(str("NCCL has no type for ", name_of(dtype)));
}

inline ncclRedOp_t nccl_op(ReduceOp op) {
  return op == ReduceOp::sum ? ncclSum : op == ReduceOp::max ? ncclMax : ncclMin;
}

}  // namespace pdl
