#include "parallel/sync/batch_feeder.h"

#include <algorithm>

namespace pdl {
namespace {

constexpr std::int64_t kAlignment = 64;

std::int64_t rounded_up(std::int64_t count, std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}
std::int64_t aligned(std::int64_t bytes) { return rounded_up(bytes, kAlignment); }

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

/// Where the parts of a micro-batch lie in its memory: input, target, sample ids of this rank and, in step, of all,
/// update, and images as they arrive when these are rounded to a half type on the device.
struct UploadLayout {
  UploadLayout(const ModelDescription& model, DType dtype, DataParallelPlace place, std::int64_t samples) {
    const DType type = input_dtype(model, dtype);
    const std::int64_t inputs = model.sample_input.shape.elements() * samples;
    target = aligned(inputs * size_of(type));
    sample_ids = target + aligned(model.sample_target.shape.elements() * samples * size_of(DType::int32));
    group_sample_ids = sample_ids + aligned(samples * size_of(DType::int64));
    update = group_sample_ids + (place.in_step ? aligned(place.size * samples * size_of(DType::int64)) : 0);
    unrounded = update + aligned(size_of(DType::int64));
    bytes = unrounded + (is_half(type) ? aligned(inputs * size_of(wide_dtype(type))) : 0);
  }
  std::int64_t target, sample_ids, group_sample_ids, update, unrounded, bytes;
};

std::int64_t uploads_at_once(const Device& device) { return device.info().kind == "cpu" ? 1 : 2; }

}  // namespace

BatchFeeder::BatchFeeder(const EngineContext& context, const Dataset& dataset, DataParallelPlace place,
                         std::int64_t max_micro_batch, int steps_ahead)
    : place_(place),
      max_micro_batch_(max_micro_batch),
      device_(context.device),
      backend_(context.backend),
      staging_(dataset.staging()),
      loader_(dataset, context.loader, max_micro_batch,
              [&device = context.device](std::int64_t bytes) -> std::shared_ptr<void> {
                const auto memory = std::make_shared<HostBuffer>(device.allocate_host(bytes));
                return {memory, memory->raw()};
              }),
      copies_(context.device.make_stream(false)) {
  for (std::int64_t i = 0; i < uploads_at_once(context.device); ++i) uploads_.push_back(make_upload(context));
  if (staging_ != nullptr) staging_->join(place.rank, place.size, steps_ahead);
}

BatchFeeder::Upload BatchFeeder::make_upload(const EngineContext& context) {
  const ModelDescription& model = context.model;
  const UploadLayout layout(model, context.training.dtype, place_, max_micro_batch_);
  const DType dtype = input_dtype(model, context.training.dtype);
  const Shape input = batched(model.sample_input.shape, max_micro_batch_);
  Upload upload;
  upload.memory = device_.allocate(layout.bytes, MemoryKind::activations);
  upload.input = upload.memory.tensor(dtype, input);
  upload.target =
      upload.memory.tensor(DType::int32, batched(model.sample_target.shape, max_micro_batch_), layout.target);
  upload.sample_ids = upload.memory.tensor(DType::int64, Shape{max_micro_batch_}, layout.sample_ids);
  upload.update = upload.memory.tensor(DType::int64, Shape{1}, layout.update);
  if (place_.in_step) {
    upload.group_sample_ids =
        upload.memory.tensor(DType::int64, Shape{place_.size * max_micro_batch_}, layout.group_sample_ids);
  }
  if (is_half(dtype)) upload.unrounded = upload.memory.tensor(wide_dtype(dtype), input, layout.unrounded);
  upload.arrived = copies_->make_event();
  upload.used = copies_->make_event();
  return upload;
}

std::int64_t BatchFeeder::device_bytes(const EngineContext& context, DataParallelPlace place,
                                       std::int64_t max_micro_batch) {
  return uploads_at_once(context.device) *
         UploadLayout(context.model, context.training.dtype, place, max_micro_batch).bytes;
}

std::int64_t BatchFeeder::step_samples(std::int64_t step) const {
  return static_cast<std::int64_t>(plan_->step_ids(step).size());
}

/// The micro-batches of a step that `rank` has, as offsets into its part of it. Rank 0's part is the largest.
std::vector<Part> BatchFeeder::windows(std::int64_t step, int rank) const {
  if (place_.size == 0) return {};
  const std::int64_t part = split_evenly(step_samples(step), place_.size, rank).count;
  return split_in_pieces(place_.in_step ? rounded_up(part, place_.shared_by) : part, max_micro_batch_);
}

/// What `rank` has of a window, as offsets into the step.
Part BatchFeeder::samples_of(const Request& request, int rank) const {
  const Part part = split_evenly(step_samples(request.step), place_.size, rank);
  const std::int64_t begin = std::min(request.window.begin, part.count);
  return {part.begin + begin, std::min(request.window.count, part.count - begin)};
}

void BatchFeeder::begin(const EpochPlan& plan) {
  copies_->synchronize();
  while (loader_.outstanding() > 0) loader_.next();
  sent_ahead_ = false;
  if (staging_ != nullptr) staging_->begin(plan);
  plan_ = &plan;
  step_ = 0;
  ahead_step_ = 0;
  ahead_piece_ = 0;
  asked_.clear();
  ahead_pieces_.clear();
  if (plan.steps() > 0) ahead_pieces_ = windows(0, own_windows());
  read_ahead(Patience::none);
}

std::span<const Part> BatchFeeder::begin_step() {
  PDL_CHECK(plan_ != nullptr && step_ < plan_->steps(), "no step left in the plan");
  if (staging_ != nullptr) staging_->begin_step(step_);
  pieces_ = windows(step_, own_windows());
  rounds_ = static_cast<std::int64_t>(windows(step_, 0).size());
  ++step_;
  return pieces_;
}

MicroBatch BatchFeeder::next(Stream& stream, std::int64_t update) {
  if (!sent_ahead_) send();
  sent_ahead_ = false;
  Upload& upload = uploads_[next_upload_];
  next_upload_ = (next_upload_ + 1) % uploads_.size();
  // All work on what lies where the next one goes is queued by now.
  stream.record(*uploads_[next_upload_].used);
  stream.wait(*upload.arrived);
  device_.copy(upload.update.raw(), &update, sizeof update, stream);
  MicroBatch batch;
  batch.size = upload.size;
  batch.input = upload.input.rows(0, upload.size);
  batch.target = upload.target.rows(0, upload.size);
  batch.sample_ids = upload.sample_ids.rows(0, upload.size);
  batch.update = upload.update;
  if (upload.unrounded.defined()) backend_.copy(batch.input, upload.unrounded.rows(0, upload.size));
  if (place_.in_step) batch.group_sample_ids = upload.group_sample_ids.rows(0, place_.size * upload.size);
  if (upload.filled_up > 0) {
    const std::int64_t real = upload.size - upload.filled_up;
    backend_.fill(batch.input.rows(real, upload.filled_up), 0.0);
    backend_.fill(batch.target.rows(real, upload.filled_up), -1.0);
    backend_.fill(batch.sample_ids.rows(real, upload.filled_up), 0.0);
  }
  return batch;
}

void BatchFeeder::send_ahead() {
  if (uploads_.size() == 1 || sent_ahead_) return;
  read_ahead(Patience::none);
  if (loader_.outstanding() == 0) return;
  send();
  sent_ahead_ = true;
}

void BatchFeeder::send() {
  copies_->synchronize();  // what was sent before has left the loader's memory
  read_ahead(Patience::for_one_batch);
  const HostBatch& host = loader_.next();
  const Request request = asked_.front();
  asked_.pop_front();
  Upload& upload = uploads_[next_upload_];
  upload.size = request.window.count;
  upload.filled_up = upload.size - host.size;
  copies_->wait(*upload.used);
  const Tensor& arrival = upload.unrounded.defined() ? upload.unrounded : upload.input;
  device_.copy(arrival.raw(), host.input.raw(), arrival.rows(0, host.size).bytes(), *copies_);
  device_.copy(upload.target.raw(), host.target.raw(), upload.target.rows(0, host.size).bytes(), *copies_);
  device_.copy(upload.sample_ids.raw(), host.sample_ids.raw(), host.sample_ids.bytes(), *copies_);
  if (place_.in_step) send_group_ids(upload, request);
  copies_->record(*upload.arrived);
  read_ahead(Patience::none);
}

/// The plan tells every rank which samples the others have.
void BatchFeeder::send_group_ids(const Upload& upload, const Request& request) {
  const std::span<const std::int64_t> ids = plan_->step_ids(request.step);
  group_ids_.assign(static_cast<std::size_t>(place_.size * request.window.count), 0);
  for (int rank = 0; rank < place_.size; ++rank) {
    const Part samples = samples_of(request, rank);
    std::copy_n(ids.begin() + samples.begin, samples.count, group_ids_.begin() + rank * request.window.count);
  }
  const auto bytes = static_cast<std::int64_t>(group_ids_.size() * sizeof(std::int64_t));
  device_.copy(upload.group_sample_ids.raw(), group_ids_.data(), bytes, *copies_);
}

/// Asks for as much as the loader takes. Samples that are still on their way from other ranks are waited for only when
/// there is nothing else to read and a batch is wanted.
void BatchFeeder::read_ahead(Patience patience) {
  while (ahead_step_ < plan_->steps() && loader_.outstanding() < loader_.capacity()) {
    if (ahead_piece_ == ahead_pieces_.size()) {
      if (++ahead_step_ == plan_->steps()) return;
      ahead_piece_ = 0;
      ahead_pieces_ = windows(ahead_step_, own_windows());
      continue;
    }
    if (staging_ != nullptr && !staging_->at_hand(ahead_step_)) {
      if (patience == Patience::none || loader_.outstanding() > 0) return;
      staging_->wait(ahead_step_);
    }
    asked_.push_back({ahead_step_, ahead_pieces_[ahead_piece_++]});
    const Part samples = samples_of(asked_.back(), place_.rank);
    loader_.push(plan_->step_ids(ahead_step_)
                     .subspan(static_cast<std::size_t>(samples.begin), static_cast<std::size_t>(samples.count)));
  }
}

}  // namespace pdl
