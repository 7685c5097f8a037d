#include "parallel/sync/bucket_plan.h"

#include <numeric>

#include "tests/support/catch.h"

using namespace pdl;

namespace {

std::vector<std::vector<int>> plan(const std::vector<std::int64_t>& elements,
                                   const std::vector<std::int64_t>& limits_bytes, std::vector<int> order = {}) {
  if (order.empty()) {
    order.resize(elements.size());
    std::iota(order.begin(), order.end(), 0);
  }
  std::vector<std::vector<int>> params;
  for (const Bucket& bucket : assign_buckets(order, elements, 4, limits_bytes)) {
    std::int64_t sum = 0;
    for (int param : bucket.params) sum += elements[static_cast<std::size_t>(param)];
    CHECK(sum == bucket.elements);
    params.push_back(bucket.params);
  }
  return params;
}

using Plan = std::vector<std::vector<int>>;

}  // namespace

TEST_CASE("a parameter that reaches the limit closes its bucket") {
  // Upstream's own example: tensors of 100, 200, 100, 50 floats at 400 bytes.
  CHECK(plan({100, 200, 100, 50}, {400}) == Plan{{0}, {1}, {2}, {3}});
  CHECK(plan({50, 40, 10, 100, 1}, {400}) == Plan{{0, 1, 2}, {3}, {4}});
}

TEST_CASE("limits are used in turn and the last one repeats") {
  CHECK(plan({10, 10, 10, 10, 10, 10, 10}, {40, 80}) == Plan{{0}, {1, 2}, {3, 4}, {5, 6}});
  CHECK(plan({10, 10, 10}, {1, 1000}) == Plan{{0}, {1, 2}});
}

TEST_CASE("parameters are never split, and order is kept") {
  CHECK(plan({1, 1000, 1}, {40}) == Plan{{0, 1}, {2}});
  CHECK(plan({5, 6, 7}, {1000}, {2, 0, 1}) == Plan{{2, 0, 1}});
  CHECK(plan({}, {40}).empty());
}

TEST_CASE("a bucket that is filled never exceeds its capacity, except by a single parameter") {
  const auto filled = [](const std::vector<std::int64_t>& elements, std::int64_t capacity) {
    std::vector<int> order(elements.size());
    std::iota(order.begin(), order.end(), 0);
    Plan params;
    for (const Bucket& bucket : fill_buckets(order, elements, capacity)) params.push_back(bucket.params);
    return params;
  };
  CHECK(filled({3, 3, 4, 1, 9, 30, 2, 2}, 10) == Plan{{0, 1, 2}, {3, 4}, {5}, {6, 7}});
  CHECK(filled({5, 5, 1}, 10) == Plan{{0, 1}, {2}});
  CHECK(filled({1, 1, 1}, 1000) == Plan{{0, 1, 2}});
  CHECK(filled({}, 10).empty());
}
