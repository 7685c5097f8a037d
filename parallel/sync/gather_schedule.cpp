#include "parallel/sync/gather_schedule.h"

#include <algorithm>

#include "parallel/sync/lifetime_plan.h"

namespace pdl {
namespace {

class Planner {
 public:
  Planner(const std::vector<LayerUse>& uses, const std::vector<std::int64_t>& block_elements,
          const GatherOptions& options)
      : uses_(uses),
        elements_(block_elements),
        options_(options),
        held_(block_elements.size(), kNone),
        counted_on_(block_elements.size(), 0) {}

  GatherSchedule plan() {
    schedule_.uses.resize(uses_.size());
    for (std::size_t use = 0; use < uses_.size(); ++use) {
      fetch(use);
      fetch_ahead(use);
      schedule_.uses[use].live_elements = live_;
      release(use);
    }
    place();
    return std::move(schedule_);
  }

 private:
  static constexpr int kNone = -1;

  int begin_gather(int block, std::size_t use) {
    const int gather = static_cast<int>(schedule_.gathers.size());
    schedule_.gathers.push_back({.block = block, .first_use = use, .last_use = use});
    held_[static_cast<std::size_t>(block)] = gather;
    live_ += elements_[static_cast<std::size_t>(block)];
    return gather;
  }

  void fetch(std::size_t use) {
    GatherSchedule::Use& entry = schedule_.uses[use];
    for (int block : uses_[use].blocks) {
      int& held = held_[static_cast<std::size_t>(block)];
      if (held == kNone) entry.gathered.push_back(begin_gather(block, use));
      entry.needed.push_back(held);
    }
  }

  /// Goes on from where the last one stopped: each coming use is looked at once.
  void fetch_ahead(std::size_t use) {
    if (next_use_ <= use) {
      next_use_ = use + 1;
      next_block_ = 0;
    }
    const std::int64_t most = std::min(options_.prefetch_elements, options_.max_live_elements - live_);
    std::int64_t elements = 0;
    while (next_use_ < uses_.size() && elements < most) {
      if (next_block_ == uses_[next_use_].blocks.size()) {
        ++next_use_;
        next_block_ = 0;
        continue;
      }
      const int block = uses_[next_use_].blocks[next_block_++];
      counted_on_[static_cast<std::size_t>(block)] = next_use_;
      const bool held = held_[static_cast<std::size_t>(block)] != kNone;
      if (!held) schedule_.uses[use].ahead.push_back(begin_gather(block, use));
      if (!held || options_.held_blocks_count) elements += elements_[static_cast<std::size_t>(block)];
    }
  }

  bool used_again_soon(int block, std::size_t use) const {
    std::int64_t distance = 0;
    for (std::size_t later = use + 1; later < uses_.size() && distance < options_.max_reuse_elements; ++later) {
      const std::vector<int>& blocks = uses_[later].blocks;
      if (std::find(blocks.begin(), blocks.end(), block) != blocks.end()) return true;
      distance += uses_[later].elements;
    }
    return false;
  }

  void release(std::size_t use) {
    for (int block : uses_[use].blocks) {
      const auto b = static_cast<std::size_t>(block);
      if (counted_on_[b] > use || used_again_soon(block, use)) continue;
      schedule_.uses[use].released.push_back(held_[b]);
      schedule_.gathers[static_cast<std::size_t>(held_[b])].last_use = use;
      held_[b] = kNone;
      live_ -= elements_[b];
    }
  }

  void place() {
    std::vector<Lifetime> lifetimes;
    for (const Gather& gather : schedule_.gathers) {
      lifetimes.push_back({.first = static_cast<std::int64_t>(gather.first_use),
                           .last = static_cast<std::int64_t>(gather.last_use),
                           .size = elements_[static_cast<std::size_t>(gather.block)]});
    }
    schedule_.memory_elements = place_lifetimes(lifetimes);
    for (std::size_t i = 0; i < lifetimes.size(); ++i) schedule_.gathers[i].offset = lifetimes[i].offset;
  }

  const std::vector<LayerUse>& uses_;
  const std::vector<std::int64_t>& elements_;
  GatherOptions options_;
  GatherSchedule schedule_;
  std::vector<int> held_;                ///< of each block: the gather that holds it now
  std::vector<std::size_t> counted_on_;  ///< of each block: the latest use that a gathering ahead has looked at
  std::size_t next_use_ = 0, next_block_ = 0;
  std::int64_t live_ = 0;
};

}  // namespace

std::int64_t GatherSchedule::most_live_elements() const {
  std::int64_t most = 0;
  for (const Use& use : uses) most = std::max(most, use.live_elements);
  return most;
}

GatherSchedule plan_gathers(const std::vector<LayerUse>& uses, const std::vector<std::int64_t>& block_elements,
                            const GatherOptions& options) {
  return Planner(uses, block_elements, options).plan();
}

}  // namespace pdl
