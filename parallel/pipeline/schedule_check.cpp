#include "parallel/pipeline/schedule_check.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "engine/base/error.h"

namespace pdl {
namespace {

/// A micro-batch at the virtual stage that a message is for.
using Parcel = std::pair<int, int>;

/// Messages of one kind from one rank to another.
using ChannelKey = std::tuple<int, int, bool>;  // sender, receiver, gradients

bool is_receive(Act act) { return act == Act::receive_activation || act == Act::receive_gradient; }
bool is_send(Act act) { return act == Act::send_activation || act == Act::send_gradient; }
bool is_about_gradient(Act act) { return act == Act::receive_gradient || act == Act::send_gradient; }

std::string describe(const Action& action) {
  if (action.act == Act::reduce || action.act == Act::update) {
    return str(name_of(action.act), " of version ", action.version);
  }
  std::string text = str(name_of(action.act), " of micro-batch ", action.micro_batch);
  if (action.chunk > 0) text += str(", chunk ", action.chunk);
  return text;
}

/// What a rank knows of a micro-batch at one of its virtual stages.
struct Passage {
  bool received = false, forward = false, saved = false, gradient = false, backward = false;
  int version = 0;
};

/// Plays a schedule through.
class Play {
 public:
  explicit Play(const Schedule& schedule) : schedule_(schedule), ranks_(schedule.ranks.size()) {}

  std::string fault() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
        while (!finished(rank)) {
          const std::optional<std::string> problem = step(rank);
          if (!problem) break;  // it has to wait
          if (!problem->empty()) return str("rank ", rank, ": ", *problem);
          moved = true;
        }
      }
    }
    const std::string stuck = stuck_ranks();
    return stuck.empty() ? leftovers() : stuck;
  }

 private:
  struct RankState {
    std::size_t next = 0;
    int in_flight = 0, updates = 0, reductions = 0;
    bool arrived = false;  ///< at its next reduction
    std::map<Parcel, Passage> passages;
  };

  const RankSchedule& plan(int rank) const { return schedule_.ranks[static_cast<std::size_t>(rank)]; }
  RankState& state(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  bool finished(int rank) { return state(rank).next == plan(rank).actions.size(); }

  /// Does the rank's next action. Nothing when it has to wait, else what is wrong with it, "" when nothing is.
  std::optional<std::string> step(int rank) {
    const Action& action = plan(rank).actions[state(rank).next];
    std::optional<std::string> result;
    if (is_receive(action.act)) {
      result = receive(rank, action);
    } else if (is_send(action.act)) {
      result = send(rank, action);
    } else if (action.act == Act::reduce) {
      result = reduce(rank, action);
    } else if (action.act == Act::update) {
      result = action.version == state(rank).updates
                   ? ""
                   : str(describe(action), " after ", state(rank).updates, " updates");
      ++state(rank).updates;
    } else {
      result = compute(rank, action);
    }
    if (result) ++state(rank).next;
    return result;
  }

  Passage& passage(int rank, const Action& action) {
    return state(rank).passages[{action.micro_batch, schedule_.virtual_stage(rank, action.chunk)}];
  }

  std::optional<std::string> receive(int rank, const Action& action) {
    const bool gradient = is_about_gradient(action.act);
    std::deque<Parcel>& channel = channels_[{action.peer, rank, gradient}];
    if (channel.empty()) return std::nullopt;
    const Parcel expected = {action.micro_batch, schedule_.virtual_stage(rank, action.chunk)};
    if (channel.front() != expected) {
      return str(describe(action), " from rank ", action.peer, ", which sends that of micro-batch ",
                 channel.front().first, " first");
    }
    channel.pop_front();
    --under_way_[{action.peer, gradient}];
    Passage& here = passage(rank, action);
    (gradient ? here.gradient : here.received) = true;
    return "";
  }

  std::optional<std::string> send(int rank, const Action& action) {
    const bool gradient = is_about_gradient(action.act);
    const Passage& here = passage(rank, action);
    if (!(gradient ? here.backward : here.forward)) return describe(action) + " before there is one";
    int& under_way = under_way_[{rank, gradient}];
    if (under_way == schedule_.send_buffers) return std::nullopt;
    ++under_way;
    const int target = schedule_.virtual_stage(rank, action.chunk) + (gradient ? -1 : 1);
    if (target < 0 || target >= schedule_.virtual_stages() ||
        action.peer != schedule_.rank_of(target, action.micro_batch)) {
      return str(describe(action), " to rank ", action.peer, ", which has no use for it");
    }
    channels_[{rank, action.peer, gradient}].push_back({action.micro_batch, target});
    return "";
  }

  std::optional<std::string> reduce(int rank, const Action&) {
    RankState& mine = state(rank);
    if (!std::exchange(mine.arrived, true)) ++mine.reductions;
    for (int other = 0; other < static_cast<int>(ranks_.size()); ++other) {
      if (plan(other).stage == plan(rank).stage && state(other).reductions < mine.reductions) return std::nullopt;
    }
    mine.arrived = false;
    return "";
  }

  std::string compute(int rank, const Action& action) {
    Passage& here = passage(rank, action);
    const int stage = schedule_.virtual_stage(rank, action.chunk);
    const bool is_last = stage + 1 == schedule_.virtual_stages();
    RankState& mine = state(rank);
    if (schedule_.rank_of(stage, action.micro_batch) != rank) return describe(action) + ", which is another replica's";
    if (action.act == Act::forward) {
      if (here.forward) return describe(action) + " a second time";
      if (stage > 0 && !here.received) return describe(action) + " without having received its activation";
      here.forward = true;
      here.saved = action.keep;
      here.version = action.version;
      if (plan(rank).in_flight > 0 && ++mine.in_flight > plan(rank).in_flight) {
        return str(describe(action), " brings ", mine.in_flight, " into flight; the bound is ", plan(rank).in_flight);
      }
    } else if (!here.forward) {
      return describe(action) + " before its forward";
    } else if (action.act == Act::recompute) {
      here.saved = true;
    } else if (action.act == Act::backward) {
      if (here.backward) return describe(action) + " a second time";
      if (!here.saved) return describe(action) + " without what forward saved: it has to be recomputed first";
      if (!is_last && !here.gradient) return describe(action) + " without having received its gradient";
      if (schedule_.same_weights && action.version != here.version) {
        return str(describe(action), " with weights of version ", action.version, "; forward used ", here.version);
      }
      here.backward = true;
      --mine.in_flight;
    }
    return action.act == Act::loss ? "" : version_fault(rank, action);
  }

  /// Version v exists after v updates, and lies in a ring that update v + versions - 1 overwrites it in.
  std::string version_fault(int rank, const Action& action) {
    const int updates = state(rank).updates, versions = plan(rank).versions;
    if (action.version > updates) {
      return str(describe(action), " needs weights of version ", action.version, ", which do not exist yet after ",
                 updates, " updates");
    }
    if (action.version + versions <= updates) {
      return str(describe(action), " needs weights of version ", action.version, ", which update ",
                 action.version + versions - 1, " has overwritten: ", versions, " versions are held");
    }
    return "";
  }

  bool sends_later(int rank, const Action& receive) {
    const bool gradient = is_about_gradient(receive.act);
    const std::vector<Action>& actions = plan(rank).actions;
    return std::any_of(actions.begin() + static_cast<std::ptrdiff_t>(state(rank).next), actions.end(),
                       [&](const Action& action) {
                         return is_send(action.act) && is_about_gradient(action.act) == gradient &&
                                action.micro_batch == receive.micro_batch;
                       });
  }

  std::string stuck_ranks() {
    std::string text;
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      if (finished(rank)) continue;
      const Action& action = plan(rank).actions[state(rank).next];
      if (is_receive(action.act) && !sends_later(action.peer, action)) {
        return str("rank ", rank, ": ", describe(action), " from rank ", action.peer, ", which never sends it");
      }
      text += str(text.empty() ? "deadlock: " : "; ", "rank ", rank, " waits in ", describe(action));
      if (action.peer >= 0) text += str(is_send(action.act) ? " to" : " from", " rank ", action.peer);
    }
    return text;
  }

  /// What is missing when every list has come to its end.
  std::string leftovers() {
    for (const auto& [key, channel] : channels_) {
      const auto& [sender, receiver, gradient] = key;
      if (!channel.empty()) {
        return str("rank ", receiver, " never receives the ", gradient ? "gradient" : "activation", " of micro-batch ",
                   channel.front().first, " that rank ", sender, " sends");
      }
    }
    for (int stage = 0; stage < schedule_.virtual_stages(); ++stage) {
      for (int micro_batch = 0; micro_batch < schedule_.micro_batches; ++micro_batch) {
        const int rank = schedule_.rank_of(stage, micro_batch);
        const Passage& here = state(rank).passages[{micro_batch, stage}];
        const bool trains = plan(rank).in_flight > 0;
        if (!here.forward || (trains && !here.backward)) {
          return str("rank ", rank, ": micro-batch ", micro_batch, " never goes ",
                     here.forward ? "backward" : "forward", " through virtual stage ", stage);
        }
      }
    }
    return "";
  }

  const Schedule& schedule_;
  std::vector<RankState> ranks_;
  std::map<ChannelKey, std::deque<Parcel>> channels_;
  std::map<std::pair<int, bool>, int> under_way_;  ///< by sender and kind
};

}  // namespace

std::string schedule_fault(const Schedule& schedule) { return Play(schedule).fault(); }

void check_schedule(const Schedule& schedule) {
  const std::string fault = schedule_fault(schedule);
  PDL_CHECK(fault.empty(), schedule.name, ": ", fault);
}

}  // namespace pdl
