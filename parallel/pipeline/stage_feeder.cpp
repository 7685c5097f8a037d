#include "parallel/pipeline/stage_feeder.h"

#include <algorithm>

namespace pdl {
namespace {

constexpr std::int64_t kAlignment = 64;
std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

Shape batched(const Shape& sample, std::int64_t count) {
  switch (sample.rank()) {
    case 1:
      return {count, sample[0]};
    case 2:
      return {count, sample[0], sample[1]};
    default:
      PDL_CHECK(sample.rank() == 3, "samples have one to three extents, not ", sample.to_string());
      return {count, sample[0], sample[1], sample[2]};
  }
}

DType input_dtype(const ModelDescription& model, DType dtype) {
  return model.sample_input.dtype == DType::int32 ? DType::int32 : dtype;
}

/// Offsets of the parts of a micro-batch in its memory.
struct PlaceLayout {
  PlaceLayout(const ModelDescription& model, DType dtype, StageNeeds needs, std::int64_t samples) {
    const DType type = input_dtype(model, dtype);
    const std::int64_t inputs = needs.input ? model.sample_input.shape.elements() * samples : 0;
    const std::int64_t targets = needs.target ? model.sample_target.shape.elements() * samples : 0;
    target = aligned(inputs * size_of(type));
    sample_ids = target + aligned(targets * size_of(DType::int32));
    update = sample_ids + aligned(samples * size_of(DType::int64));
    unrounded = update + aligned(size_of(DType::int64));
    bytes = unrounded + (is_half(type) ? aligned(inputs * size_of(wide_dtype(type))) : 0);
  }
  std::int64_t target, sample_ids, update, unrounded, bytes;
};

std::int64_t largest_part(std::int64_t samples, int micro_batches) { return cut_step(samples, micro_batches)[0].count; }

}  // namespace

std::vector<Part> cut_step(std::int64_t samples, int micro_batches) {
  std::vector<Part> parts;
  const std::int64_t count = std::min<std::int64_t>(samples, micro_batches);
  for (std::int64_t i = 0; i < count; ++i) parts.push_back(split_evenly(samples, count, i));
  return parts;
}

StageFeeder::StageFeeder(const EngineContext& context, const Dataset& dataset, StageNeeds needs,
                         std::int64_t step_samples, int micro_batches, int held, int replica, int replicas)
    : needs_(needs),
      micro_batches_(micro_batches),
      replica_(replica),
      replicas_(replicas),
      largest_(largest_part(step_samples, micro_batches)),
      sends_ahead_(context.device.info().kind != "cpu"),
      device_(context.device),
      backend_(context.backend),
      copies_(context.device.make_stream(false)) {
  if (needs.input || needs.target) {
    loader_ = std::make_unique<DataLoader>(
        dataset, context.loader, largest_, [&device = context.device](std::int64_t bytes) -> std::shared_ptr<void> {
          const auto memory = std::make_shared<HostBuffer>(device.allocate_host(bytes));
          return {memory, memory->raw()};
        });
  }
  for (int i = 0; i < held; ++i) places_.push_back(make_place(context));
}

StageFeeder::Place StageFeeder::make_place(const EngineContext& context) {
  const ModelDescription& model = context.model;
  const PlaceLayout layout(model, context.training.dtype, needs_, largest_);
  const DType dtype = input_dtype(model, context.training.dtype);
  const Shape input = batched(model.sample_input.shape, largest_);
  Place place;
  place.memory = device_.allocate(layout.bytes, MemoryKind::activations);
  if (needs_.input) {
    place.input = place.memory.tensor(dtype, input);
    if (is_half(dtype)) place.unrounded = place.memory.tensor(wide_dtype(dtype), input, layout.unrounded);
  }
  if (needs_.target) {
    place.target = place.memory.tensor(DType::int32, batched(model.sample_target.shape, largest_), layout.target);
  }
  place.sample_ids = place.memory.tensor(DType::int64, Shape{largest_}, layout.sample_ids);
  place.update = place.memory.tensor(DType::int64, Shape{1}, layout.update);
  place.arrived = copies_->make_event();
  place.used = copies_->make_event();
  return place;
}

std::int64_t StageFeeder::device_bytes(const EngineContext& context, StageNeeds needs, std::int64_t step_samples,
                                       int micro_batches, int held) {
  const std::int64_t samples = largest_part(step_samples, micro_batches);
  return held * PlaceLayout(context.model, context.training.dtype, needs, samples).bytes;
}

std::vector<Part> StageFeeder::parts_of(std::int64_t step) const {
  const Part share = split_evenly(static_cast<std::int64_t>(plan_->step_ids(step).size()), replicas_, replica_);
  std::vector<Part> parts = cut_step(share.count, micro_batches_);
  for (Part& part : parts) part.begin += share.begin;
  return parts;
}

void StageFeeder::begin(const EpochPlan& plan) {
  plan_ = &plan;
  count_ = 0;
  std::vector<std::span<const std::int64_t>> micro_batches;
  for (std::int64_t step = 0; step < plan.steps(); ++step) {
    const std::span<const std::int64_t> ids = plan.step_ids(step);
    for (const Part part : parts_of(step)) {
      micro_batches.push_back(ids.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.count)));
    }
  }
  restart(std::move(micro_batches));
}

void StageFeeder::begin(std::vector<std::span<const std::int64_t>> micro_batches) {
  plan_ = nullptr;
  count_ = micro_batches.size();
  restart(std::move(micro_batches));
}

void StageFeeder::restart(std::vector<std::span<const std::int64_t>> micro_batches) {
  copies_->synchronize();
  while (loader_ && loader_->outstanding() > 0) loader_->next();
  for (Place& place : places_) place.is_free = true;
  all_ = std::move(micro_batches);
  step_ = -1;
  first_ = next_ = sent_ = ahead_ = 0;
  read_ahead();
}

std::span<const Part> StageFeeder::begin_step() {
  PDL_CHECK(plan_ != nullptr && step_ + 1 < plan_->steps(), "no step left in the plan");
  PDL_CHECK(next_ == count_, "a step of ", count_, " micro-batches ends after ", next_);
  parts_ = parts_of(++step_);
  first_ += count_;
  count_ = parts_.size();
  next_ = sent_ = 0;
  return parts_;
}

MicroBatch StageFeeder::next(Stream& stream, std::int64_t update) {
  if (sent_ == next_) send();
  Place& place = places_[next_++ % places_.size()];
  stream.wait(*place.arrived);
  device_.copy(place.update.raw(), &update, sizeof update, stream);
  MicroBatch batch;
  batch.size = place.size;
  if (needs_.input) batch.input = place.input.rows(0, place.size);
  if (needs_.target) batch.target = place.target.rows(0, place.size);
  batch.sample_ids = place.sample_ids.rows(0, place.size);
  batch.update = place.update;
  if (place.unrounded.defined()) backend_.copy(batch.input, place.unrounded.rows(0, place.size));
  return batch;
}

void StageFeeder::release(int index, Stream& stream) {
  Place& place = places_[static_cast<std::size_t>(index) % places_.size()];
  stream.record(*place.used);
  place.is_free = true;
}

void StageFeeder::send_ahead() {
  if (sends_ahead_ && sent_ == next_ && sent_ < count_ && places_[sent_ % places_.size()].is_free) send();
}

void StageFeeder::send() {
  Place& place = places_[sent_ % places_.size()];
  PDL_CHECK(place.is_free, "micro-batch ", sent_, " is to take the place of one that is still held");
  const std::span<const std::int64_t> ids = all_[first_ + sent_++];
  place.is_free = false;
  place.size = static_cast<std::int64_t>(ids.size());
  copies_->synchronize();  // what was sent before has left the loader's memory
  copies_->wait(*place.used);
  device_.copy(place.sample_ids.raw(), ids.data(), place.sample_ids.rows(0, place.size).bytes(), *copies_);
  if (loader_) {
    const HostBatch& host = loader_->next();
    if (needs_.input) {
      const Tensor& arrival = place.unrounded.defined() ? place.unrounded : place.input;
      device_.copy(arrival.raw(), host.input.raw(), arrival.rows(0, host.size).bytes(), *copies_);
    }
    if (needs_.target) {
      device_.copy(place.target.raw(), host.target.raw(), place.target.rows(0, host.size).bytes(), *copies_);
    }
  }
  copies_->record(*place.arrived);
  read_ahead();
}

void StageFeeder::read_ahead() {
  while (loader_ && ahead_ < all_.size() && loader_->outstanding() < loader_->capacity()) loader_->push(all_[ahead_++]);
}

}  // namespace pdl
