#include "engine/record/recorder.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "engine/base/error.h"
#include "tests/engine/record/hand_clock.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// A device that falls behind the host as far as a test lets it. It knows no more marks than it has to.
class LateWatch final : public Stopwatch {
 public:
  std::int64_t mark() override {
    times_.push_back(0.25 * static_cast<double>(times_.size()));
    return static_cast<std::int64_t>(times_.size()) - 1;
  }
  double seconds(std::int64_t from, std::int64_t to) override {
    REQUIRE(from <= to);
    REQUIRE(from >= static_cast<std::int64_t>(times_.size()) - kRemembered);
    latest_read = std::max(latest_read, to);
    return times_.at(static_cast<std::size_t>(to)) - times_.at(static_cast<std::size_t>(from));
  }
  void anchor() override { anchored = true; }
  double host_s(std::int64_t mark) override {
    REQUIRE(anchored);
    return 5000.0 + times_.at(static_cast<std::size_t>(mark));
  }
  std::int64_t marks() const { return static_cast<std::int64_t>(times_.size()); }
  bool anchored = false;
  std::int64_t latest_read = -1;

 private:
  std::vector<double> times_;
};

RankEpoch sample_rank(double scale) {
  RankEpoch epoch;
  epoch.train_s = 10.0 * scale;
  epoch.eval_s = 1.0 * scale;
  epoch.phase_s = {0.5 * scale, 3.0 * scale, 5.0 * scale, 0.25 * scale, 0.75 * scale, 0.5 * scale};
  epoch.step_ms = {900.0, 100.0 * scale, 120.0 * scale, 110.0};
  epoch.step_exposed_ms = {500.0, 10.0 * scale, 15.0 * scale, 12.0};
  epoch.warmup_steps = 1;
  epoch.counted_samples = 96;
  epoch.memory_peak.bytes = {1, 2, 3, 4, 5, 6, 7};
  epoch.memory_predicted.bytes = {10, 20, 30, 40, 50, 60, static_cast<std::int64_t>(70 * scale)};
  epoch.memory_peak_total = 9007199254740991;  // the largest count that a double holds exactly
  epoch.device_memory_used = static_cast<std::int64_t>(1000 * scale);
  epoch.library_bytes = static_cast<std::int64_t>(200 * scale);
  epoch.data_store = static_cast<std::int64_t>(50 * scale);
  epoch.staleness = {.stage = scale > 1.0 ? 1 : 0,
                     .updates = 8,
                     .samples_per_update = 4.0,
                     .updates_behind = {1, 7},
                     .versions = 2,
                     .weight_drift = 0.25};
  epoch.comm["dp.all_reduce"] = {4, 1024, 0.5 * scale, 0.125 * scale};
  return epoch;
}

PipelineRankRecord sample_pipeline_rank(double train_s) {
  return {.train_s = train_s,
          .forward_s = 2.0,
          .backward_s = 3.0,
          .recompute_s = 1.0,
          .wait_s = {0.25, 0.5, 0.75},
          .comm_passes_s = 0.0625,
          .comm_s = 0.375,
          .optimizer_s = 0.8125,
          .other_s = 1.25,
          .passes = {{.forward = {4, 2.0}, .recompute = {3, 1.0}, .backward = {4, 3.0}}, {.loss = {6, 0.125}}}};
}

}  // namespace

TEST_CASE("the phases of an epoch add up to its training time") {
  HandClock time;
  PhaseClock clock(1, time.reader());
  clock.epoch_begin();
  time.now += 0.5;  // before the first step: other
  for (int step = 0; step < 3; ++step) {
    clock.step_begin();
    clock.phase(Phase::data);
    time.now += 0.125;
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      clock.phase(Phase::forward);
      time.now += 0.25;
      clock.phase(Phase::backward);
      time.now += 0.5;
    }
    clock.phase(Phase::communication);
    time.now += 0.0625;
    clock.phase(Phase::optimizer);
    time.now += step == 0 ? 8.0 : 0.03125;
    clock.step_end(step_of(step == 2 ? 8 : 32));
  }
  time.now += 0.25;
  const RankEpoch epoch = clock.epoch_end();
  CHECK(epoch.phase(Phase::data) == 0.375);
  CHECK(epoch.phase(Phase::forward) == 1.5);
  CHECK(epoch.phase(Phase::backward) == 3.0);
  CHECK(epoch.phase(Phase::communication) == 0.1875);
  CHECK(epoch.phase(Phase::optimizer) == 8.0625);
  CHECK(epoch.phase(Phase::other) == 0.75);
  double sum = 0.0;
  for (const double seconds : epoch.phase_s) sum += seconds;
  CHECK(sum == epoch.train_s);
  CHECK(epoch.step_ms == std::vector<double>{9687.5, 1718.75, 1718.75});
  CHECK(epoch.warmup_steps == 1);
  CHECK(epoch.counted_samples == 40);
  CHECK(clock.last_step().samples == 8);
}

TEST_CASE("warm-up is counted over epochs, and leaves each epoch a step") {
  HandClock time;
  PhaseClock clock(3, time.reader());
  const auto epoch_of = [&](int steps) {
    clock.epoch_begin();
    for (int step = 0; step < steps; ++step) {
      clock.step_begin();
      time.now += 1.0;
      clock.step_end(step_of(10));
    }
    return clock.epoch_end();
  };
  CHECK(epoch_of(2).warmup_steps == 1);
  CHECK(epoch_of(5).warmup_steps == 2);
  const RankEpoch third = epoch_of(5);
  CHECK(third.warmup_steps == 0);
  CHECK(third.counted_samples == 50);
  CHECK(epoch_of(0).warmup_steps == 0);
}

TEST_CASE("steps that overlap last from one end to the next") {
  HandClock time;
  PhaseClock clock(0, time.reader());
  clock.epoch_begin();
  clock.step_begin();  // step 0 at 100
  time.now += 1.0;
  clock.step_begin();  // step 1 enters the pipeline
  time.now += 1.0;
  clock.step_end(step_of(1));
  time.now += 0.5;
  clock.step_begin();  // step 2
  time.now += 1.0;
  clock.step_end(step_of(1));
  time.now += 1.25;
  clock.step_end(step_of(1));
  CHECK(clock.epoch_end().step_ms == std::vector<double>{2000.0, 1500.0, 1250.0});
}

TEST_CASE("steps whose reports come late last until they are done") {
  HandClock time;
  PhaseClock clock(1, time.reader());
  clock.epoch_begin();
  for (std::int64_t step = 0; step < 3; ++step) {
    clock.step_begin();
    time.now += 1.0 + 0.25 * static_cast<double>(step);
    clock.step_done(step);
    if (step == 1) clock.step_end(step_of(5));
  }
  time.now += 8.0;
  clock.step_end(step_of(6));
  clock.step_end(step_of(7));
  const RankEpoch epoch = clock.epoch_end();
  CHECK(epoch.step_ms == std::vector<double>{1000.0, 1250.0, 1500.0});
  CHECK(epoch.counted_samples == 13);
  CHECK(epoch.train_s == 11.75);
}

TEST_CASE("times are read long after they were marked, and none is lost in a long epoch") {
  auto owned = std::make_unique<LateWatch>();
  const LateWatch& watch = *owned;
  PhaseClock clock(0, std::move(owned));
  clock.epoch_begin();
  constexpr int kSteps = 700;
  for (int step = 0; step < kSteps; ++step) {
    clock.step_begin();
    const int micro_batches = step == 300 ? 5000 : 3;  // more marks within a step than a stopwatch remembers
    for (int i = 0; i < micro_batches; ++i) {
      clock.phase(Phase::forward);
      clock.phase(Phase::backward);
    }
    clock.step_end(step_of(1));
    CHECK(watch.latest_read < std::max<std::int64_t>(0, watch.marks() - 1000));
  }
  const RankEpoch epoch = clock.epoch_end();
  CHECK(watch.latest_read == watch.marks() - 1);
  REQUIRE(epoch.step_ms.size() == kSteps);
  CHECK(epoch.step_ms[299] == 7 * 250.0);
  CHECK(epoch.step_ms[300] == 10001 * 250.0);
  CHECK(epoch.step_ms[301] == 7 * 250.0);
  CHECK(epoch.phase(Phase::backward) == 0.25 * (699 * 3 + 5000));
  CHECK(epoch.train_s == 0.25 * static_cast<double>(watch.marks() - 1));
}

TEST_CASE("an encoded epoch decodes to itself, padding or not") {
  RankEpoch epoch = sample_rank(1.5);
  epoch.pipeline = sample_pipeline_rank(epoch.train_s);
  epoch.comm["tp.all_gather"] = {1, 1234567890123, 0.25, std::numeric_limits<double>::infinity()};
  std::vector<double> numbers = encode(epoch);
  numbers.resize(numbers.size() + 17, 0.0);
  const RankEpoch back = decode(numbers);
  CHECK(back.train_s == epoch.train_s);
  CHECK(back.eval_s == epoch.eval_s);
  CHECK(back.phase_s == epoch.phase_s);
  CHECK(back.step_ms == epoch.step_ms);
  CHECK(back.step_exposed_ms == epoch.step_exposed_ms);
  CHECK(back.warmup_steps == 1);
  CHECK(back.counted_samples == 96);
  CHECK(back.memory_peak.bytes == epoch.memory_peak.bytes);
  CHECK(back.memory_predicted.bytes == epoch.memory_predicted.bytes);
  CHECK(back.memory_peak_total == epoch.memory_peak_total);
  CHECK(back.device_memory_used == 1500);
  CHECK(back.library_bytes == 300);
  CHECK(back.data_store == 75);
  REQUIRE(back.staleness.has_value());
  CHECK(back.staleness->updates_behind == std::vector<std::int64_t>{1, 7});
  CHECK(back.staleness->weight_drift == 0.25);
  REQUIRE(back.pipeline.has_value());
  CHECK(back.pipeline->train_s == epoch.train_s);
  CHECK(back.pipeline->wait_s == epoch.pipeline->wait_s);
  CHECK(back.pipeline->other_s == 1.25);
  REQUIRE(back.pipeline->passes.size() == 2);
  CHECK(back.pipeline->passes[1].loss.count == 6);
  CHECK(back.pipeline->passes[1].loss.s == 0.125);
  REQUIRE(back.comm.size() == 2);
  CHECK(back.comm.at("tp.all_gather").bytes == 1234567890123);
  CHECK(back.comm.at("dp.all_reduce").calls == 4);

  const std::vector<double> again = encode(back);
  numbers.resize(again.size());
  CHECK(again == numbers);
}

TEST_CASE("numbers that are no epoch are refused") {
  std::vector<double> numbers = encode(sample_rank(1.0));
  CHECK_THROWS_AS(decode(std::vector<double>(numbers.begin(), numbers.end() - 3)), Error);
  CHECK_THROWS_AS(decode(std::vector<double>{}), Error);
  numbers[0] = 0.0;
  CHECK_THROWS_AS(decode(numbers), Error);
}

TEST_CASE("ranks merge into spreads, and a step lasts as long as on its slowest rank") {
  RankEpoch last = sample_rank(3.0);
  last.comm["pp.recv"] = {8, 0, 2.0, 1.5};
  const std::vector<RankEpoch> ranks = {sample_rank(1.0), sample_rank(2.0), last};
  EpochFacts facts;
  facts.epoch = 4;
  facts.steps = facts.full_steps = 4;
  facts.samples = 128;
  facts.tokens = 128 * 64;
  facts.step_samples = 32;
  facts.flops_per_sample = 1e9;
  facts.loss_scale = 4096.0;
  facts.skipped_steps = 2;
  const EpochRecord record = merge(ranks, facts);

  CHECK(slowest_step_ms(ranks) == std::vector<double>{900.0, 300.0, 360.0, 110.0});
  CHECK(mean_exposed_ms(ranks) == std::vector<double>{500.0, 20.0, 30.0, 12.0});
  CHECK(record.comm_exposed_step_ms == 20.0);  // without the first step, which is warm-up
  CHECK(record.step_ms.median == 300.0);
  CHECK(record.step_ms.max == 360.0);
  CHECK(record.step_ms.min == 110.0);
  CHECK(record.samples_per_s == Approx(96 / 0.77));
  CHECK(record.tokens_per_s == Approx(64 * 96 / 0.77));
  CHECK(record.samples_per_s_median == Approx(32 / 0.3));
  CHECK(record.tokens_per_s_median == Approx(64 * 32 / 0.3));
  CHECK(record.flops_per_s == Approx(1e9 * 96 / 0.77));
  CHECK(record.train_s.min == 10.0);
  CHECK(record.train_s.mean == 20.0);
  CHECK(record.train_s.max == 30.0);
  CHECK(record.eval_s == 3.0);
  CHECK(record.epoch_s == 33.0);
  CHECK_FALSE(record.extrapolated);
  CHECK(record.data_s.max == 1.5);
  CHECK(record.backward_s.mean == 10.0);
  CHECK(record.comm_exposed_s.min == 0.125);
  CHECK(record.comm_exposed_s.max == 0.375 + 1.5);
  CHECK(record.bubble_fraction == Approx(0.5 / 20.0));
  CHECK(record.comm.at("dp.all_reduce").calls == 4);
  CHECK(record.comm.at("dp.all_reduce").bytes == 1024);
  CHECK(record.comm.at("dp.all_reduce").busy_s == Approx(1.0));
  CHECK(record.comm.at("pp.recv").exposed_s == Approx(0.5));
  CHECK(record.memory_predicted_bytes.total() == 210 + 210);
  CHECK(record.device_memory_used_bytes == 3000);
  CHECK(record.library_bytes == 600);
  CHECK(record.loss_scale == 4096.0);
  CHECK(record.skipped_steps == 2);
  REQUIRE(record.staleness.size() == 2);
  CHECK(record.staleness[1].stage == 1);
  REQUIRE(record.data_store_bytes.has_value());
  CHECK(record.data_store_bytes->mean == 100.0);
  CHECK(record.memory_peak_bytes[6].max == 7.0);
}

TEST_CASE("flops become shares of what is known about the devices, by named formulas") {
  EpochFacts facts;
  facts.flops_per_sample = 1e9;
  const std::vector<RankEpoch> ranks = {sample_rank(1.0)};
  const double samples_per_s = 96 / 0.33;
  EpochRecord record = merge(ranks, facts);
  CHECK_FALSE(record.mfu.has_value());
  CHECK_FALSE(record.of_gemm.has_value());

  facts.gemm_flops_per_s = 4e12;
  facts.palm_flops_per_sample = 1.25e9;
  facts.recomputed_flops_per_sample = 0.5e9;
  record = merge(ranks, facts);
  CHECK(record.of_gemm.value() == Approx(1e9 * samples_per_s / 4e12));
  CHECK_FALSE(record.mfu_palm.has_value());  // a share of a peak that is not known

  facts.peak_flops_per_s = 5e12;
  record = merge(ranks, facts);
  CHECK(record.mfu.value() == Approx(1e9 * samples_per_s / 5e12));
  CHECK(record.mfu_palm.value() == Approx(1.25e9 * samples_per_s / 5e12));
  CHECK(record.hfu.value() == Approx(1.5e9 * samples_per_s / 5e12));

  facts.palm_flops_per_sample.reset();
  facts.recomputed_flops_per_sample.reset();
  record = merge(ranks, facts);
  CHECK(record.mfu.has_value());
  CHECK_FALSE(record.mfu_palm.has_value());
  CHECK_FALSE(record.hfu.has_value());
}

TEST_CASE("a rank that did not measure its exposed communication leaves none") {
  RankEpoch unmeasured = sample_rank(1.0);
  unmeasured.step_exposed_ms.clear();
  CHECK(mean_exposed_ms({sample_rank(1.0), unmeasured}).empty());
  CHECK_FALSE(merge({sample_rank(1.0), unmeasured}, EpochFacts{}).comm_exposed_step_ms.has_value());
}

TEST_CASE("part of an epoch is extrapolated from the steps that count") {
  EpochFacts facts;
  facts.steps = 4;
  facts.full_steps = 30;
  facts.samples = 128;
  facts.eval_steps = 2;
  facts.full_eval_steps = 10;
  const EpochRecord record = merge({sample_rank(1.0)}, facts);
  CHECK(record.extrapolated);
  CHECK(record.train_s.max == 10.0);
  CHECK(record.epoch_s == Approx(30 * 0.110 + 5.0));
  CHECK(record.tokens_per_s == 0.0);
}

TEST_CASE("without counted communication the phase stands in") {
  RankEpoch alone = sample_rank(1.0);
  alone.comm.clear();
  CHECK(merge({alone}, EpochFacts{}).comm_exposed_s.max == 0.25);
}

TEST_CASE("waiting for samples is no waiting for training traffic") {
  RankEpoch rank = sample_rank(1.0);
  rank.comm["data_store.recv"] = {4, 0, 2.0, 1.0};
  CHECK(merge({rank}, EpochFacts{}).comm_exposed_s.max == 0.125);
  rank.comm.erase("dp.all_reduce");
  CHECK(merge({rank}, EpochFacts{}).comm_exposed_s.max == 0.25);  // the phase: nothing but samples was counted
  rank.data_store = 0;
  CHECK_FALSE(merge({rank}, EpochFacts{}).data_store_bytes.has_value());
}
