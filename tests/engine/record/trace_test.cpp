#include "engine/record/trace.h"

#include <nlohmann/json.hpp>

#include "engine/record/recorder.h"
#include "tests/support/catch.h"
#include "tests/support/virtual_device.h"

using namespace pdl;
using namespace pdl::testing;
using nlohmann::json;

namespace {

/// The events of one kind: "X" spans, "C" counters, "M" names.
std::vector<json> events_of(const json& file, const std::string& kind) {
  std::vector<json> found;
  for (const json& event : file["traceEvents"]) {
    if (event["ph"] == kind) found.push_back(event);
  }
  return found;
}

json parsed(const Trace& trace, double zero_s = 0.0) {
  return json::parse(trace_file({trace.events(0, "rank 0", zero_s)}));
}

}  // namespace

TEST_CASE("a file of two ranks has a process for each, and a named thread for each row") {
  Trace first, second;
  first.span(Trace::Row::steps, "step \"0\"", 10.0, 10.5);
  first.activity({"kernel<float>", 7, 10.25, 10.375, 0});
  first.activity({"copy from the host", 7, 10.375, 10.4375, 4096});
  second.span(Trace::Row::waits, "dp.all_reduce", 12.0, 12.25);
  const json file =
      json::parse(trace_file({first.events(0, "rank 0 (a)", 10.0), second.events(1, "rank 1 (b)", 12.0)}));
  CHECK(file["displayTimeUnit"] == "ms");
  const std::vector<json> spans = events_of(file, "X");
  REQUIRE(spans.size() == 4);
  CHECK(spans[0]["name"] == "step \"0\"");
  CHECK(spans[0]["ts"] == 0.0);
  CHECK(spans[0]["dur"] == 0.5e6);
  CHECK(spans[1]["ts"] == 0.25e6);
  CHECK(spans[1]["tid"] == 107);
  CHECK_FALSE(spans[1].contains("args"));
  CHECK(spans[2]["args"]["bytes"] == 4096);
  CHECK(spans[3]["pid"] == 1);
  CHECK(spans[3]["ts"] == 0.0);
  std::map<std::string, std::string> names;
  for (const json& name : events_of(file, "M")) {
    if (name["args"].contains("name")) {
      names[name["name"].get<std::string>() + name["pid"].dump() + name["tid"].dump()] = name["args"]["name"];
    }
  }
  CHECK(names == std::map<std::string, std::string>{{"process_name00", "rank 0 (a)"},
                                                    {"process_name10", "rank 1 (b)"},
                                                    {"thread_name00", "steps and phases"},
                                                    {"thread_name0107", "stream 7"},
                                                    {"thread_name12", "waiting for communication"}});
}

TEST_CASE("no traces make a file without events") {
  CHECK(json::parse(trace_file({Trace().events(0, "rank 0", 0.0)}))["traceEvents"].size() == 2);  // the process's name
}

TEST_CASE("spans that touch still touch after rounding, and what is outside comes first") {
  Trace trace;
  // Odd fractions of a nanosecond: rounded one by one, beginnings and lengths would not add up.
  const double begin_s = 1000.00000000049, middle_s = 1000.00000001151, end_s = 1000.00000002249;
  trace.span(Trace::Row::steps, "forward", begin_s, middle_s);
  trace.span(Trace::Row::steps, "backward", middle_s, end_s);
  trace.span(Trace::Row::steps, "step", begin_s, end_s);
  const std::vector<json> spans = events_of(parsed(trace, 1000.0), "X");
  REQUIRE(spans.size() == 3);
  CHECK(spans[0]["name"] == "step");
  const auto nanoseconds = [](const json& time) { return std::llround(time.get<double>() * 1000.0); };
  CHECK(nanoseconds(spans[1]["ts"]) + nanoseconds(spans[1]["dur"]) == nanoseconds(spans[2]["ts"]));
  CHECK(nanoseconds(spans[2]["ts"]) + nanoseconds(spans[2]["dur"]) ==
        nanoseconds(spans[0]["ts"]) + nanoseconds(spans[0]["dur"]));
}

TEST_CASE("memory is a counter by kind") {
  Trace trace;
  MemoryByKind held;
  held[MemoryKind::gradients] = 4096;
  trace.memory(2.0, held);
  const std::vector<json> counters = events_of(parsed(trace), "C");
  REQUIRE(counters.size() == 1);
  CHECK(counters[0]["ts"] == 2e6);
  CHECK(counters[0]["args"].size() == kMemoryKinds);
  CHECK(counters[0]["args"]["gradients"] == 4096);
}

TEST_CASE("the phase clock draws the steps during which the trace records") {
  VirtualDevice device;
  PhaseClock clock(0, device.make_stopwatch());
  Trace trace;
  clock.trace_to(&trace);
  clock.anchor();
  clock.epoch_begin();
  const auto pass = [&device](double seconds) { device.compute_stream().now_s += seconds; };
  for (int step = 0; step < 4; ++step) {
    if (step == 1) trace.record(true);
    clock.step_begin();
    pass(0.125);
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      clock.task_begin({TaskKind::micro_batch, micro_batch});
      clock.phase(Phase::forward);
      pass(1.0);
      clock.phase(Phase::backward);
      pass(2.0);
      clock.task_end();
    }
    clock.phase(Phase::optimizer);
    pass(0.5);
    clock.step_end({.step = step});
    if (step == 2) trace.record(false);
    pass(0.25);  // between steps
  }
  const RankEpoch epoch = clock.epoch_end();
  CHECK(epoch.step_ms == std::vector<double>(4, 6625.0));
  CHECK(epoch.phase(Phase::forward) == 8.0);  // tasks cut no phase short

  // Steps 1 and 2: 6.875 s to 13.5 s, 13.75 s to 20.375 s on the compute stream.
  std::vector<json> steps, phases, tasks;
  for (const json& span : events_of(parsed(trace, 1000.0), "X")) {
    const bool is_step = span["name"].get<std::string>().starts_with("step");
    (span["tid"] == static_cast<int>(Trace::Row::schedule) ? tasks : is_step ? steps : phases).push_back(span);
  }
  REQUIRE(steps.size() == 2);
  CHECK(steps[0]["name"] == "step 1");
  CHECK(steps[0]["ts"] == 6.875e6);
  CHECK(steps[1]["ts"] == 13.75e6);
  CHECK(steps[1]["dur"] == 6.625e6);
  REQUIRE(phases.size() == 2 * 6 + 1);
  const std::vector<std::string> names = {"other", "forward", "backward", "forward", "backward", "optimizer", "other"};
  for (std::size_t i = 0; i < names.size(); ++i) CHECK(phases[i]["name"] == names[i]);
  CHECK(phases[6]["ts"] == 13.5e6);  // from step to step
  double within = 0.0;
  for (std::size_t i = 0; i < 6; ++i) within += phases[i]["dur"].get<double>();
  CHECK(within == steps[0]["dur"].get<double>());
  REQUIRE(tasks.size() == 4);
  CHECK(tasks[1]["name"] == "micro-batch 1");
  CHECK(tasks[1]["ts"] == 10e6);
  CHECK(tasks[1]["dur"] == 3e6);
}

TEST_CASE("without a trace and a pipeline tasks and waits cost no mark") {
  VirtualDevice device;
  PhaseClock clock(0, device.make_stopwatch());
  clock.epoch_begin();
  clock.step_begin();
  const int before = device.reads->count;
  for (int i = 0; i < 5000; ++i) {
    clock.task_begin({TaskKind::micro_batch, i});
    clock.task_end();
    clock.wait_begin();
    clock.wait_end(true);
  }
  clock.step_end({});
  clock.epoch_end();
  CHECK(device.reads->count == before + 3);  // the step's two ends and the epoch's
}
