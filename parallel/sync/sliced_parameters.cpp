#include "parallel/sync/sliced_parameters.h"

#include "engine/data/batch_plan.h"

namespace pdl {

SlicedParameters::SlicedParameters(const ParamStore& store, Communicator& group) : store_(store), group_(group) {
  for (std::size_t i = 0; i < store.params().size(); ++i) {
    const ParamSpec& spec = store.params()[i].spec;
    if (spec.slice.axis < 0) continue;
    const Part own = split_evenly(spec.global_shape[0], group.size(), group.rank());
    PDL_CHECK(spec.slice.axis == 0 && spec.slice.begin == own.begin && spec.slice.count == own.count, spec.name,
              " is cut otherwise");
    sliced_.push_back(static_cast<std::int64_t>(i));
  }
}

std::int64_t SlicedParameters::predicted_bytes() const { return group_.size() * count() * size_of(DType::fp64); }

void SlicedParameters::prepare(Device& device) {
  device_ = &device;
  squares_ = device.allocate(predicted_bytes(), MemoryKind::communication);
}

void SlicedParameters::sum_squares(std::vector<double>& squares) const {
  if (sliced_.empty()) return;
  Stream& stream = device_->compute_stream();
  std::vector<double> all(static_cast<std::size_t>(group_.size() * count()));
  for (std::size_t i = 0; i < sliced_.size(); ++i) all[i] = squares[static_cast<std::size_t>(sliced_[i])];
  const Tensor shared = squares_.tensor(DType::fp64, Shape{group_.size() * count()});
  const Tensor own = shared.range(group_.rank() * count(), count());
  device_->copy(own.raw(), all.data(), own.bytes(), stream);
  group_.all_gather(shared, own, stream).wait(stream);
  device_->copy(all.data(), shared.raw(), shared.bytes(), stream);
  stream.synchronize();
  for (std::size_t i = 0; i < sliced_.size(); ++i) {
    double& square = squares[static_cast<std::size_t>(sliced_[i])];
    square = 0.0;
    for (std::size_t part = i; part < all.size(); part += sliced_.size()) square += all[part];
  }
}

std::vector<UpdateSegment> SlicedParameters::runs(std::int64_t first, std::int64_t count) const {
  std::vector<UpdateSegment> runs;
  for (std::int64_t index : sliced_) {
    if (index < first || index >= first + count) continue;
    if (runs.empty() || runs.back().offset + runs.back().count != index) runs.push_back({.offset = index, .count = 0});
    runs.back().count += 1;
  }
  return runs;
}

void SlicedParameters::sum_norms(Tensor norms, std::int64_t first) const {
  Stream& stream = device_->compute_stream();
  for (const UpdateSegment& run : runs(first, norms.shape()[0])) {
    group_.all_reduce(norms.rows(run.offset - first, run.count), ReduceOp::sum, stream).wait(stream);
  }
}

void SlicedParameters::gather(int index, const Tensor& values, const Tensor& scratch, void* host) const {
  Stream& stream = device_->compute_stream();
  const Shape& whole = store_.params()[static_cast<std::size_t>(index)].spec.global_shape;
  if (group_.rank() != 0) {
    group_.send(values, 0, 0, stream).wait(stream);
    return;
  }
  auto* to = static_cast<char*>(host);
  for (int rank = 0; rank < group_.size(); ++rank) {
    const std::int64_t elements = split_evenly(whole[0], group_.size(), rank).count * whole.elements_per_sample();
    const Tensor slice = rank == 0 ? values : scratch.view(Shape{scratch.elements()}).range(0, elements);
    if (rank > 0) group_.recv(slice, rank, 0, stream).wait(stream);
    device_->copy(to, slice.raw(), slice.bytes(), stream);
    stream.synchronize();
    to += slice.bytes();
  }
}

}  // namespace pdl
