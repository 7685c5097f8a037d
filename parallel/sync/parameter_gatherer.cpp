#include "parallel/sync/parameter_gatherer.h"

#include <algorithm>

namespace pdl {

ParameterGatherer::ParameterGatherer(const ParamStore& store, const ShardMap& map,
                                     const std::vector<std::vector<int>>& users, int layers,
                                     const ShardedWeights& weights, GradientShards& gradients,
                                     const GatherOptions& options, DType dtype)
    : store_(store),
      map_(map),
      weights_(weights),
      gradients_(gradients),
      dtype_(dtype),
      blocks_of_layer_(static_cast<std::size_t>(layers)),
      elements_of_layer_(static_cast<std::size_t>(layers), 0),
      offset_of_block_(map.blocks().size(), 0) {
  for (std::size_t i = 0; i < users.size(); ++i) {
    const int block = map.block_of(static_cast<int>(i));
    for (int layer : users[i]) {
      std::vector<int>& blocks = blocks_of_layer_[static_cast<std::size_t>(layer)];
      if (std::find(blocks.begin(), blocks.end(), block) == blocks.end()) blocks.push_back(block);
      elements_of_layer_[static_cast<std::size_t>(layer)] += store.params()[i].count;
    }
  }
  training_ = plan_pass(true, layers, options);
  evaluation_ = plan_pass(false, layers, options);
  memory_elements_ = std::max(training_.schedule.memory_elements, evaluation_.schedule.memory_elements);
}

ParameterGatherer::Plan ParameterGatherer::plan_pass(bool training, int layers, const GatherOptions& options) const {
  std::vector<int> calls;
  for (int layer = 0; layer < layers; ++layer) calls.push_back(layer);
  for (int layer = training ? layers - 1 : -1; layer >= 0; --layer) calls.push_back(layer);
  Plan plan;
  for (int layer : calls) {
    const std::vector<int>& blocks = blocks_of_layer_[static_cast<std::size_t>(layer)];
    plan.use_of_call.push_back(blocks.empty() ? -1 : static_cast<int>(plan.uses.size()));
    if (blocks.empty()) continue;
    LayerUse use{.layer = layer, .blocks = {}, .elements = elements_of_layer_[static_cast<std::size_t>(layer)]};
    std::copy_if(blocks.begin(), blocks.end(), std::back_inserter(use.blocks),
                 [&](int block) { return !weights_.is_whole(block); });
    plan.uses.push_back(std::move(use));
  }
  std::vector<std::int64_t> block_elements;
  for (const ShardBlock& block : map_.blocks()) block_elements.push_back(block.elements);
  plan.schedule = plan_gathers(plan.uses, block_elements, options);
  return plan;
}

MemoryByKind ParameterGatherer::predicted_memory() const {
  MemoryByKind memory;
  memory[MemoryKind::parameters] = memory_elements_ * size_of(dtype_);
  return memory;
}

CommCount ParameterGatherer::predicted_pass() const {
  CommCount count;
  for (const Gather& gather : training_.schedule.gathers) add_gather(gather.block, count);
  return count;
}

CommCount ParameterGatherer::predicted_regathers() const {
  CommCount count;
  for (int block = 0; block < static_cast<int>(map_.blocks().size()); ++block) {
    if (weights_.is_whole(block)) add_gather(block, count);
  }
  return count;
}

void ParameterGatherer::add_gather(int block, CommCount& count) const {
  if (map_.ranks() == 1) return;
  const std::int64_t bytes = map_.blocks()[static_cast<std::size_t>(block)].elements * size_of(dtype_);
  count.calls += 1;
  count.bytes += ring_bytes("all_gather", map_.ranks(), bytes);
}

void ParameterGatherer::prepare(Device& device, Communicator& group) {
  device_ = &device;
  group_ = &group;
  if (memory_elements_ > 0) {
    memory_ = device.allocate(predicted_memory()[MemoryKind::parameters], MemoryKind::parameters);
  }
  regathers_.resize(map_.blocks().size());
}

void ParameterGatherer::regather(int block) {
  if (map_.ranks() == 1 || !weights_.is_whole(block)) return;
  regathers_[static_cast<std::size_t>(block)] =
      group_->all_gather(weights_.whole(block), weights_.sent(block), device_->compute_stream());
}

void ParameterGatherer::wait_for_regathers() {
  for (Work& work : regathers_) work.wait(device_->compute_stream());
}

void ParameterGatherer::begin_pass(bool training) {
  pass_ = training ? &training_ : &evaluation_;
  call_ = 0;
  works_.clear();
  works_.resize(pass_->schedule.gathers.size());
}

void ParameterGatherer::before_layer(int position) {
  Stream& stream = device_->compute_stream();
  const int use = pass_->use_of_call[call_];
  if (use < 0) return;
  const GatherSchedule::Use& plan = pass_->schedule.uses[static_cast<std::size_t>(use)];
  for (const std::vector<int>* begun : {&plan.gathered, &plan.ahead}) {
    for (int gather : *begun) {
      start(pass_->schedule.gathers[static_cast<std::size_t>(gather)], works_[static_cast<std::size_t>(gather)]);
    }
  }
  for (int gather : plan.needed) {
    const Gather& needed = pass_->schedule.gathers[static_cast<std::size_t>(gather)];
    works_[static_cast<std::size_t>(gather)].wait(stream);
    offset_of_block_[static_cast<std::size_t>(needed.block)] = needed.offset;
  }
  for (int block : blocks_of_layer_[static_cast<std::size_t>(position)]) {
    regathers_[static_cast<std::size_t>(block)].wait(stream);
  }
  if (group_->size() > 1) group_->progress();
}

// What is let go needs no call: its memory is given to a later gather, which waits for what is queued here until then.
void ParameterGatherer::after_layer(int) { ++call_; }

void ParameterGatherer::start(const Gather& gather, Work& work) {
  const ShardBlock& block = map_.blocks()[static_cast<std::size_t>(gather.block)];
  const Tensor whole = memory_.tensor(dtype_, Shape{memory_elements_}).range(gather.offset, block.elements);
  work = group_->all_gather(whole, weights_.sent(gather.block), device_->compute_stream());
}

Tensor ParameterGatherer::value(int index) {
  const Param& param = store_.params()[static_cast<std::size_t>(index)];
  const int home = map_.block_of(index);
  const ShardBlock& block = map_.blocks()[static_cast<std::size_t>(home)];
  const std::int64_t inside = param.offset - block.offset;
  if (weights_.is_whole(home)) return weights_.whole(home).range(inside, param.count).view(param.spec.shape());
  return memory_.tensor(dtype_, Shape{memory_elements_})
      .range(offset_of_block_[static_cast<std::size_t>(home)] + inside, param.count)
      .view(param.spec.shape());
}

}  // namespace pdl
