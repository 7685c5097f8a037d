#include "parallel/pipeline/pipeline_executor.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace pdl {
namespace {

constexpr int kGradientBuffers = 2;  ///< one that is used, one that is on its way
constexpr int kTags = 1 << 14;       ///< below what every MPI allows; messages of a pair come in order anyway

Phase phase_of(Act act) {
  switch (act) {
    case Act::receive_activation:
    case Act::forward:
    case Act::send_activation:
    case Act::loss:
      return Phase::forward;
    case Act::reduce:
      return Phase::communication;
    case Act::update:
      return Phase::optimizer;
    default:
      return Phase::backward;
  }
}

bool is_pass(Act act) {
  return act == Act::forward || act == Act::recompute || act == Act::loss || act == Act::backward;
}

TaskKind task_of(Act act) {
  if (act == Act::forward) return TaskKind::forward;
  if (act == Act::recompute) return TaskKind::recompute;
  return act == Act::backward ? TaskKind::backward : TaskKind::loss;
}

/// Says that a pass is under way as long as this lives. What the pass needs is there.
class AnnouncedPass {
 public:
  AnnouncedPass(Observer& observer, const Action& action) : observer_(observer) {
    observer_.task_begin({.kind = task_of(action.act), .number = action.micro_batch, .chunk = action.chunk});
  }
  ~AnnouncedPass() { observer_.task_end(); }
  AnnouncedPass(const AnnouncedPass&) = delete;
  AnnouncedPass& operator=(const AnnouncedPass&) = delete;

 private:
  Observer& observer_;
};

bool is_first_stage(const Schedule& schedule, int rank, int chunk) { return schedule.virtual_stage(rank, chunk) == 0; }
bool is_last_stage(const Schedule& schedule, int rank, int chunk) {
  return schedule.virtual_stage(rank, chunk) + 1 == schedule.virtual_stages();
}

}  // namespace

PipelineExecutor::PipelineExecutor(std::vector<StagePart*> parts, const ExecutorSize& size, Device& device,
                                   Backend& backend)
    : parts_(std::move(parts)), size_(size), device_(device), backend_(backend) {
  PDL_CHECK(parts_.size() == size.needs.chunks.size() + (size.needs.gathers_loss ? 1 : 0), parts_.size(), " parts");
  for (const StagePart* part : parts_) touched_.emplace_back(part->store.params().size(), 0);
}

std::vector<Inbox::Pool> PipelineExecutor::input_pools() const {
  std::vector<Inbox::Pool> pools;
  for (std::size_t chunk = 0; chunk < size_.needs.chunks.size(); ++chunk) {
    pools.push_back({size_.needs.chunks[chunk].inputs, parts_[chunk]->stage.input_spec(size_.max_samples).bytes()});
  }
  return pools;
}

std::int64_t PipelineExecutor::largest_output() const {
  std::int64_t largest = 0;
  for (std::size_t chunk = 0; chunk < size_.needs.chunks.size(); ++chunk) {
    if (size_.needs.chunks[chunk].sends) {
      largest = std::max(largest, parts_[chunk]->stage.output_spec(size_.max_samples).bytes());
    }
  }
  return largest;
}

std::int64_t PipelineExecutor::largest_input() const {
  std::int64_t largest = 0;
  for (const Inbox::Pool& pool : input_pools()) largest = std::max(largest, pool.count > 0 ? pool.bytes : 0);
  return largest;
}

std::int64_t PipelineExecutor::gathered_bytes() const {
  return size_.needs.gathers_loss ? parts_.back()->stage.input_spec(size_.gathered_samples).bytes() : 0;
}

MemoryByKind PipelineExecutor::predicted_memory() const {
  MemoryByKind memory;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Stage& stage = parts_[i]->stage;
    const int slots = i < size_.needs.chunks.size() ? size_.needs.chunks[i].slots : 1;
    memory[MemoryKind::activations] += slots * stage.slot_bytes() + stage.scratch_bytes();
    memory[MemoryKind::workspace] += stage.workspace_bytes();
  }
  memory[MemoryKind::activations] += Inbox::bytes_of(input_pools()) + gathered_bytes();
  memory[MemoryKind::workspace] += 2 * size_of(DType::fp64);
  memory[MemoryKind::communication] += size_.send_buffers * (largest_output() + largest_input());
  memory[MemoryKind::communication] += kGradientBuffers * largest_output();
  return memory;
}

void PipelineExecutor::prepare(std::unique_ptr<Communicator> activations, std::unique_ptr<Communicator> gradients) {
  activations_ = std::move(activations);
  gradients_ = std::move(gradients);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    Stage& stage = parts_[i]->stage;
    stage.allocate(device_);
    const int slots = i < size_.needs.chunks.size() ? size_.needs.chunks[i].slots : 1;
    Room& room = rooms_.emplace_back();
    for (int slot = 0; slot < slots; ++slot) room.slots.push_back(stage.make_slot(device_));
    room.taken.assign(room.slots.size(), 0);
  }
  inputs_.allocate(device_, input_pools(), MemoryKind::activations);
  if (largest_output() > 0) {
    outputs_.allocate(device_, size_.send_buffers, largest_output());
    output_gradients_.allocate(device_, {{kGradientBuffers, largest_output()}}, MemoryKind::communication);
  }
  if (largest_input() > 0) input_gradients_.allocate(device_, size_.send_buffers, largest_input());
  gathered_ = device_.allocate(gathered_bytes(), MemoryKind::activations);
  discarded_ = device_.allocate(2 * size_of(DType::fp64), MemoryKind::workspace);
}

void PipelineExecutor::run(const Schedule& schedule, int rank, PipelineHost& host, Observer& observer, bool training) {
  Run run{.schedule = schedule, .rank = rank, .host = host, .observer = observer, .training = training};
  begin(run);
  const std::vector<Action>& actions = schedule.ranks[static_cast<std::size_t>(rank)].actions;
  Stream& stream = device_.compute_stream();
  Phase phase = Phase::other;
  std::optional<SchedulePart> part;
  for (std::size_t place = 0; place < actions.size(); ++place) {
    const Action& action = actions[place];
    if (action.micro_batch >= run.limit) continue;
    const SchedulePart here = place > run.last_forward_place      ? SchedulePart::drain
                              : place <= run.first_backward_place ? SchedulePart::warm_up
                                                                  : SchedulePart::steady;
    if (training && schedule.stages > 1 && here != part) observer.schedule_part(*(part = here));
    if (phase_of(action.act) != phase) observer.phase(phase = phase_of(action.act));
    inputs_.post(*activations_, stream);
    output_gradients_.post(*gradients_, stream);
    act(run, action);
    if (is_pass(action.act) && run.last_pass[static_cast<std::size_t>(action.micro_batch)] == place) {
      host.release(action.micro_batch);
    }
    activations_->progress();
    gradients_->progress();
    host.progress();
    if (host.limit() < run.limit) cut_short(run);
  }
  outputs_.drain(stream);
  input_gradients_.drain(stream);
}

/// Tells the inboxes what will come, in which order.
void PipelineExecutor::begin(Run& run) {
  const auto micro_batches = static_cast<std::size_t>(run.schedule.micro_batches);
  run.passages.resize(micro_batches * size_.needs.chunks.size());
  run.last_pass.assign(micro_batches, 0);
  run.saves.assign(size_.needs.chunks.size(), 0);
  run.last_backward.assign(size_.needs.chunks.size(), -1);
  if (run.training) {
    for (std::vector<char>& touched : touched_) touched.assign(touched.size(), 0);
  }
  run.first_backward_place = std::numeric_limits<std::size_t>::max();
  std::vector<Expected> inputs, gradients;
  const std::vector<Action>& actions = run.schedule.ranks[static_cast<std::size_t>(run.rank)].actions;
  for (std::size_t place = 0; place < actions.size(); ++place) {
    const Action& action = actions[place];
    const Stage& stage = part(action).stage;
    if (is_pass(action.act)) run.last_pass[static_cast<std::size_t>(action.micro_batch)] = place;
    if (action.act == Act::forward) run.last_forward_place = place;
    if (action.act == Act::backward) {
      run.last_backward[static_cast<std::size_t>(action.chunk)] = action.micro_batch;
      run.first_backward_place = std::min(run.first_backward_place, place);
    }
    if (action.act == Act::receive_activation) {
      inputs.push_back(
          {action.peer, tag_of(action), action.chunk, stage.input_spec(run.host.samples(action.micro_batch))});
    } else if (action.act == Act::receive_gradient) {
      gradients.push_back({action.peer, tag_of(action), 0, stage.output_spec(run.host.samples(action.micro_batch))});
    }
  }
  inputs_.expect(std::move(inputs));
  output_gradients_.expect(std::move(gradients));
}

/// What belongs to micro-batches beyond the host's limit will not come.
void PipelineExecutor::cut_short(Run& run) {
  run.limit = run.host.limit();
  std::size_t inputs = 0, gradients = 0;
  for (const Action& action : run.schedule.ranks[static_cast<std::size_t>(run.rank)].actions) {
    if (action.micro_batch >= run.limit) continue;
    if (action.act == Act::receive_activation) ++inputs;
    if (action.act == Act::receive_gradient) ++gradients;
  }
  inputs_.expect_only(inputs);
  output_gradients_.expect_only(gradients);
}

void PipelineExecutor::act(Run& run, const Action& action) {
  Stream& stream = device_.compute_stream();
  switch (action.act) {
    case Act::receive_activation:
      passage(run, action).x = inputs_.take(*activations_, stream);
      break;
    case Act::forward:
      forward(run, action);
      break;
    case Act::send_activation:
      outputs_.send(passage(run, action).y, action.peer, tag_of(action), *activations_, backend_, stream);
      break;
    case Act::recompute:
      recompute(run, action);
      break;
    case Act::loss:
      loss(run, action);
      break;
    case Act::receive_gradient:
      passage(run, action).dy = output_gradients_.take(*gradients_, stream);
      break;
    case Act::backward:
      backward(run, action);
      break;
    case Act::send_gradient:
      input_gradients_.send(passage(run, action).dx, action.peer, tag_of(action), *gradients_, backend_, stream);
      break;
    case Act::reduce:
      run.host.reduce(action.version);
      break;
    case Act::update:
      run.host.update(action.version);
      for (std::vector<char>& touched : touched_) touched.assign(touched.size(), 0);
      break;
  }
}

/// A pass with a slot of its own, or, when nothing of it stays, with the one that the next such pass will take.
void PipelineExecutor::pass_forward(Run& run, const Action& action, const Tensor& metrics) {
  const auto chunk = static_cast<std::size_t>(action.chunk);
  Room& room = rooms_[chunk];
  Passage& here = passage(run, action);
  const auto slot = static_cast<std::size_t>(run.saves[chunk]) % room.slots.size();
  PDL_CHECK(!room.taken[slot], "the slot for micro-batch ", action.micro_batch, " is still held");
  if (run.training && (action.keep || action.act == Act::recompute)) {
    ++run.saves[chunk];
    room.taken[slot] = 1;
    here.slot = static_cast<int>(slot);
  }
  MicroBatch batch = here.batch;
  batch.metrics = metrics;
  StagePart& mine = part(action);
  const AnnouncedPass announced(run.observer, action);
  here.y = mine.stage.forward(mine.store, run.host.values(action.chunk, action.version), room.slots[slot], batch,
                              here.x, run.training);
}

void PipelineExecutor::forward(Run& run, const Action& action) {
  Passage& here = passage(run, action);
  // Chunks of one rank share what was loaded on the first pass.
  Passage& first = run.passages[static_cast<std::size_t>(action.micro_batch) * size_.needs.chunks.size()];
  if (first.batch.size == 0) first.batch = run.host.load(action.micro_batch);
  here.batch = first.batch;
  if (is_first_stage(run.schedule, run.rank, action.chunk)) here.x = here.batch.input;
  pass_forward(run, action, here.batch.metrics);
  ++counts_.forwards;
  if (size_.needs.gathers_loss && is_last_stage(run.schedule, run.rank, action.chunk)) {
    const TensorSpec one = parts_.back()->stage.input_spec(1), all = parts_.back()->stage.input_spec(here.batch.size);
    here.dy = gathered_.tensor(all.dtype, all.shape, run.gathered * one.bytes());
    run.gathered += here.batch.size;
    backend_.copy(here.dy, here.y);
  }
  if (!run.training && here.x.defined()) inputs_.release(here.x);
}

/// The same numbers as the first time: dropout depends on what it is for. What the loss adds up is not added again.
void PipelineExecutor::recompute(Run& run, const Action& action) {
  pass_forward(run, action, discarded_.tensor(DType::fp64, Shape{2}));
  ++counts_.recomputations;
}

/// The loss leaves the gradient in place of the gathered output.
void PipelineExecutor::loss(Run& run, const Action& action) {
  const Passage& here = passage(run, action);
  StagePart& last = *parts_.back();
  const AnnouncedPass announced(run.observer, action);
  last.stage.forward(last.store, last.store.values(), rooms_.back().slots[0], here.batch, here.dy, run.training);
}

void PipelineExecutor::backward(Run& run, const Action& action) {
  Passage& here = passage(run, action);
  StagePart& mine = part(action);
  const auto chunk = static_cast<std::size_t>(action.chunk), slot = static_cast<std::size_t>(here.slot);
  MicroBatch batch = here.batch;
  GradientListener* const listener =
      run.last_backward[chunk] == action.micro_batch ? run.host.listener(action.chunk) : nullptr;
  {
    const AnnouncedPass announced(run.observer, action);
    here.dx = mine.stage.backward(mine.store, run.host.values(action.chunk, action.version), mine.store.grads(),
                                  touched_[chunk], rooms_[chunk].slots[slot], batch, here.x, here.dy, listener);
  }
  rooms_[chunk].taken[slot] = 0;
  ++counts_.backwards;
  if (!is_first_stage(run.schedule, run.rank, action.chunk)) inputs_.release(here.x);
  if (!is_last_stage(run.schedule, run.rank, action.chunk)) output_gradients_.release(here.dy);
}

PipelineExecutor::Passage& PipelineExecutor::passage(Run& run, const Action& action) const {
  return run.passages[static_cast<std::size_t>(action.micro_batch) * size_.needs.chunks.size() +
                      static_cast<std::size_t>(action.chunk)];
}

int PipelineExecutor::tag_of(const Action& action) const { return action.micro_batch % kTags; }

}  // namespace pdl
