// Simulated times against closed forms, and the picture.

#include <random>
#include <set>

#include "parallel/pipeline/schedule_timeline.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// Alike on all stages: forward 1, recomputation 1, backward 2.
std::vector<StageCost> even(const Schedule& schedule) {
  return std::vector<StageCost>(static_cast<std::size_t>(schedule.virtual_stages()));
}

Timeline simulated(const Schedule& schedule) { return simulate(schedule, even(schedule)); }

using Tasks = std::set<std::pair<int, int>>;  // micro-batch, stage

/// Forward passes that begin at each tick of a clock, when all take one tick.
std::vector<Tasks> clock_cycles(int stages, int micro_batches) {
  const Schedule schedule = forward_only(std::vector<int>(static_cast<std::size_t>(stages), 1), micro_batches, 1);
  const Timeline timeline = simulated(schedule);
  std::vector<Tasks> cycles(static_cast<std::size_t>(timeline.makespan));
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (std::size_t i = 0; i < timeline.ranks[rank].size(); ++i) {
      const Action& action = schedule.ranks[rank].actions[i];
      if (action.act != Act::forward) continue;
      cycles.at(static_cast<std::size_t>(timeline.ranks[rank][i].begin))
          .insert({action.micro_batch, static_cast<int>(rank)});
    }
  }
  return cycles;
}

double percent(double fraction) { return std::round(1000.0 * fraction) / 10.0; }

}  // namespace

TEST_CASE("fill-drain takes as long as its closed forms say", "[pipeline]") {
  CHECK(simulated(fill_drain(4, 8, Checkpoint::never)).makespan == 33.0);
  CHECK(simulated(fill_drain(4, 8, Checkpoint::except_last)).makespan == 40.0);
  CHECK(simulated(fill_drain(4, 8, Checkpoint::always)).makespan == 41.0);
  CHECK(simulated(fill_drain(2, 4, Checkpoint::never)).makespan == 15.0);
  CHECK(simulated(fill_drain(2, 4, Checkpoint::except_last)).makespan == 18.0);
  CHECK(simulated(fill_drain(2, 4, Checkpoint::always)).makespan == 19.0);
  const double F = 3.0, R = 2.5, B = 7.0;
  for (int p : {1, 2, 5}) {
    for (int m : {1, 4, 9}) {
      const std::vector<StageCost> costs(static_cast<std::size_t>(p), {.forward = F, .backward = B, .recompute = R});
      const auto makespan = [&](Checkpoint mode) { return simulate(fill_drain(p, m, mode), costs).makespan; };
      CHECK(makespan(Checkpoint::never) == (m + p - 1) * (F + B));
      CHECK(makespan(Checkpoint::except_last) == (m + p - 1) * F + m * B + (m - 1) * R + (p - 1) * B);
      CHECK(makespan(Checkpoint::always) == (m + p - 1) * F + m * (R + B) + (p - 1) * B);
    }
  }
}

TEST_CASE("recomputation fills the bubble and makes the step longer", "[pipeline]") {
  const auto numbers = [](Checkpoint mode) {
    const Timeline timeline = simulated(fill_drain(4, 8, mode));
    return std::pair(percent(timeline.idle_fraction()), percent(timeline.useful_fraction()));
  };
  CHECK(numbers(Checkpoint::never) == std::pair(27.3, 72.7));
  CHECK(numbers(Checkpoint::except_last) == std::pair(22.5, 60.0));
  CHECK(numbers(Checkpoint::always) == std::pair(22.0, 58.5));
}

TEST_CASE("bubbles of 1F1B and interleaved 1F1B", "[pipeline]") {
  const auto idle = [](const Schedule& schedule) { return percent(simulated(schedule).idle_fraction()); };
  CHECK(idle(one_forward_one_backward(4, 8)) == 27.3);
  CHECK(idle(one_forward_one_backward(4, 4)) == 42.9);
  CHECK(idle(one_forward_one_backward(4, 2)) == 60.0);
  CHECK(idle(one_forward_one_backward(2, 4)) == 20.0);
  CHECK(idle(interleaved(4, 8, 2)) == 15.8);
  CHECK(idle(interleaved(4, 8, 3)) == 11.1);
  CHECK(idle(one_forward_one_backward(1, 3)) == 0.0);
}

TEST_CASE("without flush only the ends of an epoch idle", "[pipeline]") {
  for (int p : {2, 4}) {
    const Schedule schedule = continuous(std::vector<int>(static_cast<std::size_t>(p), 1), 50);
    CHECK(simulated(schedule).idle_fraction() == Approx((p - 1.0) / (50 + p - 1)));
  }
}

TEST_CASE("the slowest stage sets the pace", "[pipeline]") {
  const std::vector<StageCost> costs = {{1, 2, 1}, {2, 4, 2}, {1, 1, 1}};
  // It never waits: to its 10 x (2 + 4) comes what the first stage does before its first and after its last pass.
  CHECK(simulate(one_forward_one_backward(3, 10), costs).makespan == 1 + 60 + 2);
}

TEST_CASE("a step is no shorter than one micro-batch's way, nor than all of a stage's work", "[pipeline]") {
  std::mt19937 random(3);
  for (int repeat = 0; repeat < 50; ++repeat) {
    const int p = 1 + static_cast<int>(random() % 5), m = 1 + static_cast<int>(random() % 9);
    std::vector<StageCost> costs;
    double way = 0.0, least = 0.0;
    for (int stage = 0; stage < p; ++stage) {
      costs.push_back(
          {.forward = 1.0 + static_cast<double>(random() % 5), .backward = 1.0 + static_cast<double>(random() % 9)});
      const double pass = costs.back().forward + costs.back().backward;
      // Before its first and after its last pass the stages before it are at work; those behind work meanwhile.
      least = std::max(least, way + m * pass);
      way += pass;
    }
    least = std::max(least, way);
    INFO(p << " stages, " << m << " micro-batches");
    CHECK(simulate(one_forward_one_backward(p, m), costs).makespan >= least);
    CHECK(simulate(fill_drain(p, m, Checkpoint::never), costs).makespan >= least);
  }
  // The bound is met: nothing but the slow first stage is waited for.
  CHECK(simulate(one_forward_one_backward(2, 2), {{10, 10, 0}, {1, 1, 0}}).makespan == 40);
}

TEST_CASE("forward passes go by torchgpipe's clock cycles", "[pipeline]") {
  CHECK(clock_cycles(1, 1) == std::vector<Tasks>{{{0, 0}}});
  CHECK(clock_cycles(3, 1) == std::vector<Tasks>{{{0, 0}}, {{0, 1}}, {{0, 2}}});
  CHECK(clock_cycles(1, 3) == std::vector<Tasks>{{{0, 0}}, {{1, 0}}, {{2, 0}}});
  CHECK(clock_cycles(3, 3) ==
        std::vector<Tasks>{{{0, 0}}, {{1, 0}, {0, 1}}, {{2, 0}, {1, 1}, {0, 2}}, {{2, 1}, {1, 2}}, {{2, 2}}});
  CHECK(clock_cycles(2, 4) ==
        std::vector<Tasks>{{{0, 0}}, {{1, 0}, {0, 1}}, {{2, 0}, {1, 1}}, {{3, 0}, {2, 1}}, {{3, 1}}});
  for (int p : {1, 2, 4, 7}) {
    for (int m : {1, 3, 8}) {
      std::vector<Tasks> expected(static_cast<std::size_t>(m + p - 1));
      for (int clock = 0; clock < m + p - 1; ++clock) {
        for (int stage = std::max(1 + clock - m, 0); stage < std::min(1 + clock, p); ++stage) {
          expected[static_cast<std::size_t>(clock)].insert({clock - stage, stage});
        }
      }
      CHECK(clock_cycles(p, m) == expected);
    }
  }
}

TEST_CASE("a message takes its time", "[pipeline]") {
  std::vector<StageCost> costs(2);
  costs[0].transfer = 0.5;
  const Timeline timeline = simulate(fill_drain(2, 1, Checkpoint::never), costs);
  CHECK(timeline.makespan == 1 + 0.5 + 1 + 2 + 0.5 + 2);
}

TEST_CASE("a schedule is drawn to scale", "[pipeline]") {
  const Schedule schedule = fill_drain(2, 2, Checkpoint::except_last);
  const std::vector<std::string> lines = draw(schedule, simulated(schedule));
  CHECK(lines == std::vector<std::string>{"F0-F1-.........B1----R0-B0----",  //
                                          "...F0-F1-B1----R0-B0----......"});
  CHECK(draw(schedule, simulated(schedule), 10) == std::vector<std::string>{"FF...B1RB0", ".FFB1RB0.."});
}
