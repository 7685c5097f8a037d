#include "tests/support/device_testing.h"

#include <cstdio>
#include <thread>

#include "tests/support/catch.h"
#include "tests/support/element_codec.h"

namespace pdl::testing {
namespace {

constexpr std::int64_t kGuardBytes = 256;
constexpr std::byte kGuard{0x5C};

std::size_t as_size(std::int64_t count) { return static_cast<std::size_t>(count); }

void upload(const Tensor& to, const std::vector<std::byte>& bytes) {
  PDL_CHECK(static_cast<std::int64_t>(bytes.size()) == to.bytes(), bytes.size(), " bytes for ", to.bytes());
  gpu()->device->copy(to.raw(), bytes.data(), to.bytes(), gpu()->device->compute_stream());
  gpu()->wait();
}

std::vector<std::byte> download(const void* from, std::int64_t bytes) {
  std::vector<std::byte> copied(as_size(bytes));
  gpu()->device->copy(copied.data(), from, bytes, gpu()->device->compute_stream());
  gpu()->wait();
  return copied;
}

std::vector<std::byte> encoded(const Values& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * as_size(size_of(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_element(bytes.data() + i * as_size(size_of(dtype)), dtype, values[i]);
  }
  return bytes;
}

bool all_guards(const std::vector<std::byte>& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == kGuard; });
}

// The oracle's type of a tensor.
DType oracle_type(DType dtype) { return dtype == DType::fp32 || is_half(dtype) ? DType::fp64 : dtype; }

Gpu* find_gpu() {
  // Never destroyed: when static objects are, CUDA's own may be gone already.
  auto found = std::make_unique<Gpu>();
  try {
    found->device = make_device({.kind = "cuda"});
  } catch (const ConfigError& error) {
    std::fprintf(stderr, "skipped: no GPU (%s)\n", error.what());
    return nullptr;
  }
  const auto threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 8u));
  found->host = make_device({.kind = "cpu", .threads = threads});
  found->oracle = make_backend(*found->host, {.deterministic = true});
  found->deterministic = make_backend(*found->device, {.deterministic = true});
  found->fast = make_backend(*found->device, {.deterministic = false, .tf32 = true});
  for (Backend* backend : {found->deterministic.get(), found->fast.get()}) {
    backend->set_stream(found->device->compute_stream());
  }
  return found.release();
}

}  // namespace

Gpu* gpu() {
  static Gpu* const found = find_gpu();
  return found;
}

// -------------------------------------------------------------------------------------------------- modes and
// tolerances
std::string_view Mode::name() const {
  if (dtype == DType::fp32) return deterministic ? "fp32" : "tf32";
  if (dtype == DType::bf16) return deterministic ? "bf16" : "bf16, not deterministic";
  return deterministic ? "fp16" : "fp16, not deterministic";
}

Side Mode::side() const { return {deterministic ? gpu()->deterministic.get() : gpu()->fast.get(), true}; }

std::vector<Mode> modes_of(DType dtype) { return {{dtype, true}, {dtype, false}}; }

double Tolerance::of(const Mode& mode) const {
  if (mode.dtype == DType::fp32) return mode.deterministic ? fp32 : tf32;
  return mode.dtype == DType::bf16 ? bf16 : fp16;
}

double difference(const Values& values, const Values& expected, const Choice& chosen) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (values.size() != expected.size()) return kInfinity;
  double error = 0.0, worst = 0.0;
  double norm = 0.0, largest = 0.0, whole_norm = 0.0, whole_largest = 0.0;  // of what is expected
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double value = values[i], right = expected[i];
    if (std::isfinite(right)) {
      whole_norm += right * right;
      whole_largest = std::max(whole_largest, std::fabs(right));
    }
    if (chosen && !chosen(static_cast<std::int64_t>(i))) continue;
    if (!std::isfinite(right)) {
      const bool same = std::isnan(right) ? std::isnan(value) : value == right;
      if (!same) return kInfinity;
      continue;
    }
    if (!std::isfinite(value)) return kInfinity;
    norm += right * right;
    largest = std::max(largest, std::fabs(right));
    error += (value - right) * (value - right);
    worst = std::max(worst, std::fabs(value - right));
  }
  if (worst == 0.0) return 0.0;
  if (chosen) {
    norm = std::max(norm, 0.01 * whole_norm);
    largest = std::max(largest, 0.1 * whole_largest);
  }
  return norm == 0.0 ? kInfinity : std::max(std::sqrt(error / norm), 0.5 * worst / largest);
}

Values random_values(std::int64_t count, std::uint64_t seed, double low, double high) {
  const RandomStream stream(seed, RandomUse::synthetic, 0);
  Values values(as_size(count));
  for (std::int64_t i = 0; i < count; ++i) {
    values[as_size(i)] = low + (high - low) * stream.uniform(static_cast<std::uint64_t>(i));
  }
  return values;
}

// -----------------------------------------------------------------------------------------------------------
// DeviceTensor
DeviceTensor::DeviceTensor(DType dtype, Shape shape, std::int64_t offset)
    : before_(kGuardBytes + offset * size_of(dtype)),
      behind_(kGuardBytes),
      buffer_(gpu()->device->allocate(before_ + shape.elements() * size_of(dtype) + behind_, MemoryKind::workspace)),
      tensor_(buffer_.tensor(dtype, shape, before_)) {
  upload(buffer_.tensor(DType::uint8, {buffer_.bytes()}), std::vector<std::byte>(as_size(buffer_.bytes()), kGuard));
  poison();
}

void DeviceTensor::poison() {
  const bool integers = tensor_.dtype() == DType::int32 || tensor_.dtype() == DType::int64;
  upload(tensor_, std::vector<std::byte>(as_size(tensor_.bytes()), integers ? std::byte{0xA5} : std::byte{0xFF}));
}

void DeviceTensor::set(const Values& values) { upload(tensor_, encoded(values, tensor_.dtype())); }

std::vector<std::byte> DeviceTensor::bytes() const { return download(tensor_.raw(), tensor_.bytes()); }

Values DeviceTensor::values() const {
  const std::vector<std::byte> all = bytes();
  Values values(as_size(tensor_.elements()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_element(all.data() + i * as_size(size_of(tensor_.dtype())), tensor_.dtype());
  }
  return values;
}

bool DeviceTensor::guards_intact() const {
  const auto* const start = static_cast<const char*>(buffer_.raw());
  return all_guards(download(start, before_)) && all_guards(download(start + buffer_.bytes() - behind_, behind_));
}

// ------------------------------------------------------------------------------------------------------------ Twin,
// Room
Twin::Twin(DType dtype, Shape shape, std::int64_t offset) {
  host_.emplace(oracle_type(dtype), shape);
  device_.emplace(dtype, shape, offset);
}

Twin::Twin(DType dtype, Shape shape, const Values& values, std::int64_t offset) : Twin(dtype, shape, offset) {
  set(values);
}

Tensor Twin::operator[](const Side& side) const {
  if (!host_) return Tensor();
  return side.on_gpu ? device_->tensor() : host_->tensor();
}

void Twin::set(const Values& values) {
  start_ = values;
  for (double& value : *start_) value = rounded_to(dtype(), value);
  reset({nullptr, false});
  reset({nullptr, true});
}

void Twin::reset(const Side& side) {
  const auto restore = [&](auto& tensor) { start_ ? tensor.set(*start_) : tensor.poison(); };
  side.on_gpu ? restore(*device_) : restore(*host_);
}

bool Twin::same_zeros() const {
  const Values ours = values(), theirs = expected();
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if ((ours[i] == 0.0) != (theirs[i] == 0.0)) return false;
  }
  return true;
}

Twin random_twin(DType dtype, Shape shape, std::uint64_t seed, double low, double high, std::int64_t offset) {
  return Twin(dtype, shape, random_values(shape.elements(), seed, low, high), offset);
}

TwinKey::TwinKey(double rate, const Values& sample_ids)
    : ids(DType::int64, {static_cast<std::int64_t>(sample_ids.size())}, sample_ids),
      update(DType::int64, {1}, Values{6.0}) {
  key.rate = rate;
  key.seed = 0x123456789ABCDEFull;
  key.site = 17;
  key.samples = ids.elements();
}

DropoutKey TwinKey::operator[](const Side& side) const {
  DropoutKey on_side = key;
  if (key.rate == 0.0) return on_side;
  on_side.sample_ids = static_cast<const std::int64_t*>(ids[side].raw());
  on_side.update = static_cast<const std::int64_t*>(update[side].raw());
  return on_side;
}

Room::Room(const Side& side, std::int64_t bytes) {
  if (side.on_gpu) {
    device_.emplace(DType::uint8, Shape{bytes});
  } else {
    host_.emplace(DType::uint8, Shape{bytes});
  }
}
Room::operator Tensor() const { return device_ ? device_->tensor() : host_->tensor(); }
bool Room::guards_intact() const { return device_ ? device_->guards_intact() : host_->guards_intact(); }

// ------------------------------------------------------------------------------------------------------------------
// agree
void agree(DType dtype, const std::vector<Output>& outputs, const std::function<void(const Side&)>& work) {
  const auto run = [&](const Side& side) {
    for (const Output& output : outputs) output.twin.reset(side);
    work(side);
    if (side.on_gpu) gpu()->wait();
  };
  run({gpu()->oracle.get(), false});
  std::vector<Values> expected;
  for (const Output& output : outputs) expected.push_back(output.twin.expected());

  for (const Mode& mode : modes_of(dtype)) {
    INFO("computed in " << mode.name());
    std::vector<std::vector<std::byte>> first_run;
    for (const bool again : {false, true}) {
      run(mode.side());
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        const Output& output = outputs[i];
        INFO(output.name << (again ? ", second run" : ""));
        CHECK(difference(output.twin.values(), expected[i], output.chosen) <= output.tolerance.of(mode));
        CHECK(output.twin.guards_intact());
        if (!again) first_run.push_back(output.twin.bytes());
        if (again && mode.deterministic) CHECK((output.twin.bytes() == first_run[i]));
      }
    }
  }
}

}  // namespace pdl::testing
