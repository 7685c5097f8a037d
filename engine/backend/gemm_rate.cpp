#include "engine/backend/gemm_rate.h"

#include <algorithm>
#include <vector>

#include "engine/base/random.h"

namespace pdl {
namespace {

constexpr int kWarmUp = 10, kMeasured = 31;  // some 60 ms on a GPU, a second or two on a CPU
constexpr std::int64_t kRandomElements = 1 << 20;

/// Standard normal numbers, the same block again and again: it is the bits that count.
void fill_randomly(const Tensor& to, Device& device, Backend& backend) {
  const DType wide = wide_dtype(to.dtype());
  const std::int64_t count = std::min(kRandomElements, to.elements());
  std::vector<char> numbers(static_cast<std::size_t>(count * size_of(wide)));
  const RandomStream random(1, RandomUse::synthetic, 0);
  for (std::int64_t i = 0; i < count; ++i) {
    const double number = random.normal(static_cast<std::uint64_t>(i));
    if (wide == DType::fp64) {
      reinterpret_cast<double*>(numbers.data())[i] = number;
    } else {
      reinterpret_cast<float*>(numbers.data())[i] = static_cast<float>(number);
    }
  }
  const Buffer block = device.allocate(count * size_of(wide), MemoryKind::workspace);
  const Tensor source = block.tensor(wide, Shape{count});
  device.copy(source.raw(), numbers.data(), source.bytes(), device.compute_stream());
  for (std::int64_t first = 0; first < to.elements(); first += count) {
    const std::int64_t part = std::min(count, to.elements() - first);
    backend.copy(to.range(first, part), source.range(0, part));
  }
  device.compute_stream().synchronize();
}

}  // namespace

double measured_gemm_flops_per_s(Device& device, Backend& backend, DType dtype, std::int64_t n) {
  const Shape square{n, n};
  const std::int64_t bytes = n * n * size_of(dtype);
  const Buffer x = device.allocate(bytes, MemoryKind::workspace), w = device.allocate(bytes, MemoryKind::workspace),
               y = device.allocate(bytes, MemoryKind::workspace);
  fill_randomly(x.tensor(dtype, square), device, backend);
  fill_randomly(w.tensor(dtype, square), device, backend);
  const std::unique_ptr<Stopwatch> stopwatch = device.make_stopwatch();
  std::vector<std::int64_t> marks;
  for (int i = 0; i < kWarmUp + kMeasured; ++i) {
    if (i >= kWarmUp) marks.push_back(stopwatch->mark());
    backend.linear_forward(y.tensor(dtype, square), Tensor(), x.tensor(dtype, square), w.tensor(dtype, square),
                           Tensor(), Activation::none);
  }
  marks.push_back(stopwatch->mark());
  std::vector<double> seconds;
  for (std::size_t i = 1; i < marks.size(); ++i) seconds.push_back(stopwatch->seconds(marks[i - 1], marks[i]));
  const auto median = seconds.begin() + kMeasured / 2;
  std::nth_element(seconds.begin(), median, seconds.end());
  const auto extent = static_cast<double>(n);
  return 2.0 * extent * extent * extent / *median;
}

}  // namespace pdl
