// Idle fractions of whole epochs: the formulas against the simulator, and the simulator with what was measured.

#include "parallel/pipeline/pipeline_forecast.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// All passes alike and nothing else, by simulation.
double simulated_idle(const std::vector<ScheduleRun>& runs) {
  double seconds = 0.0, computing = 0.0;
  for (const ScheduleRun& run : runs) {
    const StageCost even{.forward = 1.0, .backward = 2.0, .recompute = 0.0};
    const Timeline timeline =
        simulate(run.schedule, std::vector<StageCost>(static_cast<std::size_t>(run.schedule.virtual_stages()), even));
    seconds += static_cast<double>(run.times) * timeline.makespan;
    computing += static_cast<double>(run.times) * timeline.computing;
  }
  return 1.0 - computing / seconds;
}

double closed_form(const std::vector<ScheduleRun>& runs) { return closed_form_idle_fraction(runs).value(); }

PipelineRankRecord rank_of(int stage, double optimizer_s, std::vector<StagePasses> passes) {
  PipelineRankRecord rank;
  rank.stage = stage;
  rank.optimizer_s = optimizer_s;
  rank.passes = std::move(passes);
  return rank;
}

}  // namespace

TEST_CASE("idle fractions by formula", "[pipeline]") {
  CHECK(closed_form({{one_forward_one_backward(4, 8)}}) == Approx(3.0 / 11.0));
  CHECK(closed_form({{fill_drain(4, 4, Checkpoint::always)}}) == Approx(3.0 / 7.0));  // recomputation left out
  CHECK(closed_form({{interleaved(4, 8, 3)}}) == Approx(3.0 / 27.0));
  CHECK(closed_form({{continuous({1, 1, 1, 1}, 20)}}) == Approx(3.0 / 23.0));
  CHECK(closed_form({{.schedule = flushed(4, 8, 5), .fills = 5}}) == Approx(3.0 / 11.0));
  CHECK(closed_form({{one_forward_one_backward(2, 8), 10}, {one_forward_one_backward(2, 3), 1}}) ==
        Approx(11.0 / 94.0));
  CHECK_FALSE(closed_form_idle_fraction({{continuous({3, 1}, 12)}}).has_value());
  CHECK_FALSE(closed_form_idle_fraction({{interleaved(2, 5, 2, 3)}}).has_value());
  CHECK_FALSE(closed_form_idle_fraction({}).has_value());
}

TEST_CASE("the formulas are what the simulator finds with equal passes", "[pipeline]") {
  for (const int p : {2, 3, 4}) {
    for (const int m : {1, 2, 4, 12}) {
      const auto agrees = [](const ScheduleRun& run) {
        return closed_form({run, {run.schedule, 3, run.fills}}) == Approx(simulated_idle({run})).margin(1e-12);
      };
      CAPTURE(p, m);
      CHECK(agrees({one_forward_one_backward(p, m)}));
      CHECK(agrees({fill_drain(p, m, Checkpoint::never)}));
      CHECK(agrees({continuous(std::vector<int>(static_cast<std::size_t>(p), 1), m)}));
      CHECK(agrees({.schedule = flushed(p, m, 3), .fills = 3}));
      if (m + 1 >= p) CHECK(agrees({double_buffered(p, m, 3)}));
      for (const int chunks : {2, 3}) {
        if (m % p == 0) CHECK(agrees({interleaved(p, m, chunks)}));
        if (m == 12) CHECK(agrees({interleaved(p, m, chunks, 6)}));
      }
    }
  }
}

TEST_CASE("costs are means over a stage's ranks, updates over their number", "[pipeline]") {
  // Two stages, of two replicas and one; 4 mini-batches: two updates on a replica, four on the last stage.
  const std::vector<ScheduleRun> runs = {{continuous({2, 1}, 4)}};
  const std::vector<StageCost> costs =
      mean_stage_costs(runs, {rank_of(0, 1.0, {{.forward = {2, 4.0}, .backward = {2, 6.0}}}),
                              rank_of(0, 3.0, {{.forward = {2, 8.0}, .recompute = {1, 0.5}, .backward = {2, 10.0}}}),
                              rank_of(1, 2.0, {{.forward = {4, 2.0}, .backward = {4, 5.0}, .loss = {4, 1.0}}})});
  REQUIRE(costs.size() == 2);
  CHECK(costs[0].forward == 3.0);
  CHECK(costs[0].backward == 4.0);
  CHECK(costs[0].recompute == 0.5);
  CHECK(costs[0].update == 1.0);  // 4 s in 2 + 2 updates
  CHECK(costs[1].forward == 0.5);
  CHECK(costs[1].backward == 1.25);
  CHECK(costs[1].loss == 0.25);
  CHECK(costs[1].update == 0.5);
}

TEST_CASE("each chunk of a rank has costs of its own, and the update belongs to the first", "[pipeline]") {
  const std::vector<StageCost> costs = mean_stage_costs(
      {{interleaved(2, 2, 2), 5}}, {rank_of(0, 10.0, {{.forward = {10, 10.0}}, {.forward = {10, 20.0}}}),
                                    rank_of(1, 5.0, {{.forward = {10, 30.0}}, {.forward = {10, 40.0}}})});
  REQUIRE(costs.size() == 4);
  CHECK(costs[0].forward == 1.0);
  CHECK(costs[1].forward == 3.0);
  CHECK(costs[2].forward == 2.0);
  CHECK(costs[3].forward == 4.0);
  CHECK(costs[0].update == 2.0);  // 10 s in 5 steps
  CHECK(costs[1].update == 1.0);
  CHECK(costs[2].update == 0.0);
}

TEST_CASE("updates and losses that are computed apart take their time", "[pipeline]") {
  // One micro-batch, two stages. Forward 1 on each, loss 0.5 and backward 2 on the last, backward 2 on the first, and
  // each updates when it is through: 1 + 1 + 0.5 + 2 + 2 + 4.
  const std::vector<StageCost> costs = {{.update = 4.0}, {.loss = 0.5, .update = 1.0}};
  const Timeline timeline = simulate(fill_drain(2, 1, Checkpoint::never, true), costs);
  CHECK(timeline.makespan == 10.5);
  CHECK(timeline.computing == (1.0 + 2.0 + 4.0 + 1.0 + 0.5 + 2.0 + 1.0) / 2.0);
  CHECK(timeline.useful == (1.0 + 2.0 + 1.0 + 0.5 + 2.0) / 2.0);
}
