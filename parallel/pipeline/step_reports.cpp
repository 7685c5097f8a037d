#include "parallel/pipeline/step_reports.h"

#include "parallel/comm/world.h"

namespace pdl {
namespace {

constexpr std::int64_t kBytes = 3 * size_of(DType::fp64);

}  // namespace

void StepReports::prepare() {
  control_ = context_.world.split(0, context_.world.rank(), kControlAxis);
  stream_ = context_.device.make_stream(false);
  closed_ = stream_->make_event();
  memory_ = context_.device.allocate(open_ * kBytes, MemoryKind::communication);
  works_.resize(static_cast<std::size_t>(open_));
}

MemoryByKind StepReports::predicted_memory() const {
  MemoryByKind memory;
  memory[MemoryKind::communication] = open_ * kBytes;
  if (context_.training.deterministic) {
    memory[MemoryKind::communication] += deterministic_scratch_bytes(context_.world.size());
  }
  return memory;
}

CommCounts StepReports::predicted_traffic() const {
  if (context_.world.size() == 1) return {};
  return {{"control.all_reduce", {.calls = 1, .bytes = ring_bytes("all_reduce", context_.world.size(), kBytes)}}};
}

void StepReports::close(std::int64_t step) {
  Stream& compute = context_.device.compute_stream();
  const double stop = context_.stop_requested && context_.stop_requested() ? 1.0 : 0.0;
  context_.device.copy(sums(step).range(2, 1).raw(), &stop, sizeof stop, compute);
  compute.record(*closed_);
  stream_->wait(*closed_);
  works_[static_cast<std::size_t>(step % open_)] = control_->all_reduce(sums(step), ReduceOp::sum, *stream_);
}

StepSums StepReports::collect(std::int64_t step) {
  works_[static_cast<std::size_t>(step % open_)].wait(*stream_);
  double values[3] = {};
  context_.device.copy(values, sums(step).raw(), kBytes, *stream_);
  stream_->synchronize();
  context_.backend.fill(sums(step), 0.0);
  return {values[0], values[1], values[2]};
}

}  // namespace pdl
