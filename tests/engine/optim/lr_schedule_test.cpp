#include "engine/optim/lr_schedule.h"

#include <cmath>
#include <numbers>
#include <vector>

#include "tests/support/catch.h"

using namespace pdl;

namespace {

std::vector<double> rates(const LrSchedule& schedule, std::int64_t count) {
  std::vector<double> all;
  for (std::int64_t update = 0; update < count; ++update) all.push_back(schedule.at(update));
  return all;
}

void check_rates(const LrSchedule& schedule, const std::vector<double>& expected) {
  const std::vector<double> found = rates(schedule, static_cast<std::int64_t>(expected.size()));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    INFO("update " << i);
    CHECK(found[i] == Approx(expected[i]).epsilon(1e-14).margin(1e-17));
  }
}

LrScheduleOptions read(const std::string& json) {
  const ConfigDocument document = ConfigDocument::parse(json, "run.json");
  const LrScheduleOptions options = read_lr_schedule_options(document.root());
  document.finish();
  return options;
}

}  // namespace

TEST_CASE("a constant rate warms up linearly") {
  check_rates(LrSchedule({}, 0.3, 5, 10), {0.3, 0.3, 0.3});
  check_rates(LrSchedule({.warmup_steps = 4}, 0.8, 5, 10), {0.2, 0.4, 0.6, 0.8, 0.8, 0.8});
  check_rates(LrSchedule({.warmup_steps = 1}, 0.8, 5, 10), {0.8, 0.8});
}

TEST_CASE("a stepped rate falls at epochs") {
  const LrScheduleOptions options = {.name = "step", .warmup_steps = 2, .step_epochs = 2, .gamma = 0.5};
  check_rates(LrSchedule(options, 0.8, 3, 15),
              {0.4, 0.8, 0.8, 0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.2, 0.2, 0.2});
  // The study's rule: a tenth every 30 epochs.
  const LrSchedule study({.name = "step"}, 0.01, 5005, 90 * 5005);
  CHECK(study.at(30 * 5005 - 1) == 0.01);
  CHECK(study.at(30 * 5005) == Approx(0.001));
  CHECK(study.at(60 * 5005) == Approx(0.0001));
}

TEST_CASE("a cosine falls from the end of the warm-up to the last update") {
  check_rates(LrSchedule({.name = "cosine", .min_lr = 0.2}, 1.0, 5, 5),
              {1.0, 0.2 + 0.4 * (1.0 + std::sqrt(0.5)), 0.6, 0.2 + 0.4 * (1.0 - std::sqrt(0.5)), 0.2, 0.2, 0.2});
  check_rates(LrSchedule({.name = "cosine", .warmup_steps = 3}, 0.9, 5, 7),
              {0.3, 0.6, 0.9, 0.45 * (1.0 + std::sqrt(0.5)), 0.45, 0.45 * (1.0 - std::sqrt(0.5)), 0.0});
}

TEST_CASE("a linear rate falls from the end of the warm-up to the last update") {
  check_rates(LrSchedule({.name = "linear", .min_lr = 0.1}, 0.5, 5, 5), {0.5, 0.4, 0.3, 0.2, 0.1, 0.1});
  check_rates(LrSchedule({.name = "linear", .warmup_steps = 2}, 0.4, 5, 6), {0.2, 0.4, 0.3, 0.2, 0.1, 0.0});
}

TEST_CASE("runs shorter than their schedule have rates all the same") {
  for (const char* name : {"constant", "step", "cosine", "linear"}) {
    INFO(name);
    LrScheduleOptions options;
    options.name = name;
    CHECK(LrSchedule(options, 0.5, 0, 0).at(0) == 0.5);
    CHECK(LrSchedule(options, 0.5, 1, 1).at(0) == 0.5);
    options.warmup_steps = 10;
    CHECK(LrSchedule(options, 0.5, 5, 5).at(4) == 0.25);
    CHECK(LrSchedule(options, 0.5, 10, 10).at(9) == 0.5);
  }
}

TEST_CASE("schedule keys are read, and only those of the shape") {
  const LrScheduleOptions none = read("{}");
  CHECK(none.name == "constant");
  CHECK(none.warmup_steps == 0);
  const LrScheduleOptions step = read(R"({"name": "step", "warmup_steps": 7, "step_epochs": 20, "gamma": 0.2})");
  CHECK(step.warmup_steps == 7);
  CHECK(step.step_epochs == 20);
  CHECK(step.gamma == 0.2);
  CHECK(read(R"({"name": "step"})").step_epochs == 30);
  CHECK(read(R"({"name": "cosine", "min_lr": 1e-5})").min_lr == 1e-5);
  CHECK_THROWS_WITH(read(R"({"name": "cosine", "gamma": 0.1})"), ContainsSubstring("unknown key \"gamma\""));
  CHECK_THROWS_WITH(read(R"({"name": "step", "step_epochs": 0})"), ContainsSubstring("/step_epochs"));
  CHECK_THROWS_WITH(read(R"({"name": "cosin"})"), ContainsSubstring("did you mean \"cosine\""));
  CHECK_THROWS_WITH(read(R"({"warmup_steps": -1})"), ContainsSubstring("/warmup_steps"));
}
