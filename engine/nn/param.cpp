#include "engine/nn/param.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "engine/base/random.h"

namespace pdl {
namespace {

/// Fewer values than this are not worth waking other threads.
constexpr std::int64_t kParallelElements = 4096;

double initial_value(const InitRule& rule, const RandomStream& stream, std::int64_t element) {
  const auto index = static_cast<std::uint64_t>(element);
  switch (rule.kind) {
    case InitRule::Kind::zeros:
      break;
    case InitRule::Kind::ones:
      return 1.0;
    case InitRule::Kind::normal:
      return rule.scale * stream.normal(index);
    case InitRule::Kind::uniform:
      return rule.scale * (2.0 * stream.uniform(index) - 1.0);
  }
  return 0.0;
}

/// A slice along an axis is a run of global elements for each combination of the extents before that axis.
struct SliceRuns {
  explicit SliceRuns(const ParamSpec& spec) : run(spec.shape().elements()) {
    if (spec.slice.axis < 0) return;
    std::int64_t inner = 1;
    for (int axis = spec.slice.axis + 1; axis < spec.global_shape.rank(); ++axis) inner *= spec.global_shape[axis];
    run = spec.slice.count * inner;
    pitch = spec.global_shape[spec.slice.axis] / spec.slice.groups * inner;
    first = spec.slice.begin * inner;
  }
  /// The global element that held element `i` is.
  std::int64_t global(std::int64_t i) const { return i / run * pitch + first + i % run; }

  std::int64_t run, pitch = 0, first = 0;
};

template <typename T>
void fill(T* values, const ParamSpec& spec, const RandomStream& stream) {
  const std::int64_t count = spec.shape().elements();
  const SliceRuns runs(spec);
#pragma omp parallel for schedule(static) if (count > kParallelElements)
  for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<T>(initial_value(spec.init, stream, runs.global(i)));
}

}  // namespace

void fill_initial_values(Tensor values, const ParamSpec& spec, int id, std::uint64_t seed) {
  PDL_CHECK(values.elements() == spec.shape().elements(), spec.name, ": ", values.shape().to_string());
  const RandomStream stream(seed, RandomUse::init, static_cast<std::uint64_t>(id));
  if (values.dtype() == DType::fp64) return fill(values.data<double>(), spec, stream);
  fill(values.data<float>(), spec, stream);
}

void place_slice(const Tensor& whole, const Tensor& part, const ParamSpec& spec, std::int64_t first) {
  const std::int64_t last = first + part.elements();
  PDL_CHECK(whole.elements() == spec.global_shape.elements() && first >= 0 && last <= spec.shape().elements() &&
                whole.dtype() == part.dtype(),
            spec.name, ": elements ", first, " to ", last, " of ", spec.shape().to_string(), " in ",
            whole.shape().to_string());
  const SliceRuns runs(spec);
  const std::int64_t size = size_of(whole.dtype());
  for (std::int64_t i = first; i < last;) {
    const std::int64_t count = std::min(runs.run - i % runs.run, last - i);  // to the end of a run
    std::memcpy(static_cast<char*>(whole.raw()) + runs.global(i) * size,
                static_cast<char*>(part.raw()) + (i - first) * size, static_cast<std::size_t>(count * size));
    i += count;
  }
}

ParamStore::ParamStore(std::vector<ParamSpec> specs, std::vector<int> layers, std::vector<int> ids) {
  PDL_CHECK(specs.size() == layers.size() && specs.size() == ids.size(), "one layer and one id for each parameter");
  std::map<std::string, int> index_of;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    ParamSpec& spec = specs[i];
    const auto target = spec.tied_to.empty() ? index_of.end() : index_of.find(spec.tied_to);
    if (target != index_of.end()) {
      PDL_CHECK(params_[static_cast<std::size_t>(target->second)].spec.shape() == spec.shape(), spec.name,
                " tied to another shape");
      owner_.push_back(target->second);
      continue;
    }
    const std::int64_t count = spec.shape().elements();
    const int index = static_cast<int>(params_.size());
    PDL_CHECK(index_of.emplace(spec.name, index).second, "two parameters are called ", spec.name);
    params_.push_back({.spec = std::move(spec), .id = ids[i], .layer = layers[i], .offset = elements_, .count = count});
    owner_.push_back(index);
    elements_ += count;
  }
}

void ParamStore::place(const std::vector<std::int64_t>& offsets, std::int64_t elements) {
  PDL_CHECK(offsets.size() == params_.size() && values_.raw() == nullptr, offsets.size(), " places for ",
            params_.size(), " parameters, which move only before they have memory");
  for (std::size_t i = 0; i < params_.size(); ++i) {
    PDL_CHECK(offsets[i] >= 0 && offsets[i] + params_[i].count <= elements, params_[i].spec.name, " at ", offsets[i],
              " of ", elements);
    params_[i].offset = offsets[i];
  }
  elements_ = elements;
}

void ParamStore::allocate(Device& device, DType dtype, StoreParts parts) {
  dtype_ = dtype;
  const MemoryByKind bytes = predicted_memory(dtype, parts);
  if (parts.values) values_ = device.allocate(bytes[MemoryKind::parameters], MemoryKind::parameters);
  if (parts.gradients) grads_ = device.allocate(bytes[MemoryKind::gradients], MemoryKind::gradients);
  if (parts.master && is_half(dtype)) master_ = device.allocate(bytes[MemoryKind::optimizer], MemoryKind::optimizer);
}

MemoryByKind ParamStore::predicted_memory(DType dtype, StoreParts parts) const {
  const std::int64_t wide_bytes = elements_ * size_of(wide_dtype(dtype));
  MemoryByKind memory;
  memory[MemoryKind::parameters] = parts.values ? elements_ * size_of(dtype) : 0;
  memory[MemoryKind::gradients] = parts.gradients ? wide_bytes : 0;
  memory[MemoryKind::optimizer] = parts.master && is_half(dtype) ? wide_bytes : 0;
  return memory;
}

void ParamStore::round_master(Backend& backend) {
  if (is_half(dtype_)) backend.copy(values(), weights());
}

void ParamStore::visit_initial_values(DType dtype, std::uint64_t seed,
                                      const std::function<void(int index, const Tensor& values)>& visit) const {
  std::vector<char> host;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const Param& param = params_[i];
    host.resize(static_cast<std::size_t>(param.count * size_of(wide_dtype(dtype))));
    const Tensor values(host.data(), wide_dtype(dtype), param.spec.shape());
    fill_initial_values(values, param.spec, param.id, seed);
    visit(static_cast<int>(i), values);
  }
}

void ParamStore::initialise(Device& device, std::uint64_t seed) {
  Stream& stream = device.compute_stream();
  visit_initial_values(dtype_, seed, [&](int index, const Tensor& values) {
    device.copy(view(weights(), index).raw(), values.raw(), values.bytes(), stream);
    stream.synchronize();
  });
}

Tensor ParamStore::view(const Tensor& flat, int index) const {
  const Param& param = params_[static_cast<std::size_t>(index)];
  return flat.range(param.offset, param.count).view(param.spec.shape());
}

std::vector<UpdateSegment> ParamStore::segments(bool all_decay) const {
  std::vector<UpdateSegment> segments;
  for (const Param& param : params_)
    segments.push_back({.offset = param.offset, .count = param.count, .decay = all_decay || param.spec.decay});
  return segments;
}

}  // namespace pdl
