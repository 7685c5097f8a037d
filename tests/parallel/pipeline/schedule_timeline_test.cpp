// Simulated times against closed forms, and the picture.

#include "parallel/pipeline/schedule_timeline.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// Alike on all stages: forward 1, recomputation 1, backward 2.
std::vector<StageCost> even(const Schedule& schedule) {
  return std::vector<StageCost>(static_cast<std::size_t>(schedule.virtual_stages()));
}

Timeline simulated(const Schedule& schedule) { return simulate(schedule, even(schedule)); }

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
