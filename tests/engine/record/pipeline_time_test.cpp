// Where a pipeline's time goes, as the phase clock and the merge of ranks have it; every number by hand.

#include <array>

#include "engine/record/recorder.h"
#include "tests/engine/record/hand_clock.h"
#include "tests/support/catch.h"

using namespace pdl;

TEST_CASE("in a pipeline every moment of the epoch is accounted for once") {
  HandClock time;
  PhaseClock clock(0, time.reader());
  const auto pass = [&](TaskKind kind, std::int64_t number, double seconds, int chunk = 0) {
    clock.task_begin({kind, number, chunk});
    time.now += seconds;
    clock.task_end();
  };
  const auto wait = [&](bool for_neighbour, double seconds) {
    clock.wait_begin();
    time.now += seconds;
    clock.wait_end(for_neighbour);
  };
  for (int epoch = 0; epoch < 2; ++epoch) {
    clock.epoch_begin();
    time.now += 0.5;  // before anything is said: other
    clock.step_begin();
    clock.schedule_part(SchedulePart::warm_up);
    clock.phase(Phase::forward);
    wait(true, 4.0);
    clock.phase(Phase::data);
    time.now += 0.25;  // other
    clock.phase(Phase::forward);
    pass(TaskKind::forward, 0, 1.0);
    time.now += 0.125;  // between passes: other
    pass(TaskKind::forward, 0, 2.0, 1);
    clock.wait_begin();  // a message that need not be waited for
    clock.phase(Phase::backward);
    pass(TaskKind::recompute, 0, 0.75);
    wait(true, 8.0);
    clock.task_begin({TaskKind::backward, 0, 1});
    time.now += 1.5;
    wait(false, 0.0625);  // layers that other ranks share
    time.now += 1.5;
    clock.task_end();
    clock.schedule_part(SchedulePart::steady);
    wait(true, 16.0);
    clock.phase(Phase::forward);
    pass(TaskKind::forward, 1, 3.0);
    clock.schedule_part(SchedulePart::drain);
    pass(TaskKind::loss, 1, 0.375);
    clock.phase(Phase::backward);
    wait(true, 32.0);
    pass(TaskKind::backward, 1, 6.0);
    clock.phase(Phase::communication);
    time.now += 0.03125;  // copies around a sum
    wait(false, 64.0);
    clock.phase(Phase::optimizer);
    time.now += 128.0;
    wait(false, 0.015625);  // a norm
    clock.step_end(step_of(4));
    time.now += 256.0;
    const RankEpoch measured = clock.epoch_end();
    REQUIRE(measured.pipeline.has_value());
    const PipelineRankRecord& mine = *measured.pipeline;
    CHECK(mine.forward_s == 1.0 + 2.0 + 3.0 + 0.375);
    CHECK(mine.recompute_s == 0.75);
    CHECK(mine.backward_s == 1.5 + 1.5 + 6.0);
    CHECK(mine.wait_s == std::array<double, 3>{4.0 + 8.0, 16.0, 32.0});
    CHECK(mine.comm_passes_s == 0.0625);
    CHECK(mine.comm_s == 0.03125 + 64.0 + 0.015625);
    CHECK(mine.optimizer_s == 128.0);
    CHECK(mine.other_s == 0.5 + 0.25 + 0.125 + 256.0);
    CHECK(mine.train_s == measured.train_s);
    CHECK(mine.forward_s + mine.recompute_s + mine.backward_s + mine.comm_passes_s + mine.optimizer_s + mine.other_s +
              mine.idle_s() ==
          mine.train_s);
    REQUIRE(mine.passes.size() == 2);
    CHECK(mine.passes[0].forward.count == 2);
    CHECK(mine.passes[0].forward.mean_s() == 2.0);
    CHECK(mine.passes[0].backward.mean_s() == 6.0);
    CHECK(mine.passes[0].recompute.count == 1);
    CHECK(mine.passes[0].loss.mean_s() == 0.375);
    CHECK(mine.passes[1].forward.mean_s() == 2.0);
    CHECK(mine.passes[1].backward.mean_s() == 3.0625);  // with what it waited for
    CHECK(mine.passes[1].recompute.count == 0);
    // Phases are as they always were: with what was waited for.
    CHECK(measured.phase(Phase::backward) == 0.75 + 8.0 + 3.0625 + 16.0 + 32.0 + 6.0);
    CHECK(measured.phase(Phase::optimizer) == 128.015625);
  }
}

TEST_CASE("a rank that announces no schedule is in no pipeline") {
  HandClock time;
  PhaseClock clock(0, time.reader());
  clock.epoch_begin();
  clock.step_begin();
  clock.task_begin({TaskKind::forward, 0});
  clock.wait_begin();
  time.now += 1.0;
  clock.wait_end(true);
  clock.task_end();
  clock.step_end(step_of(1));
  CHECK_FALSE(clock.epoch_end().pipeline.has_value());
  CHECK_FALSE(merge({RankEpoch()}, EpochFacts{}).pipeline.has_value());
}

TEST_CASE("waits between epochs, as those of an evaluation, are not looked at") {
  int marks = 0;
  PhaseClock clock(0, [&marks] { return 0.25 * marks++; });
  const auto wait = [&clock] {
    clock.wait_begin();
    clock.wait_end(true);
  };
  clock.epoch_begin();
  clock.schedule_part(SchedulePart::drain);
  wait();
  CHECK(clock.epoch_end().pipeline->wait_s[2] == 0.25);
  const int before = marks;
  wait();
  CHECK(marks == before);
  clock.epoch_begin();
  wait();  // before the second epoch says where it is
  CHECK(clock.epoch_end().pipeline->wait_s[0] == 0.25);
}

TEST_CASE("a pipeline's shares are of all its ranks' time together") {
  RankEpoch first, second;
  first.pipeline = {.train_s = 10.0,
                    .forward_s = 2.0,
                    .backward_s = 3.0,
                    .recompute_s = 1.0,
                    .wait_s = {0.25, 0.5, 0.75},
                    .comm_passes_s = 0.0625,  // a part of passes: neither idle nor useful
                    .comm_s = 0.375};
  second.pipeline = {.train_s = 30.0, .forward_s = 14.0, .backward_s = 3.0, .wait_s = {1.0, 2.0, 0.5}, .comm_s = 0.375};
  const EpochRecord record = merge({first, second}, EpochFacts{});
  REQUIRE(record.pipeline.has_value());
  REQUIRE(record.pipeline->ranks.size() == 2);
  CHECK(record.pipeline->ranks[1].rank == 1);
  CHECK(record.pipeline->ranks[1].train_s == 30.0);
  CHECK(record.pipeline->idle_fraction == (0.25 + 0.5 + 0.75 + 0.375 + 1.0 + 2.0 + 0.5 + 0.375) / 40.0);
  CHECK(record.pipeline->useful_fraction == (2.0 + 3.0 + 14.0 + 3.0) / 40.0);
  CHECK_FALSE(record.pipeline->closed_form_idle_fraction.has_value());  // who knows the schedule tells
}
