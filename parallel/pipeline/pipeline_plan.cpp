#include "parallel/pipeline/pipeline_plan.h"

#include <algorithm>
#include <numeric>

#include "parallel/pipeline/schedule_check.h"

namespace pdl {

namespace {

LayerList build_layers(const ModelDescription& model, const LayerFactory* factory) {
  return factory != nullptr ? model.build(*factory) : model.build(LayerFactory());
}

ParamStore dense_store(const ModelDescription& model) {
  const LayerList layers = model.build(LayerFactory());
  return make_param_store(layers, 0, static_cast<int>(layers.size()));
}

}  // namespace

PipelinePlan::PipelinePlan(const EngineContext& context, PipelineOptions options)
    : context_(context),
      options_(std::move(options)),
      place_(options_.grid.coordinate(context.world.rank())),
      layers_(build_layers(context.model, options_.factory)),
      dense_(dense_store(context.model)) {
  PDL_CHECK(static_cast<int>(options_.balance.size()) == options_.stages * options_.chunks, "a balance of ",
            options_.balance.size(), " stages");
  if (options_.replicas.empty()) options_.replicas.assign(static_cast<std::size_t>(options_.stages), 1);
  for (int stage = 0; stage < options_.stages; ++stage) {
    first_rank_.push_back(ranks());
    stage_of_.insert(stage_of_.end(), static_cast<std::size_t>(replicas_of(stage)), stage);
  }
  PDL_CHECK(options_.grid.size().pp == ranks(), "a grid of ", options_.grid.size().pp, " ranks in a pipeline of ",
            ranks());
  for (int micro_batches : typical_steps()) {
    check_schedule(training(micro_batches));
    check_schedule(evaluation(micro_batches));
  }
  for (const int rank : first_rank_) {
    for (const std::unique_ptr<StagePart>& part : make_parts(rank)) {
      for (const Param& param : part->store.params()) {
        if (param.spec.tied_to.empty()) continue;  // what is tied within a stage has no range of its own
        const int owner = owner_of(dense_.owner(param.id));
        PDL_CHECK(owner != rank, param.spec.name, " and ", param.spec.tied_to, " are on one rank, in two stages");
        tied_.push_back({param.spec.tied_to, param.spec.name, owner, rank, param.count});
      }
    }
  }
}

Schedule PipelinePlan::evaluation(int micro_batches) const {
  return forward_only(options_.replicas, micro_batches, options_.chunks, options_.gathered_loss);
}

/// Layers [first, last) of a virtual stage. The last one has the loss unless it is gathered.
LayerRange PipelinePlan::layer_range(int virtual_stage) const {
  const std::vector<int> begins = stage_begins(options_.balance);
  const auto stage = static_cast<std::size_t>(virtual_stage);
  const bool has_loss = stage + 1 == options_.balance.size() && !options_.gathered_loss;
  return {begins[stage], begins[stage + 1] + (has_loss ? 1 : 0)};
}

std::int64_t PipelinePlan::largest_share() const {
  return split_evenly(context_.training.global_batch, options_.grid.size().dp, 0).count;
}

std::int64_t PipelinePlan::largest_micro_batch() const {
  return cut_step(largest_share(), options_.micro_batches)[0].count;
}

std::vector<int> PipelinePlan::typical_steps() const {
  std::vector<int> steps = {scheduled()};
  if (options_.chunks == 1) return steps;  // a step of fewer micro-batches needs no more room
  for (int fewer = 1; fewer < std::min(options_.micro_batches, 4 * options_.stages); ++fewer) steps.push_back(fewer);
  return steps;
}

std::vector<LayerRange> PipelinePlan::layer_ranges(int rank) const {
  std::vector<LayerRange> ranges;
  for (int chunk = 0; chunk < options_.chunks; ++chunk) {
    ranges.push_back(layer_range(chunk * options_.stages + stage_of(rank)));
  }
  return ranges;
}

std::vector<LayerRange> PipelinePlan::recomputed(int rank) const {
  std::vector<LayerRange> all;
  for (const LayerRange& range : layer_ranges(rank)) {
    const std::vector<LayerRange> some = recomputed_in(range);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

std::vector<std::unique_ptr<StagePart>> PipelinePlan::make_parts(int rank) const {
  std::vector<std::unique_ptr<StagePart>> parts;
  const auto add = [&](int first, int last) {
    parts.push_back(std::make_unique<StagePart>(layers_, first, last, context_.model, largest_micro_batch(),
                                                context_.training.dtype, context_.backend,
                                                recomputed_in({first, last})));
  };
  for (const auto& [first, last] : layer_ranges(rank)) add(first, last);
  const int layers = static_cast<int>(layers_.size());
  if (options_.gathered_loss && stage_of(rank) + 1 == options_.stages) add(layers - 1, layers);
  return parts;
}

ExecutorSize PipelinePlan::executor_size(int rank) const {
  const Schedule schedule = training(scheduled());
  ExecutorSize size{.needs = needs_of(schedule, rank),
                    .send_buffers = schedule.send_buffers,
                    .max_samples = largest_micro_batch(),
                    .gathered_samples = largest_share()};
  for (int micro_batches : typical_steps()) {
    for (const Schedule& other : {training(micro_batches), evaluation(micro_batches)}) {
      const RankNeeds needed = needs_of(other, rank);
      size.send_buffers = std::max(size.send_buffers, other.send_buffers);
      for (std::size_t chunk = 0; chunk < size.needs.chunks.size(); ++chunk) {
        ChunkNeeds& needs = size.needs.chunks[chunk];
        needs.inputs = std::max(needs.inputs, needed.chunks[chunk].inputs);
        needs.slots = std::max(needs.slots, needed.chunks[chunk].slots);
      }
    }
  }
  return size;
}

StageNeeds PipelinePlan::data_needs(int rank) const {
  return {stage_of(rank) == 0, stage_of(rank) + 1 == options_.stages};
}

/// On a GPU one more, so that the next micro-batch travels while the device still works on those that are held.
int PipelinePlan::held(int rank, bool training_step) const {
  int most = 0;
  for (int micro_batches : typical_steps()) {
    const Schedule schedule = training_step ? training(micro_batches) : evaluation(micro_batches);
    most = std::max(most, needs_of(schedule, rank).micro_batches);
  }
  const int ahead = context_.device.info().kind == "cpu" ? 0 : 1;
  return std::min(most + ahead, scheduled());
}

std::unique_ptr<StageFeeder> PipelinePlan::make_feeder(int rank, const Dataset& dataset, bool training_step) const {
  return std::make_unique<StageFeeder>(context_, dataset, data_needs(rank), largest_share(), options_.micro_batches,
                                       held(rank, training_step), place_.dp, options_.grid.size().dp);
}

int PipelinePlan::owner_of(int dense_index) const {
  const int layer = dense_.params()[static_cast<std::size_t>(dense_index)].layer;
  for (int stage = 0; stage < static_cast<int>(options_.balance.size()); ++stage) {
    const auto [first, last] = layer_range(stage);
    if (layer >= first && layer < last) return first_rank_of(stage % options_.stages);
  }
  PDL_CHECK(false, "layer ", layer, " is on no stage");
  return -1;
}

std::int64_t PipelinePlan::visit_elements() const {
  constexpr std::int64_t kMostElements = 1 << 18;
  std::int64_t largest = 0;
  for (int index = 0; index < static_cast<int>(dense_.params().size()); ++index) {
    const bool is_elsewhere = owner_of(index) != 0 || options_.grid.size().tp > 1 || options_.grid.size().dp > 1;
    if (is_elsewhere) largest = std::max(largest, dense_.params()[static_cast<std::size_t>(index)].count);
  }
  return std::min(largest, kMostElements);
}

MemoryByKind PipelinePlan::predicted_memory(int rank) const {
  const std::vector<std::unique_ptr<StagePart>> parts = make_parts(rank);
  std::vector<StagePart*> pointers;
  for (const auto& part : parts) pointers.push_back(part.get());
  MemoryByKind memory =
      PipelineExecutor(pointers, executor_size(rank), context_.device, context_.backend).predicted_memory();
  for (bool training_step : {true, false}) {
    memory[MemoryKind::activations] += StageFeeder::device_bytes(context_, data_needs(rank), largest_share(),
                                                                 options_.micro_batches, held(rank, training_step));
  }
  return memory;
}

CommCounts PipelinePlan::predicted_messages(int rank) const {
  const std::vector<std::unique_ptr<StagePart>> parts = make_parts(rank);
  const Part share = split_evenly(context_.training.global_batch, options_.grid.size().dp, place_.dp);
  const std::vector<Part> pieces = cut_step(share.count, options_.micro_batches);
  CommCounts counts;
  const Schedule schedule = training(options_.micro_batches);
  for (const Action& action : schedule.ranks[static_cast<std::size_t>(rank)].actions) {
    const Stage& stage = parts[static_cast<std::size_t>(action.chunk)]->stage;
    const std::int64_t samples = pieces[static_cast<std::size_t>(action.micro_batch)].count;
    if (action.act == Act::receive_activation || action.act == Act::receive_gradient) ++counts["pp.recv"].calls;
    if (action.act != Act::send_activation && action.act != Act::send_gradient) continue;
    const bool forward = action.act == Act::send_activation;
    counts["pp.send"].calls += 1;
    counts["pp.send"].bytes += (forward ? stage.output_spec(samples) : stage.input_spec(samples)).bytes();
  }
  return counts;
}

std::vector<StageCost> PipelinePlan::stage_costs(const std::vector<LayerCost>& layers) const {
  std::vector<StageCost> costs;
  const std::vector<int> begins = stage_begins(options_.balance);
  for (std::size_t stage = 0; stage < options_.balance.size(); ++stage) {
    StageCost cost{.forward = 0.0, .backward = 0.0, .recompute = 0.0};
    for (int layer = begins[stage]; layer < begins[stage + 1]; ++layer) {
      cost.forward += layers[static_cast<std::size_t>(layer)].forward;
      cost.backward += layers[static_cast<std::size_t>(layer)].backward;
    }
    cost.recompute = cost.forward;
    for (const LayerRange& again : recomputed_in(layer_range(static_cast<int>(stage)))) {
      for (int layer = again.first; layer < again.second; ++layer) {
        cost.backward += layers[static_cast<std::size_t>(layer)].forward;
      }
    }
    costs.push_back(cost);
  }
  return costs;
}

}  // namespace pdl
