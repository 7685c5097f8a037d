// What a rank must be able to hold, and how a step is cut.

#include "parallel/pipeline/schedule_memory.h"
#include "parallel/pipeline/stage_feeder.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

std::vector<std::int64_t> sizes(std::int64_t samples, int micro_batches) {
  std::vector<std::int64_t> counts;
  std::int64_t end = 0;
  for (const Part& part : cut_step(samples, micro_batches)) {
    CHECK(part.begin == end);
    counts.push_back(part.count);
    end = part.begin + part.count;
  }
  CHECK(end == samples);
  return counts;
}

}  // namespace

TEST_CASE("recomputation needs one slot, keeping one for each micro-batch", "[pipeline]") {
  for (int rank : {0, 1, 2}) {
    const int inputs = rank == 0 ? 0 : 8;  // the first stage receives none
    for (Checkpoint mode : {Checkpoint::always, Checkpoint::except_last, Checkpoint::never}) {
      const RankNeeds needs = needs_of(fill_drain(3, 8, mode), rank);
      CHECK(needs.chunks[0].slots == (mode == Checkpoint::never ? 8 : 1));
      CHECK(needs.chunks[0].inputs == inputs);
      CHECK(needs.chunks[0].sends == (rank < 2));
      CHECK(needs.micro_batches == 8);
      CHECK_FALSE(needs.gathers_loss);
    }
  }
  CHECK(needs_of(fill_drain(3, 8, Checkpoint::never, true), 2).gathers_loss);
  CHECK_FALSE(needs_of(fill_drain(3, 8, Checkpoint::never, true), 1).gathers_loss);
}

TEST_CASE("1F1B holds as many micro-batches as stages follow", "[pipeline]") {
  const Schedule schedule = one_forward_one_backward(4, 8);
  for (int rank = 0; rank < 4; ++rank) {
    const RankNeeds needs = needs_of(schedule, rank);
    CHECK(needs.chunks[0].slots == 4 - rank);
    CHECK(needs.chunks[0].inputs == (rank == 0 ? 0 : 4 - rank + 1));  // and one that is on its way
    CHECK(needs.micro_batches == 4 - rank);
  }
  CHECK(needs_of(one_forward_one_backward(4, 2), 0).chunks[0].slots == 2);
  CHECK(needs_of(one_forward_one_backward(4, 2), 1).chunks[0].inputs == 2);  // there are no more
}

TEST_CASE("chunks have needs of their own", "[pipeline]") {
  const RankNeeds needs = needs_of(interleaved(2, 8, 2), 0);
  REQUIRE(needs.chunks.size() == 2);
  CHECK(needs.chunks[0].slots + needs.chunks[1].slots >= 5);  // the peak of their sum
  CHECK(needs.chunks[0].inputs == 0);
  CHECK(needs.chunks[1].inputs > 0);
  CHECK(needs.chunks[1].sends);
  CHECK_FALSE(needs_of(interleaved(2, 8, 2), 1).chunks[1].sends);
}

TEST_CASE("evaluation holds one micro-batch at a time", "[pipeline]") {
  for (bool gathered : {false, true}) {
    const RankNeeds needs = needs_of(forward_only({1, 1, 1}, 8, 1, gathered), 2);
    CHECK(needs.chunks[0].slots == 1);
    CHECK(needs.chunks[0].inputs == 2);
    CHECK(needs.micro_batches == 1);
  }
}

TEST_CASE("the parts of a step differ by at most one sample", "[pipeline]") {
  CHECK(sizes(12, 4) == std::vector<std::int64_t>{3, 3, 3, 3});
  CHECK(sizes(7, 4) == std::vector<std::int64_t>{2, 2, 2, 1});
  CHECK(sizes(12, 5) == std::vector<std::int64_t>{3, 3, 2, 2, 2});
  CHECK(sizes(2, 4) == std::vector<std::int64_t>{1, 1});
}
