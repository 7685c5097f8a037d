#include "parallel/pipeline/schedule.h"

#include <algorithm>
#include <numeric>

#include "engine/base/error.h"

namespace pdl {
namespace {

/// Writes one rank's list: a pass comes with the messages that it needs and causes.
class RankWriter {
 public:
  RankWriter(Schedule& schedule, int rank)
      : schedule_(schedule), rank_(rank), actions_(schedule.ranks[static_cast<std::size_t>(rank)].actions) {}

  void forward(int micro_batch, int chunk = 0, int version = 0, bool keep = true) {
    const int stage = schedule_.virtual_stage(rank_, chunk);
    if (stage > 0) message(Act::receive_activation, micro_batch, chunk, stage - 1);
    actions_.push_back(
        {.act = Act::forward, .micro_batch = micro_batch, .chunk = chunk, .version = version, .keep = keep});
    if (stage + 1 < schedule_.virtual_stages()) message(Act::send_activation, micro_batch, chunk, stage + 1);
  }
  void backward(int micro_batch, int chunk = 0, int version = 0) {
    const int stage = schedule_.virtual_stage(rank_, chunk);
    if (stage + 1 < schedule_.virtual_stages()) message(Act::receive_gradient, micro_batch, chunk, stage + 1);
    actions_.push_back({.act = Act::backward, .micro_batch = micro_batch, .chunk = chunk, .version = version});
    if (stage > 0) message(Act::send_gradient, micro_batch, chunk, stage - 1);
  }
  void recompute(int micro_batch) { actions_.push_back({.act = Act::recompute, .micro_batch = micro_batch}); }
  void loss(int micro_batch) { actions_.push_back({.act = Act::loss, .micro_batch = micro_batch}); }
  void reduce_and_update(int version, int last_micro_batch = 0) {
    actions_.push_back({.act = Act::reduce, .micro_batch = last_micro_batch, .version = version});
    actions_.push_back({.act = Act::update, .micro_batch = last_micro_batch, .version = version});
  }

 private:
  void message(Act act, int micro_batch, int chunk, int other_stage) {
    actions_.push_back(
        {.act = act, .micro_batch = micro_batch, .chunk = chunk, .peer = schedule_.rank_of(other_stage, micro_batch)});
  }

  Schedule& schedule_;
  int rank_;
  std::vector<Action>& actions_;
};

/// A schedule with its ranks and empty lists.
Schedule blank(std::string name, std::vector<int> replicas, int micro_batches, int chunks = 1) {
  PDL_CHECK(!replicas.empty() && micro_batches > 0 && chunks > 0, name, ": ", replicas.size(), " stages, ",
            micro_batches, " micro-batches, ", chunks, " chunks");
  Schedule schedule;
  schedule.name = std::move(name);
  schedule.stages = static_cast<int>(replicas.size());
  schedule.chunks = chunks;
  schedule.micro_batches = micro_batches;
  for (int stage = 0; stage < schedule.stages; ++stage) {
    for (int replica = 0; replica < replicas[static_cast<std::size_t>(stage)]; ++replica) {
      schedule.ranks.push_back({.stage = stage, .replica = replica, .actions = {}});
    }
  }
  schedule.replicas = std::move(replicas);
  return schedule;
}

std::vector<int> unreplicated(int stages) { return std::vector<int>(static_cast<std::size_t>(std::max(stages, 0)), 1); }

/// Weights that a round uses which comes `lag` updates late, once so many rounds have been: before this schedule
/// `rounds_before` were.
int delayed(int round, int lag, std::int64_t rounds_before) {
  return std::max(round - lag, -static_cast<int>(std::min<std::int64_t>(rounds_before, lag)));
}

/// In which order the (micro-batch, chunk) pairs of an interleaved schedule go forward on every rank.
std::vector<std::pair<int, int>> interleaved_order(int micro_batches, int chunks, int group) {
  std::vector<std::pair<int, int>> order;
  for (int first = 0; first < micro_batches; first += group) {
    const int end = std::min(first + group, micro_batches);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      for (int micro_batch = first; micro_batch < end; ++micro_batch) order.emplace_back(micro_batch, chunk);
    }
  }
  return order;
}

}  // namespace

std::string_view name_of(Act act) {
  switch (act) {
    case Act::receive_activation:
      return "receive of the activation";
    case Act::forward:
      return "forward";
    case Act::send_activation:
      return "send of the activation";
    case Act::recompute:
      return "recomputation";
    case Act::loss:
      return "loss";
    case Act::receive_gradient:
      return "receive of the gradient";
    case Act::backward:
      return "backward";
    case Act::send_gradient:
      return "send of the gradient";
    case Act::reduce:
      return "reduction";
    case Act::update:
      return "update";
  }
  return "";
}

int Schedule::rank_of(int virtual_stage, int micro_batch) const {
  const int stage = virtual_stage % stages;
  const int first = std::accumulate(replicas.begin(), replicas.begin() + stage, 0);
  return first + micro_batch % replicas[static_cast<std::size_t>(stage)];
}

Schedule fill_drain(int stages, int micro_batches, Checkpoint checkpoint, bool gathered_loss) {
  Schedule schedule = blank("fill-drain", unreplicated(stages), micro_batches);
  const auto kept = [&](int micro_batch) {
    return checkpoint == Checkpoint::never ||
           (checkpoint == Checkpoint::except_last && micro_batch + 1 == micro_batches);
  };
  for (int rank = 0; rank < stages; ++rank) {
    RankWriter writer(schedule, rank);
    for (int i = 0; i < micro_batches; ++i) writer.forward(i, 0, 0, kept(i));
    for (int i = 0; gathered_loss && rank + 1 == stages && i < micro_batches; ++i) writer.loss(i);
    for (int i = micro_batches - 1; i >= 0; --i) {
      if (!kept(i)) writer.recompute(i);
      writer.backward(i);
    }
    writer.reduce_and_update(0);
    schedule.ranks[static_cast<std::size_t>(rank)].in_flight = micro_batches;
  }
  return schedule;
}

Schedule one_forward_one_backward(int stages, int micro_batches) {
  Schedule schedule = blank("1F1B", unreplicated(stages), micro_batches);
  for (int stage = 0; stage < stages; ++stage) {
    RankWriter writer(schedule, stage);
    const int warm = std::min(stages - 1 - stage, micro_batches);
    for (int i = 0; i < warm; ++i) writer.forward(i);
    for (int i = 0; i + warm < micro_batches; ++i) {
      writer.forward(i + warm);
      writer.backward(i);
    }
    for (int i = micro_batches - warm; i < micro_batches; ++i) writer.backward(i);
    writer.reduce_and_update(0);
    schedule.ranks[static_cast<std::size_t>(stage)].in_flight = std::min(micro_batches, stages - stage);
  }
  return schedule;
}

Schedule interleaved(int stages, int micro_batches, int chunks, int group) {
  if (group == 0) group = stages;
  const bool few = micro_batches < stages;
  if (few) group = micro_batches;
  const int last_group = micro_batches % group;
  PDL_CHECK(
      stages > 1 && (few || (stages <= group && group <= micro_batches && (last_group == 0 || last_group >= stages))),
      "interleaved: ", stages, " stages, groups of ", group, ", ", micro_batches, " micro-batches");
  Schedule schedule = blank("interleaved 1F1B", unreplicated(stages), micro_batches, chunks);
  schedule.send_buffers +=
      std::max(0, group - stages);  // what the last rank sends the first, which takes it when the group is through
  const std::vector<std::pair<int, int>> order = interleaved_order(micro_batches, chunks, group);
  const int passes = micro_batches * chunks;
  for (int rank = 0; rank < stages; ++rank) {
    RankWriter writer(schedule, rank);
    const auto forward = [&](int pass) {
      const auto [micro_batch, chunk] = order[static_cast<std::size_t>(pass)];
      writer.forward(micro_batch, chunk);
    };
    const auto backward = [&](int pass) {
      const auto [micro_batch, chunk] = order[static_cast<std::size_t>(pass)];
      writer.backward(micro_batch, chunks - 1 - chunk);
    };
    const int warm = few ? passes : std::min(2 * (stages - rank - 1) + (chunks - 1) * group, passes);
    for (int pass = 0; pass < warm; ++pass) forward(pass);
    for (int pass = 0; pass + warm < passes; ++pass) {
      forward(pass + warm);
      backward(pass);
    }
    for (int pass = passes - warm; pass < passes; ++pass) backward(pass);
    writer.reduce_and_update(0);
    schedule.ranks[static_cast<std::size_t>(rank)].in_flight = std::min(warm + 1, passes);
  }
  return schedule;
}

int warm_up_depth(const std::vector<int>& replicas, int stage) {
  const auto begin = replicas.begin();
  const int later = std::accumulate(begin + stage, replicas.end(), 0) - 1;  // R - 1 - sum of those before
  return later / replicas[static_cast<std::size_t>(stage)];
}

Schedule continuous(const std::vector<int>& replicas, int mini_batches, Stashing stashing,
                    std::optional<std::int64_t> before) {
  Schedule schedule = blank("1F1B without flush", replicas, mini_batches);
  schedule.same_weights = stashing != Stashing::none;
  const int first_depth = warm_up_depth(replicas, 0);
  for (int rank = 0; rank < static_cast<int>(schedule.ranks.size()); ++rank) {
    RankSchedule& mine = schedule.ranks[static_cast<std::size_t>(rank)];
    const int replica_count = replicas[static_cast<std::size_t>(mine.stage)];
    PDL_CHECK(mini_batches % replica_count == 0, mini_batches, " mini-batches on ", replica_count, " replicas");
    const int rounds = mini_batches / replica_count;
    const int depth = warm_up_depth(replicas, mine.stage), warm = std::min(depth, rounds);
    RankWriter writer(schedule, rank);
    // When round k comes to this stage, its newest weights are those after update k - depth; when round k comes back,
    // those after update k.
    const int lag = stashing == Stashing::vertical_sync ? first_depth : depth;
    const std::int64_t rounds_before = before.value_or(0) / replica_count;
    const auto version = [&](int round) { return delayed(round, lag, rounds_before); };
    const auto forward = [&](int round) { writer.forward(round * replica_count + mine.replica, 0, version(round)); };
    const auto backward = [&](int round) {
      const int mini_batch = round * replica_count + mine.replica;
      writer.backward(mini_batch, 0, stashing == Stashing::none ? round : version(round));
      writer.reduce_and_update(round, mini_batch);
    };
    for (int round = 0; round < warm; ++round) forward(round);
    for (int round = 0; round + warm < rounds; ++round) {
      forward(round + warm);
      backward(round);
    }
    for (int round = rounds - warm; round < rounds; ++round) backward(round);
    mine.in_flight = std::min(depth + 1, rounds);
    // The newest weights are all that is needed while there is only this schedule.
    mine.versions = stashing == Stashing::none && !before ? 1 : lag + 1;
  }
  return schedule;
}

Schedule double_buffered(int stages, int micro_batches, int batches, std::optional<std::int64_t> before) {
  Schedule schedule = blank("1F1B with two weight versions", unreplicated(stages), micro_batches * batches);
  for (int stage = 0; stage < stages; ++stage) {
    RankSchedule& mine = schedule.ranks[static_cast<std::size_t>(stage)];
    RankWriter writer(schedule, stage);
    const int total = schedule.micro_batches, warm = std::min(stages - 1 - stage, total);
    const auto version = [&](int i) { return delayed(i / micro_batches, 1, before.value_or(0) / micro_batches); };
    const auto backward = [&](int i) {
      writer.backward(i, 0, version(i));
      if ((i + 1) % micro_batches == 0) writer.reduce_and_update(i / micro_batches, i);
    };
    for (int i = 0; i < warm; ++i) writer.forward(i, 0, version(i));
    for (int i = 0; i + warm < total; ++i) {
      writer.forward(i + warm, 0, version(i + warm));
      backward(i);
    }
    for (int i = total - warm; i < total; ++i) backward(i);
    mine.in_flight = std::min(total, stages - stage);
    mine.versions = 2;
  }
  return schedule;
}

Schedule flushed(int stages, int micro_batches, int batches) {
  Schedule schedule = blank("1F1B", unreplicated(stages), micro_batches * batches);
  const Schedule one = one_forward_one_backward(stages, micro_batches);
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    schedule.ranks[rank].in_flight = one.ranks[rank].in_flight;
    for (int batch = 0; batch < batches; ++batch) {
      for (Action action : one.ranks[rank].actions) {
        const bool ends = action.act == Act::reduce || action.act == Act::update;
        action.micro_batch = batch * micro_batches + (ends ? micro_batches - 1 : action.micro_batch);
        action.version = batch;
        schedule.ranks[rank].actions.push_back(action);
      }
    }
  }
  return schedule;
}

Schedule forward_only(const std::vector<int>& replicas, int micro_batches, int chunks, bool gathered_loss) {
  Schedule schedule = blank("forward", replicas, micro_batches, chunks);
  for (int rank = 0; rank < static_cast<int>(schedule.ranks.size()); ++rank) {
    RankWriter writer(schedule, rank);
    const RankSchedule& mine = schedule.ranks[static_cast<std::size_t>(rank)];
    for (const auto& [micro_batch, chunk] : interleaved_order(micro_batches, chunks, schedule.stages)) {
      if (schedule.rank_of(mine.stage, micro_batch) != rank) continue;
      writer.forward(micro_batch, chunk, 0, false);
      if (gathered_loss && schedule.virtual_stage(rank, chunk) + 1 == schedule.virtual_stages())
        writer.loss(micro_batch);
    }
  }
  return schedule;
}

std::string compute_order(const Schedule& schedule, int rank) {
  const RankSchedule& mine = schedule.ranks[static_cast<std::size_t>(rank)];
  const bool versions = std::any_of(schedule.ranks.begin(), schedule.ranks.end(),
                                    [](const RankSchedule& other) { return other.versions > 1; });
  std::string text;
  const auto add = [&text](const std::string& word) { text += (text.empty() ? "" : " ") + word; };
  for (const Action& action : mine.actions) {
    const std::string place = str(action.micro_batch, schedule.chunks > 1 ? str(".", action.chunk) : "");
    if (action.act == Act::forward) add(str("F", place, versions ? str("@", action.version) : ""));
    if (action.act == Act::recompute) add("R" + place);
    if (action.act == Act::loss) add("L" + place);
    if (action.act == Act::backward) add("B" + place);
    if (action.act == Act::update) add(str("U", action.version));
  }
  return text;
}

}  // namespace pdl
