// The order of work of every schedule: published tables, and that all of them pass the check for many sizes.

#include <algorithm>
#include <regex>

#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/schedule_check.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// compute_order without the updates.
std::string passes(const Schedule& schedule, int rank) {
  return std::regex_replace(compute_order(schedule, rank), std::regex(" U[0-9]+"), "");
}

void check_order(const Schedule& schedule, const std::vector<std::string>& expected) {
  INFO(schedule.name);
  CHECK(schedule_fault(schedule).empty());
  REQUIRE(schedule.ranks.size() == expected.size());
  for (int rank = 0; rank < static_cast<int>(expected.size()); ++rank) {
    INFO("rank " << rank);
    CHECK(passes(schedule, rank) == expected[static_cast<std::size_t>(rank)]);
  }
}

/// Most (micro-batch, chunk) pairs between forward and backward.
int peak_in_flight(const RankSchedule& rank) {
  int now = 0, peak = 0;
  for (const Action& action : rank.actions) {
    if (action.act == Act::forward) peak = std::max(peak, ++now);
    if (action.act == Act::backward) --now;
  }
  return peak;
}

std::vector<int> peaks(const Schedule& schedule) {
  std::vector<int> all;
  for (const RankSchedule& rank : schedule.ranks) all.push_back(peak_in_flight(rank));
  return all;
}

int count(const Schedule& schedule, int rank, Act act) {
  int found = 0;
  for (const Action& action : schedule.ranks[static_cast<std::size_t>(rank)].actions)
    found += action.act == act ? 1 : 0;
  return found;
}

}  // namespace

TEST_CASE("fill-drain goes forward, then backward in reverse", "[pipeline]") {
  const std::string forwards = "F0 F1 F2 F3 ";
  check_order(fill_drain(3, 4, Checkpoint::never), std::vector<std::string>(3, forwards + "B3 B2 B1 B0"));
  check_order(fill_drain(3, 4, Checkpoint::except_last),
              std::vector<std::string>(3, forwards + "B3 R2 B2 R1 B1 R0 B0"));
  check_order(fill_drain(3, 4, Checkpoint::always), std::vector<std::string>(3, forwards + "R3 B3 R2 B2 R1 B1 R0 B0"));
  check_order(fill_drain(2, 3, Checkpoint::never, true), {"F0 F1 F2 B2 B1 B0", "F0 F1 F2 L0 L1 L2 B2 B1 B0"});
}

TEST_CASE("recomputations are all micro-batches, all but the last, or none", "[pipeline]") {
  for (int m : {1, 3, 8}) {
    for (int rank : {0, 1}) {
      CHECK(count(fill_drain(2, m, Checkpoint::always), rank, Act::recompute) == m);
      CHECK(count(fill_drain(2, m, Checkpoint::except_last), rank, Act::recompute) == m - 1);
      CHECK(count(fill_drain(2, m, Checkpoint::never), rank, Act::recompute) == 0);
    }
  }
}

TEST_CASE("a recomputation stands before its gradient arrives", "[pipeline]") {
  const Schedule schedule = fill_drain(2, 4, Checkpoint::always);
  const std::vector<Action>& actions = schedule.ranks[0].actions;
  int found = 0;
  for (std::size_t i = 0; i + 2 < actions.size(); ++i) {
    if (actions[i].act != Act::recompute) continue;
    ++found;
    CHECK(actions[i + 1].act == Act::receive_gradient);
    CHECK(actions[i + 2].act == Act::backward);
  }
  CHECK(found == 4);
}

TEST_CASE("1F1B with flush", "[pipeline]") {
  check_order(one_forward_one_backward(2, 4), {"F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"});
  check_order(one_forward_one_backward(4, 4), {"F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 B0 F3 B1 B2 B3",
                                               "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"});
  check_order(one_forward_one_backward(4, 8),
              {"F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7", "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
               "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7", "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"});
  check_order(one_forward_one_backward(4, 2), {"F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"});
}

TEST_CASE("interleaved 1F1B", "[pipeline]") {
  check_order(interleaved(2, 4, 2),
              {"F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0",
               "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"});
  // Groups of three out of five micro-batches: 0 1 2 0 1 2 3 4 3 4 with chunks 0 0 0 1 1 1 0 0 1 1.
  std::string forwards;
  const Schedule grouped = interleaved(2, 5, 2, 3);
  for (const Action& action : grouped.ranks[0].actions) {
    if (action.act == Act::forward)
      forwards += std::to_string(action.micro_batch) + "." + std::to_string(action.chunk) + " ";
  }
  CHECK(forwards == "0.0 1.0 2.0 0.1 1.1 2.1 3.0 4.0 3.1 4.1 ");
  CHECK(peaks(interleaved(2, 8, 2)) == std::vector<int>{5, 3});
  CHECK(peaks(interleaved(4, 8, 2)) == std::vector<int>{11, 9, 7, 5});
  CHECK(peaks(interleaved(4, 8, 3)) == std::vector<int>{15, 13, 11, 9});
  CHECK_THROWS(interleaved(1, 4, 2));
  CHECK(schedule_fault(interleaved(4, 3, 2)).empty());
  CHECK_THROWS(interleaved(4, 6, 2, 4));
}

TEST_CASE("1F1B without flush, and which weights each mini-batch sees", "[pipeline]") {
  check_order(continuous({1, 1, 1, 1}, 6),
              {"F0@0 F1@0 F2@0 F3@0 B0 F4@1 B1 F5@2 B2 B3 B4 B5", "F0@0 F1@0 F2@0 B0 F3@1 B1 F4@2 B2 F5@3 B3 B4 B5",
               "F0@0 F1@0 B0 F2@1 B1 F3@2 B2 F4@3 B3 F5@4 B4 B5", "F0@0 B0 F1@1 B1 F2@2 B2 F3@3 B3 F4@4 B4 F5@5 B5"});
  const Schedule replicated = continuous({3, 1}, 6);
  CHECK(schedule_fault(replicated).empty());
  CHECK(compute_order(replicated, 0) == "F0@0 F3@0 B0 U0 B3 U1");
  CHECK(compute_order(replicated, 1) == "F1@0 F4@0 B1 U0 B4 U1");
  CHECK(compute_order(replicated, 2) == "F2@0 F5@0 B2 U0 B5 U1");
  CHECK(passes(replicated, 3) == "F0@0 B0 F1@1 B1 F2@2 B2 F3@3 B3 F4@4 B4 F5@5 B5");
}

TEST_CASE("warm-up depths follow the replicas", "[pipeline]") {
  CHECK(warm_up_depth({1, 1, 1, 1}, 0) == 3);
  CHECK(warm_up_depth({1, 1, 1, 1}, 3) == 0);
  CHECK(warm_up_depth({15, 1}, 0) == 1);
  CHECK(warm_up_depth({3, 1}, 0) == 1);
  CHECK(warm_up_depth({1, 3}, 0) == 3);
  CHECK(warm_up_depth({4}, 0) == 0);
}

TEST_CASE("every schedule passes its check, and keeps as much in flight as it says", "[pipeline]") {
  const auto check = [](const Schedule& schedule) {
    INFO(schedule.name << ", " << schedule.stages << " stages, " << schedule.micro_batches << " micro-batches");
    CHECK(schedule_fault(schedule) == "");
    for (const RankSchedule& rank : schedule.ranks) CHECK(peak_in_flight(rank) == rank.in_flight);
  };
  for (int p : {1, 2, 3, 4, 6}) {
    for (int m : {1, 2, 3, 5, 8, 13}) {
      for (Checkpoint mode : {Checkpoint::always, Checkpoint::except_last, Checkpoint::never}) {
        check(fill_drain(p, m, mode));
        check(fill_drain(p, m, mode, true));
      }
      check(one_forward_one_backward(p, m));
      check(continuous(std::vector<int>(static_cast<std::size_t>(p), 1), m));
      CHECK(schedule_fault(forward_only(std::vector<int>(static_cast<std::size_t>(p), 1), m, 1, true)).empty());
    }
  }
  for (const std::vector<int>& replicas : std::vector<std::vector<int>>{
           {1}, {4}, {3, 1}, {2, 2}, {2, 1, 1}, {1, 2}, {1, 3}, {2, 4}, {4, 2, 1, 1}, {15, 1}, {3, 2}, {2, 3}}) {
    check(continuous(replicas, 60));
  }
  for (int p : {2, 4}) {
    for (int chunks : {2, 3, 4}) {
      for (int m : {8, 32}) check(interleaved(p, m, chunks));
      CHECK(schedule_fault(forward_only(std::vector<int>(static_cast<std::size_t>(p), 1), 5, chunks)).empty());
    }
  }
  check(interleaved(4, 32, 2, 5 + 3));
  check(interleaved(8, 32, 2, 12));
}

TEST_CASE("two weight versions suffice from stages - 1 micro-batches on", "[pipeline]") {
  for (int m : {3, 4, 8}) CHECK(schedule_fault(double_buffered(4, m, 5)).empty());
  CHECK_THAT(schedule_fault(double_buffered(4, 2, 5)), ContainsSubstring("do not exist yet"));
  CHECK(schedule_fault(double_buffered(3, 2, 5)).empty());
  CHECK_THAT(schedule_fault(double_buffered(3, 1, 5)), ContainsSubstring("do not exist yet"));
}

TEST_CASE("with vertical sync every stage uses the versions of the first one") {
  const Schedule schedule = continuous({1, 1, 1}, 6, Stashing::vertical_sync);
  CHECK(schedule_fault(schedule).empty());
  CHECK(compute_order(schedule, 0) == "F0@0 F1@0 F2@0 B0 U0 F3@1 B1 U1 F4@2 B2 U2 F5@3 B3 U3 B4 U4 B5 U5");
  CHECK(compute_order(schedule, 2) == "F0@0 B0 U0 F1@0 B1 U1 F2@0 B2 U2 F3@1 B3 U3 F4@2 B4 U4 F5@3 B5 U5");
  for (const RankSchedule& rank : schedule.ranks) CHECK(rank.versions == 3);
}

TEST_CASE("without a stash a mini-batch goes back through other weights than it came through") {
  Schedule schedule = continuous({1, 1, 1}, 6, Stashing::none);
  CHECK(schedule_fault(schedule).empty());
  for (const Action& action : schedule.ranks[0].actions) {
    if (action.act == Act::forward) CHECK(action.version == std::max(0, action.micro_batch - 2));
    if (action.act == Act::backward) CHECK(action.version == action.micro_batch);
  }
  schedule.same_weights = true;
  CHECK_THAT(schedule_fault(schedule), ContainsSubstring("forward used"));
}

TEST_CASE("a schedule that goes on uses the weights that one over both parts would use", "[pipeline]") {
  constexpr int kBefore = 24, kUnits = 36;
  // Of each forward and backward pass, in updates since the beginning of everything.
  const auto versions_of = [](const Schedule& schedule, std::size_t rank, int first_unit, int first_version) {
    std::map<std::pair<Act, int>, int> versions;
    for (const Action& action : schedule.ranks[rank].actions) {
      if (action.act != Act::forward && action.act != Act::backward) continue;
      versions[{action.act, first_unit + action.micro_batch}] = first_version + action.version;
    }
    return versions;
  };
  const auto check = [&](const Schedule& whole, const Schedule& rest, int units_per_round) {
    INFO(whole.name << ", " << whole.ranks.size() << " ranks");
    CHECK(schedule_fault(rest) == "");
    for (std::size_t rank = 0; rank < rest.ranks.size(); ++rank) {
      const int replicas = rest.replicas[static_cast<std::size_t>(rest.ranks[rank].stage)];
      const auto expected = versions_of(whole, rank, 0, 0);
      for (const auto& [pass, version] : versions_of(rest, rank, kBefore, kBefore / replicas / units_per_round)) {
        CHECK(expected.at(pass) == version);
      }
    }
  };
  for (const std::vector<int>& replicas :
       std::vector<std::vector<int>>{{1}, {1, 1}, {1, 1, 1, 1}, {3, 1}, {2, 2}, {2, 1, 1}, {1, 3}}) {
    for (const Stashing stashing : {Stashing::stash, Stashing::none, Stashing::vertical_sync}) {
      if (stashing == Stashing::vertical_sync && replicas != std::vector<int>(replicas.size(), 1)) continue;
      check(continuous(replicas, kBefore + kUnits, stashing), continuous(replicas, kUnits, stashing, kBefore), 1);
    }
  }
  check(double_buffered(4, 3, (kBefore + kUnits) / 3), double_buffered(4, 3, kUnits / 3, kBefore), 3);
}

TEST_CASE("a schedule that goes on needs all the versions that are held", "[pipeline]") {
  CHECK(compute_order(continuous({1, 1, 1}, 3, Stashing::stash, 9), 0) == "F0@-2 F1@-1 F2@0 B0 U0 B1 U1 B2 U2");
  CHECK(compute_order(continuous({1, 1, 1}, 3, Stashing::stash, 1), 0) == "F0@-1 F1@-1 F2@0 B0 U0 B1 U1 B2 U2");
  CHECK(compute_order(double_buffered(2, 2, 2, 2), 1) == "F0@-1 B0 F1@-1 B1 U0 F2@0 B2 F3@0 B3 U1");
  Schedule schedule = continuous({1, 1, 1}, 6, Stashing::stash, 6);
  schedule.ranks[0].versions = 2;
  CHECK_THAT(schedule_fault(schedule), ContainsSubstring("needs weights of version -2"));
  // Without a stash one version is enough only when nothing was before.
  CHECK(continuous({1, 1, 1}, 6, Stashing::none).ranks[0].versions == 1);
  CHECK(continuous({1, 1, 1}, 6, Stashing::none, 0).ranks[0].versions == 3);
}

TEST_CASE("a pipeline that flushes does so after every mini-batch") {
  const Schedule schedule = flushed(2, 2, 2);
  CHECK(schedule_fault(schedule).empty());
  CHECK(compute_order(schedule, 0) == "F0 F1 B0 B1 U0 F2 F3 B2 B3 U1");
  CHECK(compute_order(schedule, 1) == "F0 B0 F1 B1 U0 F2 B2 F3 B3 U1");
}

TEST_CASE("in evaluation replicas take turns") {
  const Schedule schedule = forward_only({2, 1}, 4, 1);
  CHECK(schedule_fault(schedule).empty());
  CHECK(compute_order(schedule, 0) == "F0 F2");
  CHECK(compute_order(schedule, 1) == "F1 F3");
  CHECK(compute_order(schedule, 2) == "F0 F1 F2 F3");
}
