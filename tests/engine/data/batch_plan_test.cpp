#include "engine/data/batch_plan.h"

#include <algorithm>
#include <numeric>

#include "engine/base/error.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

std::vector<std::int64_t> all_ids(const EpochPlan& plan) {
  std::vector<std::int64_t> ids;
  for (std::int64_t step = 0; step < plan.steps(); ++step) {
    const auto of_step = plan.step_ids(step);
    ids.insert(ids.end(), of_step.begin(), of_step.end());
  }
  return ids;
}

std::vector<std::int64_t> counted_to(std::int64_t count) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

}  // namespace

TEST_CASE("split_evenly: the parts tile the whole and differ by at most one, larger ones first") {
  for (std::int64_t total = 0; total <= 40; ++total) {
    for (std::int64_t parts = 1; parts <= 9; ++parts) {
      std::int64_t next = 0, before = total;
      for (std::int64_t index = 0; index < parts; ++index) {
        const Part part = split_evenly(total, parts, index);
        CHECK(part.begin == next);
        CHECK(part.count <= before);
        CHECK(part.count >= total / parts);
        CHECK(part.count <= total / parts + 1);
        next += part.count;
        before = part.count;
      }
      CHECK(next == total);
    }
  }
  CHECK(split_evenly(10, 4, 1) == Part{3, 3});
  CHECK(split_evenly(2, 4, 3) == Part{2, 0});
  CHECK_THROWS_AS(split_evenly(3, 2, 2), Error);
  CHECK_THROWS_AS(split_evenly(3, 0, 0), Error);
}

TEST_CASE("split_in_pieces: equal pieces and a smaller last one") {
  CHECK(split_in_pieces(10, 4) == std::vector<Part>{{0, 4}, {4, 4}, {8, 2}});
  CHECK(split_in_pieces(8, 4) == std::vector<Part>{{0, 4}, {4, 4}});
  CHECK(split_in_pieces(3, 4) == std::vector<Part>{{0, 3}});
  CHECK(split_in_pieces(0, 4).empty());
  CHECK_THROWS_AS(split_in_pieces(3, 0), Error);
}

TEST_CASE("an epoch holds each sample exactly once, whatever its size and batch") {
  for (const bool shuffle : {false, true}) {
    for (std::int64_t samples = 0; samples <= 33; ++samples) {
      for (const std::int64_t batch : {1, 2, 7, 16, 32, 33, 34}) {
        const EpochPlan plan(samples, batch, 42, 3, shuffle, false, 0);
        CHECK(plan.steps() == (samples + batch - 1) / batch);
        CHECK(plan.full_steps() == plan.steps());
        CHECK(plan.samples() == samples);
        std::vector<std::int64_t> ids = all_ids(plan);
        std::sort(ids.begin(), ids.end());
        CHECK(ids == counted_to(samples));
      }
    }
  }
}

TEST_CASE("the last step is ragged, or left out with drop_last") {
  const EpochPlan ragged(10, 4, 1, 0, true, false, 0);
  CHECK(ragged.steps() == 3);
  CHECK(ragged.step_ids(2).size() == 2);
  const EpochPlan dropping(10, 4, 1, 0, true, true, 0);
  CHECK(dropping.steps() == 2);
  CHECK(dropping.samples() == 8);
  for (std::int64_t step = 0; step < 2; ++step)
    CHECK(std::ranges::equal(ragged.step_ids(step), dropping.step_ids(step)));
  CHECK(EpochPlan(3, 4, 1, 0, true, true, 0).steps() == 0);
  CHECK(EpochPlan(8, 4, 1, 0, true, true, 0).steps() == 2);
}

TEST_CASE("max_steps cuts the epoch without changing what its steps hold") {
  const EpochPlan whole(100, 8, 7, 2, true, false, 0);
  const EpochPlan cut(100, 8, 7, 2, true, false, 5);
  CHECK(cut.steps() == 5);
  CHECK(cut.full_steps() == 13);
  CHECK(cut.samples() == 40);
  for (std::int64_t step = 0; step < 5; ++step) CHECK(std::ranges::equal(whole.step_ids(step), cut.step_ids(step)));
  CHECK(EpochPlan(100, 8, 7, 2, true, false, 99).steps() == 13);
  CHECK_THROWS_AS(cut.step_ids(5), Error);
  CHECK_THROWS_AS(cut.step_ids(-1), Error);
}

TEST_CASE("the order depends on seed and epoch alone, and is 0, 1, 2, ... without shuffling") {
  const auto order = [](std::uint64_t seed, std::int64_t epoch) {
    return all_ids(EpochPlan(200, 16, seed, epoch, true, false, 0));
  };
  CHECK(order(1, 0) == order(1, 0));
  CHECK(order(1, 0) != order(1, 1));
  CHECK(order(1, 0) != order(2, 0));
  CHECK(all_ids(EpochPlan(200, 32, 1, 0, true, false, 0)) == order(1, 0));  // the batch only cuts it
  CHECK(all_ids(EpochPlan(50, 16, 1, 4, false, false, 0)) == counted_to(50));
}

TEST_CASE("what the ranks hold together is the step, for any number of ranks") {
  const EpochPlan plan(50, 16, 9, 0, true, false, 0);
  for (std::int64_t step = 0; step < plan.steps(); ++step) {
    const auto ids = plan.step_ids(step);
    for (const std::int64_t dp_size : {1, 2, 3, 4, 8, 20}) {
      std::vector<std::int64_t> together;
      for (std::int64_t dp_rank = 0; dp_rank < dp_size; ++dp_rank) {
        const Part part = split_evenly(static_cast<std::int64_t>(ids.size()), dp_size, dp_rank);
        const auto of_rank = ids.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.count));
        together.insert(together.end(), of_rank.begin(), of_rank.end());
      }
      CHECK(std::ranges::equal(together, ids));
    }
  }
}
