#include "parallel/sync/bucket_plan.h"

#include <algorithm>

#include "engine/base/error.h"

namespace pdl {

std::vector<Bucket> assign_buckets(const std::vector<int>& order, const std::vector<std::int64_t>& elements,
                                   std::int64_t element_bytes, const std::vector<std::int64_t>& limits_bytes) {
  PDL_CHECK(!limits_bytes.empty(), "a bucket needs a limit");
  std::vector<Bucket> buckets;
  Bucket open;
  for (int param : order) {
    open.params.push_back(param);
    open.elements += elements[static_cast<std::size_t>(param)];
    const std::int64_t limit = limits_bytes[std::min(buckets.size(), limits_bytes.size() - 1)];
    if (open.elements * element_bytes >= limit) {
      buckets.push_back(std::move(open));
      open = Bucket();
    }
  }
  if (!open.params.empty()) buckets.push_back(std::move(open));
  return buckets;
}

std::vector<Bucket> fill_buckets(const std::vector<int>& order, const std::vector<std::int64_t>& elements,
                                 std::int64_t capacity) {
  std::vector<Bucket> buckets;
  for (int param : order) {
    const std::int64_t count = elements[static_cast<std::size_t>(param)];
    if (buckets.empty() || buckets.back().elements + count > capacity) buckets.emplace_back();
    buckets.back().params.push_back(param);
    buckets.back().elements += count;
  }
  return buckets;
}

}  // namespace pdl
