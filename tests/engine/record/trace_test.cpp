#include "engine/record/trace.h"

#include <nlohmann/json.hpp>

#include "tests/support/catch.h"

using namespace pdl;
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
