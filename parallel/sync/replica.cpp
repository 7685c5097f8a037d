#include "parallel/sync/replica.h"

#include <cmath>

namespace pdl {

std::int64_t largest_local_batch(std::int64_t global_batch, int size) {
  return split_evenly(global_batch, size, 0).count;
}

namespace {

std::int64_t local_micro_batch(const TrainingOptions& training, DataParallelPlace place) {
  const std::int64_t local = largest_local_batch(training.global_batch, place.size);
  const std::int64_t micro_batch = training.micro_batch > 0 ? std::min(training.micro_batch, local) : local;
  const std::int64_t multiple = place.in_step ? place.shared_by : 1;
  return (micro_batch + multiple - 1) / multiple * multiple;
}

}  // namespace

Replica::Replica(const EngineContext& context, DataParallelPlace place, const LayerFactory& factory, StoreParts parts)
    : context_(context),
      place_(place),
      layers_(context.model.build(factory)),
      store_(make_param_store(layers_, 0, static_cast<int>(layers_.size()))),
      parts_(parts),
      slices_(store_, context.world),
      micro_batch_(local_micro_batch(context.training, place)),
      stage_(layers_, 0, static_cast<int>(layers_.size()), context.model.sample_input, micro_batch_,
             context.training.dtype, context.backend) {}

void Replica::prepare() {
  Device& device = context_.device;
  store_.allocate(device, context_.training.dtype, parts_);
  if (parts_.values && parts_.gradients && parts_.master) {
    store_.initialise(device, context_.training.seed);
    store_.round_master(context_.backend);
  }
  segments_ = segments();
  slices_.prepare(device);
  stage_.allocate(device);
  slot_ = stage_.make_slot(device);
  metrics_ = device.allocate(2 * size_of(DType::fp64), MemoryKind::workspace);
  norms_ = device.allocate(static_cast<std::int64_t>(segments_.size()) * size_of(DType::fp64), MemoryKind::workspace);
  touched_.assign(store_.params().size(), 0);
  training_feeder_ = std::make_unique<BatchFeeder>(context_, *context_.data.train, place_, micro_batch_);
  validation_feeder_ = std::make_unique<BatchFeeder>(context_, *context_.data.validation, place_, micro_batch_);
}

MemoryByKind Replica::predicted_memory() const {
  const DType dtype = context_.training.dtype;
  const std::int64_t feeders = 2 * BatchFeeder::device_bytes(context_, place_, micro_batch_);
  MemoryByKind memory = store_.predicted_memory(dtype, parts_);
  memory[MemoryKind::activations] = stage_.slot_bytes() + stage_.scratch_bytes() + feeders;
  memory[MemoryKind::communication] = slices_.predicted_bytes();
  memory[MemoryKind::workspace] =
      stage_.workspace_bytes() + (2 + static_cast<std::int64_t>(store_.params().size())) * size_of(DType::fp64);
  return memory;
}

std::int64_t Replica::micro_batches_per_step() const {
  const std::int64_t local = largest_local_batch(context_.training.global_batch, place_.size);
  return static_cast<std::int64_t>(split_in_pieces(local, micro_batch_).size());
}

void Replica::accumulate(const StepOrder& order, GradientListener* listener, Observer& observer) {
  const std::int64_t rounds = begin_step(observer);
  if (pieces_ == 0) context_.backend.fill(store_.grads(), 0.0);
  for (std::int64_t idle = pieces_; host_ != nullptr && idle < rounds; ++idle) {
    observer.phase(Phase::communication);
    const bool is_last = pieces_ == 0 && idle + 1 == rounds;
    stage_.idle_pass(store_, *host_, true, is_last ? listener : nullptr);
  }
  touched_.assign(touched_.size(), 0);
  for (std::int64_t piece = 0; piece < pieces_; ++piece) {
    train_micro_batch(piece, order, piece + 1 == pieces_ ? listener : nullptr, observer);
  }
}

std::int64_t Replica::begin_step(Observer& observer) {
  observer.phase(Phase::data);
  pieces_ = static_cast<std::int64_t>(training_feeder_->begin_step().size());
  return training_feeder_->rounds();
}

void Replica::run_round(std::int64_t round, const StepOrder& order, GradientListener* listener, Observer& observer) {
  touched_.assign(touched_.size(), 0);
  if (round < pieces_) {
    train_micro_batch(round, order, listener, observer);
  } else {
    observer.phase(Phase::communication);
    stage_.idle_pass(store_, *host_, true, listener);
  }
}

void Replica::train_micro_batch(std::int64_t piece, const StepOrder& order, GradientListener* listener,
                                Observer& observer) {
  observer.task_begin({.kind = TaskKind::micro_batch, .number = piece});
  const auto predictions = static_cast<double>(order.global_samples * context_.model.predictions_per_sample);
  observer.phase(Phase::data);
  MicroBatch batch = training_feeder_->next(context_.device.compute_stream(), order.update);
  batch.metrics = metrics();
  batch.seed = context_.training.seed;
  batch.gradient_scale = order.loss_scale / predictions;
  observer.phase(Phase::forward);
  forward(batch, true);
  observer.phase(Phase::backward);
  if (host_ != nullptr) {
    stage_.backward(store_, *host_, touched_, slot_, batch, batch.input, Tensor(), listener);
  } else {
    stage_.backward(store_, store_.values(), store_.grads(), touched_, slot_, batch, batch.input, Tensor(), listener);
  }
  training_feeder_->send_ahead();
  observer.task_end();
}

void Replica::forward(const MicroBatch& batch, bool training) {
  if (host_ != nullptr) {
    stage_.forward(store_, *host_, slot_, batch, batch.input, training);
  } else {
    stage_.forward(store_, store_.values(), slot_, batch, batch.input, training);
  }
}

void Replica::evaluate_step() {
  Stream& stream = context_.device.compute_stream();
  const auto pieces = static_cast<std::int64_t>(validation_feeder_->begin_step().size());
  for (std::int64_t round = 0; round < validation_feeder_->rounds(); ++round) {
    if (round < pieces) {
      MicroBatch batch = validation_feeder_->next(stream, 0);
      batch.metrics = metrics();
      forward(batch, false);
      validation_feeder_->send_ahead();
    } else if (host_ != nullptr) {
      stage_.idle_pass(store_, *host_, false, nullptr);
    }
  }
}

void Replica::clear_metrics() { context_.backend.fill(metrics(), 0.0); }

std::vector<double> Replica::gradient_squares() {
  const auto count = static_cast<std::int64_t>(segments_.size());
  const Tensor norms = norms_.tensor(DType::fp64, Shape{count});
  context_.backend.sum_of_squares(norms, store_.grads(), segments_.data(), count);
  std::vector<double> squares(segments_.size());
  Stream& stream = context_.device.compute_stream();
  context_.device.copy(squares.data(), norms.raw(), norms.bytes(), stream);
  stream.synchronize();
  return squares;
}

double Replica::gradient_square_sum() {
  std::vector<double> squares = gradient_squares();
  slices_.sum_squares(squares);
  double sum = 0.0;
  for (double square : squares) sum += square;
  return sum;
}

std::string Replica::describe_nonfinite() {
  const std::vector<double> squares = gradient_squares();
  for (std::size_t i = 0; i < squares.size(); ++i) {
    if (!std::isfinite(squares[i])) return str("first in the gradient of ", store_.params()[i].spec.name);
  }
  return "";
}

void Replica::visit_parameters(const Engine::ParameterVisitor& visit) {
  const bool is_first = context_.world.rank() == 0;
  Stream& stream = context_.device.compute_stream();
  std::vector<char> host;
  for (std::size_t i = 0; i < store_.params().size(); ++i) {
    const Param& param = store_.params()[i];
    const int index = static_cast<int>(i);
    const Tensor values = store_.view(store_.weights(), index);
    const Shape& whole = param.spec.global_shape;
    if (is_first) host.resize(static_cast<std::size_t>(whole.elements() * size_of(values.dtype())));
    if (param.spec.slice.axis >= 0) {
      slices_.gather(index, values, store_.view(store_.grads(), index), host.data());
    } else if (is_first) {
      context_.device.copy(host.data(), values.raw(), values.bytes(), stream);
      stream.synchronize();
    }
    if (!is_first) continue;
    ParamSpec spec = param.spec;
    spec.slice = {};
    visit(spec, param.id, Tensor(host.data(), values.dtype(), whole));
  }
}

}  // namespace pdl
