#include "parallel/pipeline/staged_model.h"

#include "parallel/comm/self_communicator.h"
#include "parallel/comm/world.h"
#include "parallel/pipeline/pipeline_forecast.h"

namespace pdl {

StagedModel::StagedModel(const EngineContext& context, PipelineOptions options, const StageUpdateOptions& update)
    : context_(context),
      rank_(context.world.rank()),
      plan_(context, std::move(options)),
      stage_(plan_.place().pp),
      parts_(plan_.make_parts(stage_)),
      executor_(part_pointers(), plan_.executor_size(stage_), context.device, context.backend),
      update_(context, plan_, part_pointers(), update),
      parameters_(context, plan_) {}

std::vector<StagePart*> StagedModel::part_pointers() const {
  std::vector<StagePart*> pointers;
  for (const std::unique_ptr<StagePart>& part : parts_) pointers.push_back(part.get());
  return pointers;
}

/// The ranks that share all coordinates but the one along `axis`. Collective over the world.
std::unique_ptr<Communicator> StagedModel::split(const std::string& axis, const std::string& name) const {
  const std::vector<int> members = plan_.grid().group(axis, rank_);
  if (members.size() == 1) return make_self_communicator(context_.device, name);
  return context_.world.split(members.front(), rank_, name);
}

void StagedModel::prepare() {
  if (plan_.grid().size().dp > 1) dp_ = split("dp", "dp");
  if (plan_.grid().size().tp > 1) tp_ = split("tp", "tp");
  std::unique_ptr<Communicator> activations = split("pp", "pp");
  executor_.prepare(std::move(activations), split("pp", "pp"));
  update_.prepare(dp_.get(), tp_.get());
  metrics_ = context_.device.allocate(2 * size_of(DType::fp64), MemoryKind::workspace);
  if (plan_.place().tp > 0) unheard_ = context_.device.allocate(2 * size_of(DType::fp64), MemoryKind::workspace);
  parameters_.prepare();
  training_ = plan_.make_feeder(stage_, *context_.data.train, true);
  validation_ = plan_.make_feeder(stage_, *context_.data.validation, false);
}

MemoryByKind StagedModel::predicted_memory() const {
  MemoryByKind memory = plan_.predicted_memory(stage_);
  memory += update_.predicted_memory();
  memory[MemoryKind::workspace] += (plan_.place().tp > 0 ? 4 : 2) * size_of(DType::fp64);
  memory[MemoryKind::communication] += parameters_.predicted_bytes();
  if (context_.training.deterministic) {  // two groups carry messages
    const GridSize size = plan_.grid().size();
    memory[MemoryKind::communication] += 2 * deterministic_scratch_bytes(size.pp) +
                                         deterministic_scratch_bytes(size.dp) + deterministic_scratch_bytes(size.tp);
  }
  return memory;
}

CommCounts StagedModel::predicted_traffic() const {
  CommCounts counts = plan_.predicted_messages(stage_);
  for (const auto& [key, count] : update_.predicted_traffic()) counts[key] = count;
  return counts;
}

void StagedModel::run(StageFeeder& feeder, const Schedule& schedule, Observer& observer, bool training) {
  feeder_ = &feeder;
  observer_ = &observer;
  executor_.run(schedule, stage_, *this, observer, training);
}

StepOutcome StagedModel::train_step(const StepOrder& order, Observer& observer) {
  order_ = order;
  pieces_ = training_->begin_step();
  update_.begin_step();
  if (!pieces_.empty()) {
    run(*training_, plan_.training(static_cast<int>(pieces_.size())), observer, true);
    return outcome_;
  }
  // A replica without samples in a ragged last step adds nothing, but takes part in sums and update.
  for (const std::unique_ptr<StagePart>& part : parts_) context_.backend.fill(part->store.grads(), 0.0);
  observer.phase(Phase::communication);
  reduce(0);
  observer.phase(Phase::optimizer);
  update(0);
  return outcome_;
}

void StagedModel::evaluate_step() {
  Observer nobody;
  order_ = {};
  pieces_ = validation_->begin_step();
  if (!pieces_.empty()) run(*validation_, plan_.evaluation(static_cast<int>(pieces_.size())), nobody, false);
}

MicroBatch StagedModel::load(int) {
  observer_->phase(Phase::data);
  MicroBatch batch = feeder_->next(context_.device.compute_stream(), order_.update);
  observer_->phase(Phase::forward);
  // Ranks that divide layers see the same losses; one of them tells.
  batch.metrics = plan_.place().tp == 0 ? metrics() : unheard_.tensor(DType::fp64, Shape{2});
  batch.seed = context_.training.seed;
  if (order_.global_samples > 0) {
    batch.gradient_scale =
        order_.loss_scale / static_cast<double>(order_.global_samples * context_.model.predictions_per_sample);
  }
  return batch;
}

/// Steps of fewer samples may have fewer micro-batches. The first replica has most.
void StagedModel::explain_pipeline(const EpochPlan& plan, PipelineRecord& record) {
  std::map<int, std::int64_t> steps;  // by micro-batches
  for (std::int64_t step = 0; step < plan.steps(); ++step) {
    const auto samples = static_cast<std::int64_t>(plan.step_ids(step).size());
    const Part share = split_evenly(samples, plan_.grid().size().dp, 0);
    ++steps[static_cast<int>(cut_step(share.count, plan_.options().micro_batches).size())];
  }
  std::vector<ScheduleRun> runs;
  for (const auto& [micro_batches, times] : steps) {
    runs.push_back({.schedule = plan_.training(micro_batches), .times = times});
  }
  forecast_epoch(plan_, runs, plan_.options().layer_seconds, record);
}

void StagedModel::release(int micro_batch) {
  feeder_->release(micro_batch, context_.device.compute_stream());
  feeder_->send_ahead();
}

HeldPart StagedModel::held(int dense_index) const {
  const std::string& wanted = plan_.dense().params()[static_cast<std::size_t>(dense_index)].spec.name;
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    const std::vector<Param>& params = parts_[part]->store.params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (params[i].spec.name != wanted) continue;
      const StageShards::Piece piece = update_.shards(static_cast<int>(part)).known_weights(static_cast<int>(i));
      return {params[i].spec.slice, piece.first, piece.values};
    }
  }
  PDL_CHECK(false, wanted, " is not here");
  return {};
}

std::vector<int> StagedModel::holders(int dense_index) const {
  const GridSize size = plan_.grid().size();
  const bool in_slices = update_.shards(0).distributed() && is_half(context_.training.dtype);
  std::vector<int> ranks;
  for (int tp = 0; tp < size.tp; ++tp) {
    for (int dp = 0; dp < (in_slices ? size.dp : 1); ++dp) {
      ranks.push_back(plan_.grid().rank({.tp = tp, .dp = dp, .pp = plan_.owner_of(dense_index)}));
    }
  }
  return ranks;
}

void StagedModel::visit_parameters(const Engine::ParameterVisitor& visit) {
  parameters_.visit([this](int index) { return holders(index); }, [this](int index) { return held(index); }, visit);
}

}  // namespace pdl
