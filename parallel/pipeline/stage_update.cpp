#include "parallel/pipeline/stage_update.h"

#include <algorithm>
#include <cmath>

#include "parallel/comm/world.h"

namespace pdl {
namespace {

Shape vector_of(std::size_t count) { return Shape{static_cast<std::int64_t>(count)}; }

/// Index into params() of the parameter of this name; -1 when it is not there.
int find_param(const ParamStore& store, const std::string& name) {
  for (std::size_t i = 0; i < store.params().size(); ++i) {
    if (store.params()[i].spec.name == name) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace

StageUpdate::StageUpdate(const EngineContext& context, const PipelinePlan& plan, const std::vector<StagePart*>& parts,
                         const StageUpdateOptions& options)
    : context_(context),
      plan_(plan),
      stage_(plan.place().pp),
      place_(plan.place()),
      size_(plan.grid().size()),
      options_(options) {
  options_.replica.rank = place_.dp;
  options_.replica.size = size_.dp;
  for (StagePart* part : parts) {
    PartUpdate mine{.part = part, .shards = nullptr};
    bool has_partial = false;
    const std::vector<std::vector<int>> alone = blocks_alone(part->store, has_partial);
    mine.shards = std::make_unique<StageShards>(*part, alone, context.training.optimizer, context.training.dtype,
                                                options_.replica);
    if (has_partial) mine.partial = mine.shards->block_of(alone.front().front());
    parts_.push_back(std::move(mine));
  }
}

/// Parameters with partial gradients, if any, then each that another stage shares.
std::vector<std::vector<int>> StageUpdate::blocks_alone(const ParamStore& store, bool& has_partial) const {
  std::vector<std::vector<int>> alone(1);
  for (std::size_t i = 0; options_.is_partial && i < store.params().size(); ++i) {
    if (options_.is_partial(store.params()[i].spec)) alone[0].push_back(static_cast<int>(i));
  }
  has_partial = !alone[0].empty();
  for (const TiedPair& tied : plan_.tied()) {
    const int index = is_member(tied) ? find_param(store, stage_ == tied.rank ? tied.name : tied.copy_name) : -1;
    if (index >= 0) alone.push_back({index});
  }
  return alone;
}

void StageUpdate::find_tie(const TiedPair& tied, Tie& tie) const {
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    const int index = find_param(parts_[part].part->store, stage_ == tied.rank ? tied.name : tied.copy_name);
    if (index >= 0) {
      tie.part = static_cast<int>(part);
      tie.block = parts_[part].shards->block_of(index);
    }
  }
  PDL_CHECK(tie.part >= 0, tied.copy_name, " is tied to nothing here");
}

void StageUpdate::prepare(Communicator* dp, Communicator* tp) {
  dp_ = dp;
  tp_ = tp;
  for (PartUpdate& mine : parts_) {
    mine.shards->prepare(context_.device, context_.backend, dp, context_.training.seed);
  }
  for (const TiedPair& tied : plan_.tied()) {
    // All ranks take part in the split; those outside the pairs get groups of their own, of no use.
    const int replica = place_.dp * size_.tp + place_.tp, outside = size_.dp * size_.tp + context_.world.rank();
    Tie tie;
    std::unique_ptr<Communicator> group = context_.world.split(is_member(tied) ? replica : outside, stage_, "tied");
    if (is_member(tied)) {
      find_tie(tied, tie);
      tie.pair = std::move(group);
    }
    ties_.push_back(std::move(tie));
  }
  sums_ = context_.device.allocate(most_segments() * size_of(DType::fp64), MemoryKind::workspace);
  if (needs_norm()) {
    all_sums_ = context_.device.allocate(
        static_cast<std::int64_t>(plan_.dense().params().size()) * size_of(DType::fp64), MemoryKind::communication);
  }
}

std::int64_t StageUpdate::most_segments() const {
  std::size_t most = 0;
  for (const PartUpdate& mine : parts_) {
    for (const ShardBlock& block : mine.shards->map().blocks()) most = std::max(most, block.params.size());
  }
  return static_cast<std::int64_t>(most);
}

MemoryByKind StageUpdate::predicted_memory() const {
  MemoryByKind memory;
  for (const PartUpdate& mine : parts_) memory += mine.shards->predicted_memory();
  memory[MemoryKind::workspace] += most_segments() * size_of(DType::fp64);
  if (needs_norm()) {
    memory[MemoryKind::communication] +=
        static_cast<std::int64_t>(plan_.dense().params().size()) * size_of(DType::fp64);
  }
  for (const TiedPair& tied : plan_.tied()) {
    if (context_.training.deterministic && is_member(tied)) {
      memory[MemoryKind::communication] += deterministic_scratch_bytes(2);
    }
  }
  return memory;
}

CommCounts StageUpdate::predicted_traffic() const {
  const std::int64_t element = size_of(wide_dtype(context_.training.dtype));
  CommCounts counts;
  const auto add = [&](const char* key, int ranks, std::int64_t bytes) {
    if (ranks == 1) return;
    counts[key].calls += 1;
    counts[key].bytes += ring_bytes("all_reduce", ranks, bytes);
  };
  for (const PartUpdate& mine : parts_) {
    for (const auto& [key, count] : mine.shards->predicted_traffic()) {
      counts[key].calls += count.calls;
      counts[key].bytes += count.bytes;
    }
    if (mine.partial >= 0) add("tp.all_reduce", size_.tp, mine.shards->count(mine.partial) * element);
    for (const ShardBlock& block : mine.shards->map().blocks()) {
      if (context_.training.optimizer.name != "lamb") continue;
      const auto norms = static_cast<std::int64_t>(2 * block.params.size()) * size_of(DType::fp64);
      if (mine.shards->distributed()) add("dp.all_reduce", size_.dp, norms);
      add("tp.all_reduce", size_.tp, norms);
    }
  }
  for (const TiedPair& tied : plan_.tied()) {
    if (!is_member(tied)) continue;
    Tie tie;
    find_tie(tied, tie);
    add("tied.all_reduce", 2, parts_[static_cast<std::size_t>(tie.part)].shards->count(tie.block) * element);
  }
  if (needs_norm()) {
    add("world.all_reduce", context_.world.size(),
        static_cast<std::int64_t>(plan_.dense().params().size()) * size_of(DType::fp64));
  }
  return counts;
}

void StageUpdate::begin_step() {
  for (PartUpdate& mine : parts_) mine.shards->begin_step();
}

/// Sums over replicas come first: of what two stages share, both then add the same two numbers, so their copies keep
/// the same bits. The last chunk ends its backward passes first, on every rank.
void StageUpdate::sum() {
  Stream& stream = context_.device.compute_stream();
  for (std::size_t part = parts_.size(); part-- > 0;) parts_[part].shards->end_backward();
  for (PartUpdate& mine : parts_) mine.shards->wait_for_sums();
  for (Tie& tie : ties_) {
    if (!tie.pair) continue;
    const StageShards& shards = *parts_[static_cast<std::size_t>(tie.part)].shards;
    tie.pair->all_reduce(shards.gradients(tie.block), ReduceOp::sum, stream).wait(stream);
  }
  for (PartUpdate& mine : parts_) {
    if (mine.partial < 0) continue;
    tp_->all_reduce(mine.shards->gradients(mine.partial), ReduceOp::sum, stream).wait(stream);
  }
}

/// Of what several ranks hold, one counts; of what is divided, every part.
bool StageUpdate::counts(const PartUpdate& mine, const Param& param) const {
  return param.spec.tied_to.empty() && (is_divided(param) || place_.tp == 0) &&
         (mine.shards->distributed() || place_.dp == 0);
}

std::vector<double> StageUpdate::squares_of(const PartUpdate& mine, int block) {
  const std::vector<UpdateSegment> segments = mine.shards->segments(block);
  std::vector<double> squares(segments.size());
  const Tensor sums = sums_.tensor(DType::fp64, vector_of(squares.size()));
  context_.backend.sum_of_squares(sums, mine.shards->gradients(block), segments.data(),
                                  static_cast<std::int64_t>(squares.size()));
  Stream& stream = context_.device.compute_stream();
  context_.device.copy(squares.data(), sums.raw(), sums.bytes(), stream);
  stream.synchronize();
  return squares;
}

/// Sums of squares are added in the dense model's order of parameters, a tied one once: the same bits on every rank,
/// and the same as on a single one from the same gradients. Adding zeros changes nothing.
double StageUpdate::global_square_sum() {
  std::vector<double> all(plan_.dense().params().size(), 0.0);
  for (const PartUpdate& mine : parts_) {
    for (int block = 0; block < mine.shards->blocks(); ++block) {
      const std::vector<int>& params = mine.shards->map().blocks()[static_cast<std::size_t>(block)].params;
      const std::vector<double> squares = squares_of(mine, block);
      for (std::size_t i = 0; i < squares.size(); ++i) {
        const Param& param = mine.part->store.params()[static_cast<std::size_t>(params[i])];
        if (counts(mine, param)) all[static_cast<std::size_t>(plan_.dense().owner(param.id))] = squares[i];
      }
    }
  }
  Stream& stream = context_.device.compute_stream();
  if (context_.world.size() > 1) {
    const Tensor sums = all_sums_.tensor(DType::fp64, vector_of(all.size()));
    context_.device.copy(sums.raw(), all.data(), sums.bytes(), stream);
    context_.world.all_reduce(sums, ReduceOp::sum, stream).wait(stream);
    context_.device.copy(all.data(), sums.raw(), sums.bytes(), stream);
    stream.synchronize();
  }
  double total = 0.0;
  for (double square : all) total += square;
  return total;
}

void StageUpdate::sum_norms(const PartUpdate& mine, int block, const Tensor& norms) {
  Stream& stream = context_.device.compute_stream();
  if (mine.shards->distributed()) dp_->all_reduce(norms, ReduceOp::sum, stream).wait(stream);
  if (size_.tp == 1) return;
  const std::vector<int>& params = mine.shards->map().blocks()[static_cast<std::size_t>(block)].params;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Param& param = mine.part->store.params()[static_cast<std::size_t>(params[i])];
    const auto row = static_cast<std::int64_t>(i);
    if (!is_divided(param) && place_.tp > 0) context_.backend.fill(norms.rows(row, 1), 0.0);
  }
  tp_->all_reduce(norms, ReduceOp::sum, stream).wait(stream);
}

std::function<void(Tensor)> StageUpdate::norm_sum(const PartUpdate& mine, int block) {
  if (size_.tp == 1 && !mine.shards->distributed()) return nullptr;
  return [this, &mine, block](const Tensor& norms) { sum_norms(mine, block, norms); };
}

void StageUpdate::update(PartUpdate& mine, const StepOrder& order, double factor) {
  for (int block = 0; block < mine.shards->blocks(); ++block) {
    mine.shards->optimizer(block).step(context_.backend, {.values = mine.shards->weights(block),
                                                          .grads = mine.shards->gradients(block),
                                                          .rounded = mine.shards->rounded(block),
                                                          .lr = order.lr,
                                                          .grad_scale = factor,
                                                          .update = order.update + 1,
                                                          .sum_over_shards = norm_sum(mine, block)});
  }
  mine.shards->gather(false);
}

StepOutcome StageUpdate::apply(const StepOrder& order) {
  GradientScaling scaling;
  if (needs_norm()) {
    scaling = gradient_scaling(global_square_sum(), order.loss_scale, context_.training.optimizer.clip_grad_norm);
  }
  if (order.skips_overflow && scaling.overflow) return {.grad_norm = scaling.norm, .skipped = true};
  for (PartUpdate& mine : parts_) update(mine, order, scaling.factor);
  return {.grad_norm = scaling.norm};
}

std::string StageUpdate::describe_nonfinite() {
  for (const PartUpdate& mine : parts_) {
    for (int block = 0; block < mine.shards->blocks(); ++block) {
      const std::vector<int>& params = mine.shards->map().blocks()[static_cast<std::size_t>(block)].params;
      const std::vector<double> squares = squares_of(mine, block);
      for (std::size_t i = 0; i < squares.size(); ++i) {
        if (std::isfinite(squares[i])) continue;
        return str("first in the gradient of ",
                   mine.part->store.params()[static_cast<std::size_t>(params[i])].spec.name);
      }
    }
  }
  return "";
}

std::vector<StateTensor> StageUpdate::state() const {
  std::vector<StateTensor> tensors;
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    const StageShards& shards = *parts_[part].shards;
    for (int block = 0; block < shards.blocks(); ++block) {
      const std::string suffix = str(".", part, ".", block);
      tensors.push_back({"weights" + suffix, shards.weights(block)});
      const std::vector<Tensor> moments = shards.optimizer(block).state();
      for (std::size_t i = 0; i < moments.size(); ++i) tensors.push_back({str("moment", i, suffix), moments[i]});
    }
  }
  return tensors;
}

void StageUpdate::restored() {
  for (PartUpdate& mine : parts_) mine.shards->gather(true);
}

}  // namespace pdl
