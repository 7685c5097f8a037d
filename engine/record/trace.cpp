#include "engine/record/trace.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <utility>

#include "engine/base/error.h"
#include "engine/record/json_lines.h"

namespace pdl {
namespace {

constexpr const char* kRowNames[] = {"steps and phases", "schedule", "waiting for communication"};
constexpr int kFirstStreamRow = 100;

/// Whole nanoseconds since time 0: ends are rounded as beginnings are, so that rounding tears no nesting apart.
std::int64_t nanoseconds(double at_s, double zero_s) { return std::llround((at_s - zero_s) * 1e9); }

/// "12.345": the format counts in microseconds.
std::string microseconds(std::int64_t nanoseconds) {
  const std::int64_t magnitude = std::abs(nanoseconds);
  char text[40];
  std::snprintf(text, sizeof text, "%s%lld.%03lld", nanoseconds < 0 ? "-" : "",
                static_cast<long long>(magnitude / 1000), static_cast<long long>(magnitude % 1000));
  return text;
}

std::string bytes_argument(std::int64_t bytes) { return bytes == 0 ? "" : str(R"(, "args": {"bytes": )", bytes, "}"); }

/// Fields that every event starts with.
std::string head(const char* kind, const std::string& name, int rank) {
  return str(R"({"ph": ")", kind, R"(", "name": )", json_text(name), R"(, "pid": )", rank);
}

std::string metadata(const char* what, int rank, int row, const std::string& name) {
  return str(head("M", what, rank), R"(, "tid": )", row, R"(, "args": {"name": )", json_text(name), "}}");
}

std::string sort_index(const char* what, int rank, int row, int index) {
  return str(head("M", what, rank), R"(, "tid": )", row, R"(, "args": {"sort_index": )", index, "}}");
}

}  // namespace

void Trace::span(Row row, std::string name, double begin_s, double end_s) {
  spans_.push_back({static_cast<int>(row), std::move(name), begin_s, end_s, 0});
}

void Trace::operation(std::string name, double begin_s, double end_s, std::int64_t bytes) {
  operations_.push_back({0, std::move(name), begin_s, end_s, bytes});
}

void Trace::activity(const DeviceActivity& activity) {
  const int row = kFirstStreamRow + static_cast<int>(activity.stream);
  spans_.push_back({row, activity.name, activity.begin_s, activity.end_s, activity.bytes});
}

void Trace::memory(double at_s, const MemoryByKind& held) { held_.push_back({at_s, held}); }

std::string Trace::events(int rank, const std::string& title, double zero_s) const {
  std::vector<std::string> events = {metadata("process_name", rank, 0, title),
                                     sort_index("process_sort_index", rank, 0, rank)};
  std::map<int, std::string> rows;
  // A span that holds others comes before them also when they begin together: that is how viewers tell which is inside.
  std::vector<Span> spans = spans_;
  std::stable_sort(spans.begin(), spans.end(), [zero_s](const Span& a, const Span& b) {
    const std::int64_t a_ns = nanoseconds(a.begin_s, zero_s), b_ns = nanoseconds(b.begin_s, zero_s);
    return a_ns != b_ns ? a_ns < b_ns : a.end_s > b.end_s;
  });
  for (const Span& span : spans) {
    const std::int64_t begin_ns = nanoseconds(span.begin_s, zero_s), end_ns = nanoseconds(span.end_s, zero_s);
    rows.emplace(span.row,
                 span.row < kFirstStreamRow ? kRowNames[span.row] : str("stream ", span.row - kFirstStreamRow));
    events.push_back(str(head("X", span.name, rank), R"(, "tid": )", span.row, R"(, "ts": )", microseconds(begin_ns),
                         R"(, "dur": )", microseconds(end_ns - begin_ns), bytes_argument(span.bytes), "}"));
  }
  for (const auto& [row, name] : rows) {
    events.push_back(metadata("thread_name", rank, row, name));
    events.push_back(sort_index("thread_sort_index", rank, row, row));
  }
  for (std::size_t i = 0; i < operations_.size(); ++i) {
    const Span& operation = operations_[i];
    const std::string tail = str(R"(, "tid": 0, "cat": "communication", "id": ")", rank, ".", i, R"(", "ts": )");
    events.push_back(str(head("b", operation.name, rank), tail, microseconds(nanoseconds(operation.begin_s, zero_s)),
                         bytes_argument(operation.bytes), "}"));
    events.push_back(
        str(head("e", operation.name, rank), tail, microseconds(nanoseconds(operation.end_s, zero_s)), "}"));
  }
  for (const Held& held : held_) {
    std::string kinds;
    for (std::size_t kind = 0; kind < kMemoryKinds; ++kind) {
      kinds += str(kind == 0 ? "\"" : ", \"", kMemoryKindNames[kind], "\": ", held.memory.bytes[kind]);
    }
    events.push_back(str(head("C", "memory (bytes)", rank), R"(, "tid": 0, "ts": )",
                         microseconds(nanoseconds(held.at_s, zero_s)), R"(, "args": {)", kinds, "}}"));
  }
  std::string text;
  for (const std::string& event : events) text += (text.empty() ? "" : ",\n") + event;
  return text;
}

std::string trace_file(const std::vector<std::string>& events_of_ranks) {
  std::string text = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
  for (std::size_t rank = 0; rank < events_of_ranks.size(); ++rank) {
    text += (rank == 0 ? "" : ",\n") + events_of_ranks[rank];
  }
  return text + "\n]}\n";
}

}  // namespace pdl
