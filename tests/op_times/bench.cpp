#include "tests/op_times/bench.h"

#include <algorithm>
#include <cmath>

#include "engine/base/random.h"

namespace pdl::op_times {
namespace {

constexpr double kCacheBytes = 256e6;  // several times an H200's 60 MB
constexpr int kMostCopies = 32;
constexpr double kSeriesSeconds = 4e-4;
constexpr int kSeries = 11;
constexpr std::int64_t kNumbers = 4 << 20;

bool starts_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

}  // namespace

Bench::Bench(Device& device, CudaBackend& backend, std::string only)
    : device_(device), backend_(backend), only_(std::move(only)), watch_(device.make_stopwatch()) {
  const RandomStream stream(1, RandomUse::synthetic, 0);
  std::vector<float> numbers(static_cast<std::size_t>(kNumbers));
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(2.0 * stream.uniform(i) - 1.0);
  numbers_ = device.allocate(kNumbers * size_of(DType::fp32), MemoryKind::workspace);
  device.copy(numbers_.raw(), numbers.data(), numbers_.bytes(), device.compute_stream());
  device.compute_stream().synchronize();
}

bool Bench::wants(const std::string& prefix) const { return starts_with(prefix, only_) || starts_with(only_, prefix); }

int Bench::copies_of(double bytes) {
  return static_cast<int>(std::clamp(std::ceil(kCacheBytes / std::max(bytes, 1.0)), 1.0, double{kMostCopies}));
}

Buffer Bench::random(DType dtype, std::int64_t elements) {
  Buffer buffer = device_.allocate(elements * size_of(dtype), MemoryKind::activations);
  if (dtype != DType::fp32 && !is_half(dtype)) return buffer;
  const std::int64_t first = std::min(elements, kNumbers);
  const Tensor all = buffer.tensor(dtype, {elements});
  backend_.copy(all.range(0, first), numbers_.tensor(DType::fp32, {kNumbers}).range(0, first));
  for (std::int64_t filled = first; filled < elements; filled *= 2) {
    const std::int64_t more = std::min(filled, elements - filled);
    backend_.copy(all.range(filled, more), all.range(0, more));
  }
  return buffer;
}

double Bench::series(const std::function<void(int)>& call, int first, int calls) {
  const std::int64_t start = watch_->mark();
  for (int i = first; i < first + calls; ++i) call(i);
  return watch_->seconds(start, watch_->mark()) / calls;
}

void Bench::measure(const std::string& name, const std::string& shape, Work work,
                    const std::function<void(int)>& call) {
  if (!starts_with(name, only_)) return;
  call(0);
  const double guess = std::min(series(call, 1, 1), series(call, 2, 2));
  const int calls = std::clamp(static_cast<int>(kSeriesSeconds / guess), 2, 200);
  std::vector<double> seconds;
  for (int i = 0; i < kSeries; ++i) seconds.push_back(series(call, i * calls, calls));
  std::sort(seconds.begin(), seconds.end());
  rows_.push_back({.name = name,
                   .shape = shape,
                   .work = work,
                   .us = 1e6 * seconds[kSeries / 2],
                   .us_min = 1e6 * seconds.front(),
                   .us_max = 1e6 * seconds.back()});
}

Copies::Copies(Bench& bench, int count, DType dtype, const Shape& shape) : dtype_(dtype), shape_(shape) {
  for (int i = 0; i < count; ++i) buffers_.push_back(bench.random(dtype, shape.elements()));
}

Tensor Copies::operator[](int call) const {
  return buffers_[static_cast<std::size_t>(call) % buffers_.size()].tensor(dtype_, shape_);
}

}  // namespace pdl::op_times
