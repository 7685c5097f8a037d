#include "engine/record/records.h"

#include "tests/support/catch.h"

using namespace pdl;

namespace {

std::vector<double> counted_to(int count) {
  std::vector<double> values;
  for (int i = count; i >= 1; --i) values.push_back(i);  // order must not matter
  return values;
}

}  // namespace

TEST_CASE("percentiles are values that occurred, by nearest rank") {
  const StepPercentiles hundred = percentiles(counted_to(100));
  CHECK(hundred.median == 50);
  CHECK(hundred.p5 == 5);
  CHECK(hundred.p95 == 95);
  CHECK(hundred.p99 == 99);
  CHECK(hundred.min == 1);
  CHECK(hundred.max == 100);

  // 5 % of 20 is 1 exactly and 95 % is 19 exactly; floating-point products may round above.
  const StepPercentiles twenty = percentiles(counted_to(20));
  CHECK(twenty.median == 10);
  CHECK(twenty.p5 == 1);
  CHECK(twenty.p95 == 19);
  CHECK(twenty.p99 == 20);

  const StepPercentiles seven = percentiles({15, 20, 35, 40, 50, 60, 70});
  CHECK(seven.median == 40);
  CHECK(seven.p5 == 15);
  CHECK(seven.p95 == 70);
}

TEST_CASE("percentiles of one value are that value, of none zero") {
  const StepPercentiles one = percentiles({2.5});
  CHECK(one.median == 2.5);
  CHECK(one.p5 == 2.5);
  CHECK(one.p99 == 2.5);
  const StepPercentiles none = percentiles({});
  CHECK(none.median == 0.0);
  CHECK(none.max == 0.0);
}

TEST_CASE("a spread is minimum, mean and maximum") {
  const Spread spread = spread_of({3.0, 1.0, 8.0});
  CHECK(spread.min == 1.0);
  CHECK(spread.mean == 4.0);
  CHECK(spread.max == 8.0);
  CHECK(spread_of({}).max == 0.0);
}

TEST_CASE("times of day are in UTC, to the second") {
  const std::string now = utc_now();
  REQUIRE(now.size() == 20);
  CHECK(now[10] == 'T');
  CHECK(now.back() == 'Z');
}
