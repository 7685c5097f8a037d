#pragma once
// What `plan` says of reductions weight by weight: tables, and what is worth a warning.

#include <string>
#include <vector>

#include "parallel/engine.h"
#include "parallel/sync/replicated_update.h"
#include "parallel/sync/tensor_all_reduce.h"

namespace pdl {

/// A row for each parameter of `order` (indices into ParamStore::params()) with the group it is updated in.
PlanTable all_reduce_table(const ParamStore& store, const std::vector<int>& order,
                           const std::vector<UpdateGroup>& groups, std::int64_t element_bytes);

/// What keeps these reductions from hiding behind other work: somebody who waits for all of them, a limit on how many
/// are in flight, many that are too small for the network, a large one that comes too late.
std::vector<std::string> all_reduce_warnings(const ParamStore& store, const TensorAllReduce& sums, bool waits_for_all,
                                             std::int64_t element_bytes);

}  // namespace pdl
