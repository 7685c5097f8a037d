#include "parallel/comm/comm_ledger.h"

#include <chrono>
#include <utility>

namespace pdl {
namespace {

// Spans that stay unread: more work than a device has queued, so that reading the one before never waits. Each has two
// marks at most in one stopwatch, which must still remember them.
constexpr std::size_t kUnread = 1024;
static_assert(2 * (kUnread + 1) < Stopwatch::kRemembered);

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void CommLedger::measure_on(Device& device) {
  if (device.info().kind == "cpu") return;
  device_ = &device;
  compute_ = watch(device.compute_stream());
}

std::shared_ptr<Stopwatch> CommLedger::watch(Stream& stream) {
  PDL_CHECK(device_ != nullptr, "a stream's stopwatch without a device");
  std::shared_ptr<Stopwatch> made = device_->make_stopwatch(stream);
  std::erase_if(watches_, [](const std::weak_ptr<Stopwatch>& watch) { return watch.expired(); });
  watches_.push_back(made);
  if (tracing()) made->anchor();
  return made;
}

void CommLedger::anchor() {
  read_all();  // then no span keeps a stopwatch whose stream is gone
  for (const std::weak_ptr<Stopwatch>& known : watches_) {
    if (const std::shared_ptr<Stopwatch> watch = known.lock()) watch->anchor();
  }
}

CommLedger::Wait CommLedger::begin_wait(const Stream& stream) {
  Wait wait;
  wait.traced = tracing();
  wait.counts = !in_streams() || &stream == &device_->compute_stream();
  if (!wait.counts) return wait;
  if (listener_ != nullptr) listener_->wait_begin();
  if (in_streams()) {
    wait.mark = compute_->mark();
  } else {
    wait.host_s = steady_seconds();
  }
  return wait;
}

void CommLedger::end_wait(const std::string& key, const Wait& wait, bool is_all_that_is_known) {
  if (!wait.counts) return;
  const auto step = static_cast<std::int64_t>(step_exposed_s_.size()) - 1;
  if (in_streams()) {
    keep({key, compute_, wait.mark, compute_->mark(), 0, step, is_all_that_is_known, wait.traced});
  } else {
    const double end_s = steady_seconds();
    add_exposed(key, step, end_s - wait.host_s);
    if (wait.traced) trace_->span(Trace::Row::waits, key, wait.host_s, end_s);
  }
  if (listener_ != nullptr) listener_->wait_end(key.starts_with("pp."));
}

void CommLedger::ran_in_stream(const std::string& key, std::shared_ptr<Stopwatch> watch, std::int64_t from,
                               std::int64_t to, std::int64_t bytes) {
  keep({key, std::move(watch), from, to, bytes, -1, true, tracing()});
}

void CommLedger::ran(const std::string& key, double begin_s, double end_s, std::int64_t bytes, bool traced) {
  at(key).busy_s += end_s - begin_s;
  if (traced) trace_->operation(key, begin_s, end_s, bytes);
}

void CommLedger::keep(Span span) {
  unread_.push_back(std::move(span));
  if (unread_.size() <= kUnread) return;
  read(unread_.front());
  unread_.pop_front();
}

void CommLedger::read(const Span& span) {
  const double seconds = span.watch->seconds(span.from, span.to);
  const bool is_wait = span.step >= 0;
  if (is_wait) add_exposed(span.key, span.step, seconds);
  if (span.also_busy) at(span.key).busy_s += seconds;
  if (!span.traced) return;
  const double begin_s = span.watch->host_s(span.from), end_s = begin_s + seconds;
  if (is_wait) {
    trace_->span(Trace::Row::waits, span.key, begin_s, end_s);
  } else {
    trace_->operation(span.key, begin_s, end_s, span.bytes);
  }
}

void CommLedger::read_all() {
  for (; !unread_.empty(); unread_.pop_front()) read(unread_.front());
}

void CommLedger::add_exposed(const std::string& key, std::int64_t step, double seconds) {
  at(key).exposed_s += seconds;
  step_exposed_s_[static_cast<std::size_t>(step)] += seconds;
}

void CommLedger::step_done(std::int64_t) {
  step_exposed_s_.push_back(0.0);
  ++unreported_steps_;
}

void CommLedger::step_end(const StepReport& report) {
  if (unreported_steps_ == 0) step_done(report.step);
  --unreported_steps_;
}

CommCounts CommLedger::take() {
  read_all();
  return std::exchange(counts_, {});
}

std::vector<double> CommLedger::take_steps() {
  read_all();
  std::vector<double> ended = std::exchange(step_exposed_s_, {0.0});
  ended.pop_back();
  return ended;
}

double CommLedger::exposed_s() const {
  double sum = 0.0;
  for (const auto& [key, count] : counts_) sum += count.exposed_s;
  return sum;
}

}  // namespace pdl
