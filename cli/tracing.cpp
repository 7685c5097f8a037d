#include "cli/tracing.h"

#include <cstring>
#include <utility>
#include <vector>

namespace pdl {

StepTracer::StepTracer(std::int64_t first, std::int64_t count, Device& device, PhaseClock& clock, CommLedger& ledger)
    : first_(first), end_(first + count), device_(device), clock_(clock), ledger_(ledger) {
  if (count == 0) return;
  clock_.trace_to(&trace_);
  ledger_.trace_to(&trace_);
  activity_ = device_.log_activity();
}

StepTracer::~StepTracer() {
  clock_.trace_to(nullptr);
  ledger_.trace_to(nullptr);
}

void StepTracer::start() {
  clock_.anchor();
  ledger_.anchor();
  begin_s_ = PhaseClock::steady_seconds();
  trace_.record(true);
}

void StepTracer::stop() {
  trace_.record(false);
  complete_ = true;
  if (!activity_) return;
  for (const DeviceActivity& activity : activity_->finish()) {
    if (activity.begin_s >= begin_s_) trace_.activity(activity);
  }
  activity_.reset();
}

void StepTracer::step_begin() {
  if (activity_ && !trace_.recording()) activity_->restart();
  if (begun_++ == first_ && end_ > first_) start();
  if (trace_.recording()) trace_.memory(PhaseClock::steady_seconds(), device_.memory().current());
}

void StepTracer::step_end(const StepReport&) {
  if (trace_.recording()) trace_.memory(PhaseClock::steady_seconds(), device_.memory().current());
  if (++ended_ == end_ && trace_.recording()) stop();
}

std::string StepTracer::write(World& world, double zero_s) {
  if (trace_.recording()) stop();
  complete_ = false;
  const RankInfo& rank = world.info();
  const std::string title = str("rank ", rank.rank, " (", rank.host, ", ", device_.info().name, ")");
  return trace_file(world.gather(trace_.events(rank.rank, title, zero_s)));
}

double common_zero_s(World& world) {
  world.barrier();
  const double now_s = PhaseClock::steady_seconds();
  const std::string host = world.info().host;
  std::string mine(sizeof now_s, '\0');
  std::memcpy(mine.data(), &now_s, sizeof now_s);
  for (const std::string& answer : world.gather(mine + host)) {
    if (answer.substr(sizeof now_s) != host) continue;
    double zero_s = now_s;
    std::memcpy(&zero_s, answer.data(), sizeof zero_s);
    return zero_s;
  }
  return now_s;
}

}  // namespace pdl
