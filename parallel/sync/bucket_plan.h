#pragma once
// Which parameters share a collective, by two rules as pure functions, so that plans can print them without running:
// PyTorch DDP's (compute_bucket_assignment_by_size in torch/csrc/distributed/c10d/reducer.cpp) and DeepSpeed's
// (reduce_independent_p_g_buckets_and_remove_grads in deepspeed/runtime/zero/stage_1_and_2.py).

#include <cstdint>
#include <string>
#include <vector>

namespace pdl {

/// Parameters reduced together, as indices into ParamStore::params(), in the order of their slots in the bucket.
struct Bucket {
  std::vector<int> params;
  std::int64_t elements = 0;
};

/// Walks the parameters in `order`; a bucket is closed by the parameter that brings it to its limit. The limits are
/// used in turn and the last one repeats. Parameters are never split, so a bucket may exceed its limit by nearly one
/// parameter. `elements[i]` belongs to parameter i.
std::vector<Bucket> assign_buckets(const std::vector<int>& order, const std::vector<std::int64_t>& elements,
                                   std::int64_t element_bytes, const std::vector<std::int64_t>& limits_bytes);

/// Walks the parameters in `order`; a bucket is closed ahead of the parameter that would not fit into `capacity`
/// elements. A parameter larger than that has a bucket of its own.
std::vector<Bucket> fill_buckets(const std::vector<int>& order, const std::vector<std::int64_t>& elements,
                                 std::int64_t capacity);

}  // namespace pdl
