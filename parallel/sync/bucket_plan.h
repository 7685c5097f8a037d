#pragma once
// Which parameters share an all-reduce: PyTorch DDP's assignment as a pure function, so that plans can print it without
// running. Source of the rule: compute_bucket_assignment_by_size in torch/csrc/distributed/c10d/reducer.cpp.

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

}  // namespace pdl
