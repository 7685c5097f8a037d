#include "parallel/pipeline/stage_update.h"

#include <algorithm>
#include <cmath>

#include "parallel/comm/world.h"

namespace pdl {
namespace {

Shape vector_of(std::size_t count) { return Shape{static_cast<std::int64_t>(count)}; }

}  // namespace

StageUpdate::StageUpdate(const EngineContext& context, const PipelinePlan& plan, const std::vector<StagePart*>& parts,
                         int rank)
    : context_(context), plan_(plan), rank_(rank) {
  for (StagePart* part : parts) {
    parts_.push_back({.part = part,
                      .segments = part->store.segments(context.training.optimizer.decay_biases_and_norms),
                      .optimizer = make_optimizer(context.training.optimizer)});
  }
}

void StageUpdate::prepare() {
  for (PartUpdate& mine : parts_) {
    mine.optimizer->allocate(context_.device, mine.part->store.elements(), context_.training.dtype, mine.segments);
  }
  for (const TiedPair& tied : plan_.tied()) {
    const bool member = rank_ == tied.rank || rank_ == tied.copy_rank;
    Tie tie;
    // All ranks take part in the split; those outside the pair get a group of their own, of no use.
    std::unique_ptr<Communicator> group = context_.world.split(member ? 0 : 1 + rank_, rank_, "tied");
    if (member) tie.pair = std::move(group);
    for (const PartUpdate& mine : parts_) {
      const ParamStore& store = mine.part->store;
      for (std::size_t i = 0; i < store.params().size(); ++i) {
        const std::string& name = store.params()[i].spec.name;
        const bool is_it = rank_ == tied.rank ? name == tied.name : name == tied.copy_name;
        if (member && is_it) tie.gradient = store.view(store.grads(), static_cast<int>(i));
      }
    }
    PDL_CHECK(!member || tie.gradient.defined(), tied.copy_name, " is tied to nothing here");
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
  for (const PartUpdate& mine : parts_) most = std::max(most, mine.segments.size());
  return static_cast<std::int64_t>(most);
}

MemoryByKind StageUpdate::predicted_memory() const {
  MemoryByKind memory;
  for (const PartUpdate& mine : parts_) {
    memory[MemoryKind::optimizer] +=
        optimizer_bytes(context_.training.optimizer, mine.part->store.elements(), context_.training.dtype,
                        static_cast<std::int64_t>(mine.segments.size()));
  }
  memory[MemoryKind::workspace] = most_segments() * size_of(DType::fp64);
  if (needs_norm()) {
    memory[MemoryKind::communication] = static_cast<std::int64_t>(plan_.dense().params().size()) * size_of(DType::fp64);
  }
  if (context_.training.deterministic) {
    for (const TiedPair& tied : plan_.tied()) {
      if (rank_ == tied.rank || rank_ == tied.copy_rank) {
        memory[MemoryKind::communication] += deterministic_scratch_bytes(2);
      }
    }
  }
  return memory;
}

CommCounts StageUpdate::predicted_traffic() const {
  CommCounts counts;
  const auto add = [&](const char* key, int ranks, std::int64_t bytes) {
    counts[key].calls += 1;
    counts[key].bytes += ring_bytes("all_reduce", ranks, bytes);
  };
  for (const TiedPair& tied : plan_.tied()) {
    if (rank_ != tied.rank && rank_ != tied.copy_rank) continue;
    add("tied.all_reduce", 2, tied.elements * size_of(wide_dtype(context_.training.dtype)));
  }
  if (needs_norm() && context_.world.size() > 1) {
    add("world.all_reduce", context_.world.size(),
        static_cast<std::int64_t>(plan_.dense().params().size()) * size_of(DType::fp64));
  }
  return counts;
}

void StageUpdate::sum_tied() {
  Stream& stream = context_.device.compute_stream();
  for (Tie& tie : ties_) {
    if (tie.pair) tie.pair->all_reduce(tie.gradient, ReduceOp::sum, stream).wait(stream);
  }
}

std::vector<double> StageUpdate::squares_of(const PartUpdate& mine) {
  std::vector<double> squares(mine.segments.size());
  if (squares.empty()) return squares;
  const Tensor sums = sums_.tensor(DType::fp64, vector_of(squares.size()));
  context_.backend.sum_of_squares(sums, mine.part->store.grads(), mine.segments.data(),
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
    const std::vector<double> squares = squares_of(mine);
    for (std::size_t i = 0; i < squares.size(); ++i) {
      const Param& param = mine.part->store.params()[i];
      if (param.spec.tied_to.empty()) all[static_cast<std::size_t>(plan_.dense().owner(param.id))] = squares[i];
    }
  }
  Stream& stream = context_.device.compute_stream();
  const Tensor sums = all_sums_.tensor(DType::fp64, vector_of(all.size()));
  context_.device.copy(sums.raw(), all.data(), sums.bytes(), stream);
  context_.world.all_reduce(sums, ReduceOp::sum, stream).wait(stream);
  context_.device.copy(all.data(), sums.raw(), sums.bytes(), stream);
  stream.synchronize();
  double total = 0.0;
  for (double square : all) total += square;
  return total;
}

StepOutcome StageUpdate::apply(const StepOrder& order) {
  GradientScaling scaling;
  if (needs_norm()) {
    scaling = gradient_scaling(global_square_sum(), order.loss_scale, context_.training.optimizer.clip_grad_norm);
  }
  if (order.skips_overflow && scaling.overflow) return {.grad_norm = scaling.norm, .skipped = true};
  for (PartUpdate& mine : parts_) {
    const ParamStore& store = mine.part->store;
    if (store.elements() == 0) continue;
    mine.optimizer->step(context_.backend, {.values = store.weights(),
                                            .grads = store.grads(),
                                            .rounded = is_half(store.dtype()) ? store.values() : Tensor(),
                                            .lr = order.lr,
                                            .grad_scale = scaling.factor,
                                            .update = order.update + 1});
  }
  return {.grad_norm = scaling.norm};
}

std::string StageUpdate::describe_nonfinite() {
  for (const PartUpdate& mine : parts_) {
    const std::vector<double> squares = squares_of(mine);
    for (std::size_t i = 0; i < squares.size(); ++i) {
      if (!std::isfinite(squares[i])) return str("first in the gradient of ", mine.part->store.params()[i].spec.name);
    }
  }
  return "";
}

std::vector<StateTensor> StageUpdate::state() const {
  std::vector<StateTensor> tensors;
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    const std::string suffix = part == 0 ? "" : str(".", part);
    tensors.push_back({"weights" + suffix, parts_[part].part->store.weights()});
    const std::vector<Tensor> moments = parts_[part].optimizer->state();
    for (std::size_t i = 0; i < moments.size(); ++i) tensors.push_back({str("moment", i, suffix), moments[i]});
  }
  return tensors;
}

}  // namespace pdl
