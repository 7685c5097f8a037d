#include "parallel/pipeline/staged_model.h"

#include <algorithm>
#include <cstring>

#include "parallel/comm/self_communicator.h"
#include "parallel/comm/world.h"

namespace pdl {
namespace {

/// Copies elements of a slice, from its element `first` on, to where they are in the whole tensor.
void place_slice(const ParamSpec& spec, std::int64_t first, const std::vector<char>& piece, std::int64_t element_bytes,
                 std::vector<char>& whole) {
  std::int64_t run = spec.shape().elements(), pitch = 0, start = 0;
  if (spec.slice.axis >= 0) {
    std::int64_t inner = 1;
    for (int axis = spec.slice.axis + 1; axis < spec.global_shape.rank(); ++axis) inner *= spec.global_shape[axis];
    run = spec.slice.count * inner;
    pitch = spec.global_shape[spec.slice.axis] * inner;
    start = spec.slice.begin * inner;
  }
  const std::int64_t last = first + static_cast<std::int64_t>(piece.size()) / element_bytes;
  for (std::int64_t i = first; i < last;) {
    const std::int64_t count = std::min(run - i % run, last - i);  // to the end of a run
    std::memcpy(whole.data() + (i / run * pitch + start + i % run) * element_bytes,
                piece.data() + (i - first) * element_bytes, static_cast<std::size_t>(count * element_bytes));
    i += count;
  }
}

}  // namespace

StagedModel::StagedModel(const EngineContext& context, PipelineOptions options, const StageUpdateOptions& update)
    : context_(context),
      rank_(context.world.rank()),
      plan_(context, std::move(options)),
      stage_(plan_.place().pp),
      parts_(plan_.make_parts(stage_)),
      executor_(part_pointers(), plan_.executor_size(stage_), context.device, context.backend),
      update_(context, plan_, part_pointers(), update) {}

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
  if (rank_ == 0) {
    landing_ = context_.device.allocate(plan_.visit_elements() * size_of(wide_dtype(context_.training.dtype)),
                                        MemoryKind::communication);
  }
  account_ = context_.device.allocate(sizeof(Account), MemoryKind::communication);
  training_ = plan_.make_feeder(stage_, *context_.data.train, true);
  validation_ = plan_.make_feeder(stage_, *context_.data.validation, false);
}

MemoryByKind StagedModel::predicted_memory() const {
  MemoryByKind memory = plan_.predicted_memory(stage_);
  const MemoryByKind update = update_.predicted_memory();
  for (std::size_t kind = 0; kind < memory.bytes.size(); ++kind) memory.bytes[kind] += update.bytes[kind];
  memory[MemoryKind::workspace] += (plan_.place().tp > 0 ? 4 : 2) * size_of(DType::fp64);
  memory[MemoryKind::communication] += sizeof(Account);
  if (rank_ == 0) {
    memory[MemoryKind::communication] += plan_.visit_elements() * size_of(wide_dtype(context_.training.dtype));
  }
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

void StagedModel::release(int micro_batch) {
  feeder_->release(micro_batch, context_.device.compute_stream());
  feeder_->send_ahead();
}

StagedModel::Account StagedModel::account_of(int dense_index, Tensor& known) const {
  const Param& wanted = plan_.dense().params()[static_cast<std::size_t>(dense_index)];
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    const std::vector<Param>& params = parts_[part]->store.params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (params[i].spec.name != wanted.spec.name) continue;
      const ParamSlice& slice = params[i].spec.slice;
      const StageShards::Piece piece = update_.shards(static_cast<int>(part)).known_weights(static_cast<int>(i));
      known = piece.values;
      return {slice.axis, slice.begin, slice.count, piece.first, known.defined() ? known.elements() : 0};
    }
  }
  PDL_CHECK(false, wanted.spec.name, " is not here");
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

void StagedModel::send_part(int dense_index) {
  Stream& stream = context_.device.compute_stream();
  Tensor known;
  const Account account = account_of(dense_index, known);
  const Tensor words = account_.tensor(DType::int64, Shape{sizeof(Account) / sizeof(std::int64_t)});
  context_.device.copy(words.raw(), &account, sizeof account, stream);
  context_.world.send(words, 0, 0, stream).wait(stream);
  const std::int64_t most = plan_.visit_elements();
  for (std::int64_t begin = 0; begin < account.elements; begin += most) {
    context_.world.send(known.range(begin, std::min(most, account.elements - begin)), 0, 0, stream).wait(stream);
  }
  stream.synchronize();
}

/// On world rank 0: a holder's part, through a small buffer, to where it belongs in the whole.
void StagedModel::take_part(int dense_index, int holder, std::vector<char>& whole) {
  Stream& stream = context_.device.compute_stream();
  const DType dtype = wide_dtype(context_.training.dtype);
  const Shape& shape = plan_.dense().params()[static_cast<std::size_t>(dense_index)].spec.global_shape;
  Tensor known;
  Account account;
  if (holder == 0) {
    account = account_of(dense_index, known);
  } else {
    const Tensor words = account_.tensor(DType::int64, Shape{sizeof(Account) / sizeof(std::int64_t)});
    context_.world.recv(words, holder, 0, stream).wait(stream);
    context_.device.copy(&account, words.raw(), sizeof account, stream);
    stream.synchronize();
  }
  ParamSpec spec{.name = "", .global_shape = shape};
  spec.slice = {static_cast<int>(account.axis), account.begin, account.count};
  const std::int64_t most = holder == 0 ? account.elements : plan_.visit_elements();
  std::vector<char> piece;
  for (std::int64_t begin = 0; begin < account.elements; begin += most) {
    const std::int64_t count = std::min(most, account.elements - begin);
    const Tensor here = holder == 0 ? known : landing_.tensor(dtype, Shape{count});
    if (holder != 0) context_.world.recv(here, holder, 0, stream).wait(stream);
    piece.resize(static_cast<std::size_t>(here.bytes()));
    context_.device.copy(piece.data(), here.raw(), here.bytes(), stream);
    stream.synchronize();
    place_slice(spec, account.first + begin, piece, size_of(dtype), whole);
  }
}

void StagedModel::visit_parameters(const Engine::ParameterVisitor& visit) {
  const DType dtype = wide_dtype(context_.training.dtype);
  std::vector<char> whole;
  for (int index = 0; index < static_cast<int>(plan_.dense().params().size()); ++index) {
    const Param& param = plan_.dense().params()[static_cast<std::size_t>(index)];
    whole.resize(rank_ == 0 ? static_cast<std::size_t>(param.count * size_of(dtype)) : 0);
    for (int holder : holders(index)) {
      if (rank_ == 0) take_part(index, holder, whole);
      if (rank_ == holder && rank_ != 0) send_part(index);
    }
    if (rank_ == 0) visit(param.spec, param.id, Tensor(whole.data(), dtype, param.spec.shape()));
  }
}

}  // namespace pdl
