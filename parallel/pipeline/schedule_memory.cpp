#include "parallel/pipeline/schedule_memory.h"

#include <algorithm>
#include <map>
#include <set>

namespace pdl {
namespace {

/// Counts what is held, and the most that ever was.
struct Gauge {
  int now = 0, peak = 0;
  void add(int change) { peak = std::max(peak, now += change); }
};

}  // namespace

int count_of(const Schedule& schedule, int rank, Act act) {
  const std::vector<Action>& actions = schedule.ranks[static_cast<std::size_t>(rank)].actions;
  return static_cast<int>(
      std::count_if(actions.begin(), actions.end(), [act](const Action& action) { return action.act == act; }));
}

RankNeeds needs_of(const Schedule& schedule, int rank) {
  const std::vector<Action>& actions = schedule.ranks[static_cast<std::size_t>(rank)].actions;
  std::map<std::pair<int, int>, std::size_t> last_use;  // of (micro-batch, chunk)
  std::map<int, std::size_t> last_pass;                 // of a micro-batch
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const Action& action = actions[i];
    if (action.act == Act::reduce || action.act == Act::update) continue;
    if (action.act != Act::send_activation && action.act != Act::send_gradient) {
      last_use[{action.micro_batch, action.chunk}] = i;
      last_pass[action.micro_batch] = i;
    }
  }
  const auto chunks = static_cast<std::size_t>(schedule.chunks);
  std::vector<Gauge> slots(chunks), inputs(chunks);
  std::vector<int> received(chunks, 0);
  Gauge micro_batches;
  std::set<int> seen;
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const Action& action = actions[i];
    if (action.act == Act::reduce || action.act == Act::update) continue;
    const auto chunk = static_cast<std::size_t>(action.chunk);
    if (action.act == Act::receive_activation) {
      inputs[chunk].add(1);
      ++received[chunk];
    }
    const bool saves = action.act == Act::recompute || (action.act == Act::forward && action.keep);
    if (saves || action.act == Act::forward) slots[chunk].add(1);
    if ((action.act == Act::forward && !action.keep) || action.act == Act::backward) slots[chunk].add(-1);
    if (action.act == Act::forward && seen.insert(action.micro_batch).second) micro_batches.add(1);
    const auto use = last_use.find({action.micro_batch, action.chunk});
    if (use->second == i && received[chunk] > 0) inputs[chunk].add(-1);
    if (last_pass[action.micro_batch] == i) micro_batches.add(-1);
  }
  RankNeeds needs;
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    needs.chunks.push_back(
        {.slots = slots[chunk].peak,
         .inputs = std::min(inputs[chunk].peak + 1, received[chunk]),
         .sends = schedule.virtual_stage(rank, static_cast<int>(chunk)) + 1 < schedule.virtual_stages()});
  }
  needs.micro_batches = micro_batches.peak;
  needs.gathers_loss = count_of(schedule, rank, Act::loss) > 0;
  return needs;
}

}  // namespace pdl
