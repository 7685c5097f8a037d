#include "parallel/pipeline/staged_model.h"

#include "parallel/comm/world.h"
#include "parallel/pipeline/staged_parameters.h"

namespace pdl {

StagedModel::StagedModel(const EngineContext& context, PipelineOptions options)
    : context_(context),
      rank_(context.world.rank()),
      plan_(context, std::move(options)),
      parts_(plan_.make_parts(rank_)),
      executor_(part_pointers(), plan_.executor_size(rank_), context.device, context.backend),
      update_(context, plan_, part_pointers(), rank_) {}

std::vector<StagePart*> StagedModel::part_pointers() const {
  std::vector<StagePart*> pointers;
  for (const std::unique_ptr<StagePart>& part : parts_) pointers.push_back(part.get());
  return pointers;
}

void StagedModel::prepare() {
  for (const std::unique_ptr<StagePart>& part : parts_) {
    part->store.allocate(context_.device, context_.training.dtype);
    part->store.initialise(context_.device, context_.training.seed);
    part->store.round_master(context_.backend);
  }
  std::unique_ptr<Communicator> activations = context_.world.split(0, rank_, "pp");
  executor_.prepare(std::move(activations), context_.world.split(0, rank_, "pp"));
  update_.prepare();
  metrics_ = context_.device.allocate(2 * size_of(DType::fp64), MemoryKind::workspace);
  if (rank_ == 0) {
    landing_ = context_.device.allocate(plan_.visit_elements() * size_of(wide_dtype(context_.training.dtype)),
                                        MemoryKind::communication);
  }
  training_ = plan_.make_feeder(rank_, *context_.data.train, true);
  validation_ = plan_.make_feeder(rank_, *context_.data.validation, false);
}

void StagedModel::restored() {
  for (const std::unique_ptr<StagePart>& part : parts_) part->store.round_master(context_.backend);
}

MemoryByKind StagedModel::predicted_memory() const {
  MemoryByKind memory = plan_.predicted_memory(rank_);
  const MemoryByKind update = update_.predicted_memory();
  for (std::size_t kind = 0; kind < memory.bytes.size(); ++kind) memory.bytes[kind] += update.bytes[kind];
  memory[MemoryKind::workspace] += 2 * size_of(DType::fp64);
  if (context_.training.deterministic) {  // of the two groups that carry messages
    memory[MemoryKind::communication] += 2 * deterministic_scratch_bytes(context_.world.size());
  }
  return memory;
}

CommCounts StagedModel::predicted_traffic() const {
  CommCounts counts = plan_.predicted_messages(rank_);
  for (const auto& [key, count] : update_.predicted_traffic()) counts[key] = count;
  return counts;
}

void StagedModel::run(StageFeeder& feeder, const Schedule& schedule, Observer& observer, bool training) {
  feeder_ = &feeder;
  observer_ = &observer;
  executor_.run(schedule, rank_, *this, observer, training);
}

StepOutcome StagedModel::train_step(const StepOrder& order, Observer& observer) {
  order_ = order;
  pieces_ = training_->begin_step();
  run(*training_, plan_.training(static_cast<int>(pieces_.size())), observer, true);
  return outcome_;
}

void StagedModel::evaluate_step() {
  Observer nobody;
  order_ = {};
  pieces_ = validation_->begin_step();
  run(*validation_, plan_.evaluation(static_cast<int>(pieces_.size())), nobody, false);
}

MicroBatch StagedModel::load(int) {
  observer_->phase(Phase::data);
  MicroBatch batch = feeder_->next(context_.device.compute_stream(), order_.update);
  observer_->phase(Phase::forward);
  batch.metrics = metrics();
  batch.seed = context_.training.seed;
  if (order_.global_samples > 0) {
    batch.gradient_scale =
        order_.loss_scale / static_cast<double>(order_.global_samples * context_.model.predictions_per_sample);
  }
  return batch;
}

void StagedModel::release(int micro_batch) {
  feeder_->release(micro_batch, context_.device.compute_stream());
  feeder_->send_ahead();
}

Tensor StagedModel::held_weights(int dense_index) const {
  const Param& wanted = plan_.dense().params()[static_cast<std::size_t>(dense_index)];
  for (const std::unique_ptr<StagePart>& part : parts_) {
    const Tensor range = range_of(part->store, part->store.weights(), wanted.spec.name);
    if (range.defined()) return range;
  }
  PDL_CHECK(false, wanted.spec.name, " is not here");
  return {};
}

void StagedModel::visit_parameters(const Engine::ParameterVisitor& visit) {
  visit_staged_parameters(
      context_, plan_, landing_, [this](int index) { return held_weights(index); }, visit);
}

}  // namespace pdl
