#include "parallel/sync/tensor_tables.h"

#include <algorithm>

#include "parallel/sync/startup.h"

namespace pdl {

PlanTable all_reduce_table(const ParamStore& store, const std::vector<int>& order,
                           const std::vector<UpdateGroup>& groups, std::int64_t element_bytes) {
  PlanTable table{.title = str("all-reduces, in the order in which they begin; ", groups.size(), " updates"),
                  .columns = {"weight", "elements", "MiB", "update"},
                  .rows = {}};
  for (int index : order) {
    const Param& param = store.params()[static_cast<std::size_t>(index)];
    const auto group = std::find_if(groups.begin(), groups.end(),
                                    [&](const UpdateGroup& candidate) { return candidate.first <= index; });
    table.rows.push_back(
        {param.spec.name, str(param.count), mebibytes(param.count * element_bytes), str(group - groups.begin())});
  }
  return table;
}

std::vector<std::string> all_reduce_warnings(const ParamStore& store, const TensorAllReduce& sums, bool waits_for_all,
                                             std::int64_t element_bytes) {
  constexpr std::int64_t kSmall = 100000;
  const std::vector<int>& order = sums.order();
  std::vector<std::string> warnings;
  if (waits_for_all) {
    warnings.push_back(
        "clipping and loss scaling look at all gradients: no weight is updated before the last all-reduce is done");
  }
  if (sums.max_in_flight() == 1) {
    warnings.push_back(
        "max_inflight=1: the backward pass stops wherever a gradient is final before the all-reduce of the one before "
        "it is done; max_inflight=0 lets it go on");
  }
  if (order.empty()) return warnings;
  const auto count_of = [&](int index) { return store.params()[static_cast<std::size_t>(index)].count; };
  std::int64_t total = 0, in_small = 0, small = 0;
  for (int index : order) {
    total += count_of(index);
    if (count_of(index) > kSmall) continue;
    small += 1;
    in_small += count_of(index);
  }
  if (2 * small > static_cast<std::int64_t>(order.size())) {
    warnings.push_back(str(small, " of ", order.size(), " all-reduces carry at most ", kSmall, " elements, ",
                           mebibytes(in_small * element_bytes), " of ", mebibytes(total * element_bytes),
                           " MiB: they cost latency, which buckets would save"));
  }
  const std::int64_t last = count_of(order.back());
  if (order.size() > 1 && 10 * last > total) {
    warnings.push_back(str(store.params()[static_cast<std::size_t>(order.back())].spec.name, " (",
                           mebibytes(last * element_bytes), " MiB, ", 100 * last / total,
                           " % of all bytes) is final only when the backward pass ends: its all-reduce can hide behind "
                           "the updates of other weights only"));
  }
  return warnings;
}

}  // namespace pdl
