#include "parallel/pipeline/schedule_timeline.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <tuple>

#include "engine/base/error.h"

namespace pdl {
namespace {

bool is_pass(Act act) { return act == Act::forward || act == Act::backward || act == Act::recompute; }

/// Plays the lists; a receive waits for its message, everything else starts when the rank is free.
class Clockwork {
 public:
  Clockwork(const Schedule& schedule, const std::vector<StageCost>& costs)
      : schedule_(schedule), costs_(costs), now_(schedule.ranks.size(), 0.0) {
    timeline_.ranks.resize(schedule.ranks.size());
  }

  Timeline run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (std::size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
        const std::vector<Action>& actions = schedule_.ranks[rank].actions;
        std::vector<TimeSpan>& spans = timeline_.ranks[rank];
        while (spans.size() < actions.size() && step(static_cast<int>(rank), actions[spans.size()])) moved = true;
      }
    }
    for (std::size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      PDL_CHECK(timeline_.ranks[rank].size() == schedule_.ranks[rank].actions.size(), schedule_.name, " does not end");
      timeline_.makespan = std::max(timeline_.makespan, now_[rank]);
    }
    timeline_.computing /= static_cast<double>(schedule_.ranks.size());
    timeline_.useful /= static_cast<double>(schedule_.ranks.size());
    return std::move(timeline_);
  }

 private:
  using MessageKey = std::tuple<int, int, bool>;  // virtual stage that it is for, micro-batch, gradient

  bool step(int rank, const Action& action) {
    double& now = now_[static_cast<std::size_t>(rank)];
    const double begin = now;
    const int stage = schedule_.virtual_stage(rank, action.chunk);
    const bool gradient = action.act == Act::receive_gradient || action.act == Act::send_gradient;
    if (action.act == Act::receive_activation || action.act == Act::receive_gradient) {
      const auto arrival = arrivals_.find({stage, action.micro_batch, gradient});
      if (arrival == arrivals_.end()) return false;
      now = std::max(now, arrival->second);
    } else if (action.act == Act::send_activation || action.act == Act::send_gradient) {
      const int target = stage + (gradient ? -1 : 1);
      arrivals_[{target, action.micro_batch, gradient}] = now + cost(std::min(stage, target)).transfer;
    } else {
      const double duration = duration_of(action.act, cost(stage));
      now += duration;
      timeline_.computing += duration;
      if (action.act != Act::recompute && action.act != Act::update) timeline_.useful += duration;
    }
    timeline_.ranks[static_cast<std::size_t>(rank)].push_back({begin, now});
    return true;
  }

  const StageCost& cost(int stage) const { return costs_[static_cast<std::size_t>(stage)]; }
  static double duration_of(Act act, const StageCost& cost) {
    switch (act) {
      case Act::forward:
        return cost.forward;
      case Act::recompute:
        return cost.recompute;
      case Act::loss:
        return cost.loss;
      case Act::backward:
        return cost.backward;
      case Act::update:
        return cost.update;
      default:
        return 0.0;
    }
  }

  const Schedule& schedule_;
  const std::vector<StageCost>& costs_;
  std::vector<double> now_;
  std::map<MessageKey, double> arrivals_;
  Timeline timeline_;
};

std::string label_of(const Schedule& schedule, const Action& action) {
  const char letter = action.act == Act::forward ? 'F' : (action.act == Act::backward ? 'B' : 'R');
  return str(letter, action.micro_batch, schedule.chunks > 1 ? str(".", action.chunk) : "");
}

/// Columns for one unit of time: the smallest number with which every label fits, if that fits into `width`.
double scale_of(const Schedule& schedule, const Timeline& timeline, int width) {
  double scale = 0.0;
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (std::size_t i = 0; i < timeline.ranks[rank].size(); ++i) {
      const Action& action = schedule.ranks[rank].actions[i];
      const double duration = timeline.ranks[rank][i].end - timeline.ranks[rank][i].begin;
      if (!is_pass(action.act) || duration <= 0.0) continue;
      scale = std::max(scale, static_cast<double>(label_of(schedule, action).size() + 1) / duration);
    }
  }
  return std::min(scale, width / timeline.makespan);
}

}  // namespace

Timeline simulate(const Schedule& schedule, const std::vector<StageCost>& costs) {
  PDL_CHECK(static_cast<int>(costs.size()) == schedule.virtual_stages(), costs.size(), " costs for ",
            schedule.virtual_stages(), " virtual stages");
  return Clockwork(schedule, costs).run();
}

std::vector<std::string> draw(const Schedule& schedule, const Timeline& timeline, int width) {
  const double scale = scale_of(schedule, timeline, width);
  const auto column = [&](double time) { return static_cast<std::size_t>(std::llround(time * scale)); };
  std::vector<std::string> lines;
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    std::string line(column(timeline.makespan), '.');
    for (std::size_t i = 0; i < timeline.ranks[rank].size(); ++i) {
      const Action& action = schedule.ranks[rank].actions[i];
      if (!is_pass(action.act)) continue;
      const std::size_t begin = column(timeline.ranks[rank][i].begin);
      const std::size_t length = column(timeline.ranks[rank][i].end) - begin;
      std::string cell = label_of(schedule, action);
      if (cell.size() > length) cell.resize(1);  // rather no number than a part of it
      cell.resize(length, '-');
      line.replace(begin, length, cell);
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace pdl
