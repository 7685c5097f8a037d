#include "parallel/sync/batch_feeder.h"

#include <algorithm>

namespace pdl {
namespace {

constexpr std::int64_t kAlignment = 64;

std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

Shape batched(const Shape& sample, std::int64_t count) {
  Shape shape{count};
  switch (sample.rank()) {
    case 1:
      return Shape{count, sample[0]};
    case 2:
      return Shape{count, sample[0], sample[1]};
    case 3:
      return Shape{count, sample[0], sample[1], sample[2]};
    default:
      PDL_CHECK(false, "samples have one to three extents, not ", sample.to_string());
  }
  return shape;
}

DType input_dtype(const ModelDescription& model, DType dtype) {
  return model.sample_input.dtype == DType::int32 ? DType::int32 : dtype;
}

/// The pieces of one step that this rank works through: ids [begin, begin + count) of the step.
std::vector<Part> rank_pieces(std::int64_t step_samples, DataParallelPlace place, std::int64_t micro_batch) {
  const Part mine = split_evenly(step_samples, place.size, place.rank);
  std::vector<Part> pieces = split_in_pieces(mine.count, micro_batch);
  for (Part& piece : pieces) piece.begin += mine.begin;
  return pieces;
}

}  // namespace

BatchFeeder::BatchFeeder(const EngineContext& context, const Dataset& dataset, DataParallelPlace place,
                         std::int64_t max_micro_batch)
    : place_(place),
      max_micro_batch_(max_micro_batch),
      device_(context.device),
      loader_(dataset, context.loader, max_micro_batch) {
  const ModelDescription& model = context.model;
  const DType dtype = input_dtype(model, context.training.dtype);
  const Shape input = batched(model.sample_input.shape, max_micro_batch);
  const Shape target = batched(model.sample_target.shape, max_micro_batch);
  memory_ = device_.allocate(device_bytes(model, context.training.dtype, max_micro_batch), MemoryKind::activations);
  const std::int64_t target_offset = aligned(input.elements() * size_of(dtype));
  input_ = memory_.tensor(dtype, input);
  target_ = memory_.tensor(DType::int32, target, target_offset);
  sample_ids_ = memory_.tensor(DType::int64, Shape{max_micro_batch},
                               target_offset + aligned(target.elements() * size_of(DType::int32)));
}

std::int64_t BatchFeeder::device_bytes(const ModelDescription& model, DType dtype, std::int64_t max_micro_batch) {
  return aligned(model.sample_input.shape.elements() * max_micro_batch * size_of(input_dtype(model, dtype))) +
         aligned(model.sample_target.shape.elements() * max_micro_batch * size_of(DType::int32)) +
         aligned(max_micro_batch * size_of(DType::int64));
}

void BatchFeeder::begin(const EpochPlan& plan) {
  while (loader_.outstanding() > 0) loader_.next();
  plan_ = &plan;
  step_ = 0;
  ahead_step_ = 0;
  ahead_piece_ = 0;
  ahead_pieces_.clear();
  if (plan.steps() > 0) {
    ahead_pieces_ = rank_pieces(static_cast<std::int64_t>(plan.step_ids(0).size()), place_, max_micro_batch_);
  }
  read_ahead();
}

std::span<const Part> BatchFeeder::begin_step() {
  PDL_CHECK(plan_ != nullptr && step_ < plan_->steps(), "no step left in the plan");
  pieces_ = rank_pieces(static_cast<std::int64_t>(plan_->step_ids(step_).size()), place_, max_micro_batch_);
  ++step_;
  return pieces_;
}

MicroBatch BatchFeeder::next(Stream& stream) {
  const HostBatch& host = loader_.next();
  MicroBatch batch;
  batch.size = host.size;
  batch.input = input_.rows(0, host.size);
  batch.target = target_.rows(0, host.size);
  batch.sample_ids = sample_ids_.rows(0, host.size);
  device_.copy(batch.input.raw(), host.input.raw(), batch.input.bytes(), stream);
  device_.copy(batch.target.raw(), host.target.raw(), batch.target.bytes(), stream);
  device_.copy(batch.sample_ids.raw(), host.sample_ids.raw(), batch.sample_ids.bytes(), stream);
  read_ahead();
  return batch;
}

void BatchFeeder::read_ahead() {
  while (ahead_step_ < plan_->steps() && loader_.outstanding() < loader_.capacity()) {
    if (ahead_piece_ == ahead_pieces_.size()) {
      if (++ahead_step_ == plan_->steps()) return;
      ahead_piece_ = 0;
      ahead_pieces_ =
          rank_pieces(static_cast<std::int64_t>(plan_->step_ids(ahead_step_).size()), place_, max_micro_batch_);
      continue;
    }
    const Part piece = ahead_pieces_[ahead_piece_++];
    loader_.push(plan_->step_ids(ahead_step_)
                     .subspan(static_cast<std::size_t>(piece.begin), static_cast<std::size_t>(piece.count)));
  }
}

}  // namespace pdl
