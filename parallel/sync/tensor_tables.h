#pragma once
// What `plan` says of reductions weight by weight: tables, and what is worth a warning.

#include <string>
#include <vector>

#include "parallel/engine.h"
#include "parallel/sync/replicated_update.h"

namespace pdl {

/// A row for each parameter of `order` (indices into ParamStore::params()) with the group it is updated in.
PlanTable all_reduce_table(const ParamStore& store, const std::vector<int>& order,
                           const std::vector<UpdateGroup>& groups, std::int64_t element_bytes);

/// Of reductions in this order: many that are too small for the network, a large one that comes too late.
std::vector<std::string> all_reduce_warnings(const ParamStore& store, const std::vector<int>& order,
                                             std::int64_t element_bytes);

}  // namespace pdl
