// The check refuses schedules that cannot be run, and says what is wrong with them.

#include "parallel/pipeline/schedule_check.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

std::vector<Action>& actions_of(Schedule& schedule, int rank) {
  return schedule.ranks[static_cast<std::size_t>(rank)].actions;
}

/// The place of an action in a rank's list.
std::vector<Action>::iterator find(Schedule& schedule, int rank, Act act, int micro_batch) {
  std::vector<Action>& actions = actions_of(schedule, rank);
  const auto found = std::find_if(actions.begin(), actions.end(), [&](const Action& action) {
    return action.act == act && action.micro_batch == micro_batch;
  });
  REQUIRE(found != actions.end());
  return found;
}

}  // namespace

TEST_CASE("a message that nobody receives is found", "[pipeline]") {
  Schedule schedule = one_forward_one_backward(2, 4);
  actions_of(schedule, 0).erase(find(schedule, 0, Act::receive_gradient, 3));
  CHECK_THAT(schedule_fault(schedule), ContainsSubstring("rank 0: backward of micro-batch 3 without having received"));
  actions_of(schedule, 0).erase(find(schedule, 0, Act::backward, 3));
  CHECK(schedule_fault(schedule) == "rank 0 never receives the gradient of micro-batch 3 that rank 1 sends");
}

TEST_CASE("a message that nobody sends is found", "[pipeline]") {
  Schedule schedule = one_forward_one_backward(2, 4);
  actions_of(schedule, 0).erase(find(schedule, 0, Act::send_activation, 3));
  CHECK(schedule_fault(schedule) ==
        "rank 1: receive of the activation of micro-batch 3 from rank 0, which never sends it");
}

TEST_CASE("messages in another order than they were sent are found", "[pipeline]") {
  Schedule schedule = fill_drain(2, 4, Checkpoint::never);
  std::iter_swap(find(schedule, 1, Act::receive_activation, 1), find(schedule, 1, Act::receive_activation, 2));
  CHECK_THAT(schedule_fault(schedule), ContainsSubstring("which sends that of micro-batch 1 first"));
}

TEST_CASE("ranks that wait for each other are found", "[pipeline]") {
  // Rank 0 wants the gradient before it sends the activation.
  Schedule schedule = one_forward_one_backward(2, 1);
  std::vector<Action>& actions = actions_of(schedule, 0);
  const Action receive = *find(schedule, 0, Act::receive_gradient, 0);
  actions.erase(find(schedule, 0, Act::receive_gradient, 0));
  actions.insert(actions.begin(), receive);
  CHECK(schedule_fault(schedule) ==
        "deadlock: rank 0 waits in receive of the gradient of micro-batch 0 from rank 1; "
        "rank 1 waits in receive of the activation of micro-batch 0 from rank 0");
}

TEST_CASE("a rank that sends more than its buffers hold waits", "[pipeline]") {
  // Rank 1 takes its first activation only once it has a gradient from nowhere: rank 0 is stuck in its third send.
  Schedule schedule = fill_drain(2, 4, Checkpoint::never);
  std::vector<Action>& actions = actions_of(schedule, 1);
  Action gradient = {.act = Act::receive_gradient, .micro_batch = 3, .peer = 0};
  actions.insert(actions.begin(), gradient);
  std::vector<Action>& first = actions_of(schedule, 0);
  first.push_back({.act = Act::send_gradient, .micro_batch = 3, .peer = 1});
  CHECK_THAT(schedule_fault(schedule), ContainsSubstring("rank 0 waits in send of the activation of micro-batch 2"));
}

TEST_CASE("passes in an impossible order are found", "[pipeline]") {
  Schedule schedule = one_forward_one_backward(1, 2);
  std::swap(actions_of(schedule, 0)[0], actions_of(schedule, 0)[1]);
  CHECK(schedule_fault(schedule) == "rank 0: backward of micro-batch 0 before its forward");

  schedule = fill_drain(1, 2, Checkpoint::always);
  actions_of(schedule, 0).erase(find(schedule, 0, Act::recompute, 1));
  CHECK_THAT(schedule_fault(schedule), ContainsSubstring("has to be recomputed first"));

  schedule = fill_drain(1, 2, Checkpoint::never);
  actions_of(schedule, 0).erase(find(schedule, 0, Act::backward, 0));
  CHECK(schedule_fault(schedule) == "rank 0: micro-batch 0 never goes backward through virtual stage 0");

  schedule = fill_drain(1, 2, Checkpoint::never);
  actions_of(schedule, 0).insert(find(schedule, 0, Act::forward, 1), *find(schedule, 0, Act::forward, 0));
  CHECK(schedule_fault(schedule) == "rank 0: forward of micro-batch 0 a second time");
}

TEST_CASE("more in flight than the bound is found", "[pipeline]") {
  Schedule schedule = one_forward_one_backward(2, 4);
  schedule.ranks[0].in_flight = 1;
  CHECK(schedule_fault(schedule) == "rank 0: forward of micro-batch 1 brings 2 into flight; the bound is 1");
}

TEST_CASE("weights that do not exist yet or are gone are found", "[pipeline]") {
  Schedule schedule = continuous({1, 1, 1, 1}, 8);
  schedule.ranks[0].versions = 3;  // one buffer too few: the update after B2 writes over version 0, which B3 needs
  CHECK(schedule_fault(schedule) ==
        "rank 0: backward of micro-batch 3 needs weights of version 0, which update 2 has overwritten: 3 versions are "
        "held");

  schedule = continuous({1, 1}, 4);
  find(schedule, 1, Act::forward, 1)->version = 2;
  CHECK_THAT(schedule_fault(schedule), ContainsSubstring("version 2, which do not exist yet after 1 updates"));

  schedule = continuous({1, 1}, 4);
  find(schedule, 0, Act::backward, 3)->version = 3;
  CHECK(schedule_fault(schedule) == "rank 0: backward of micro-batch 3 with weights of version 3; forward used 2");

  CHECK_THAT(schedule_fault(double_buffered(4, 2, 4)), ContainsSubstring("do not exist yet"));
}

TEST_CASE("replicas that do not all come to a reduction are found", "[pipeline]") {
  Schedule schedule = continuous({2, 1}, 4);
  std::vector<Action>& actions = actions_of(schedule, 1);
  std::erase_if(actions, [](const Action& action) { return action.act == Act::reduce && action.version == 1; });
  CHECK_THAT(schedule_fault(schedule), ContainsSubstring("deadlock: rank 0 waits in reduction of version 1"));
}

TEST_CASE("a faulty schedule is refused", "[pipeline]") {
  Schedule schedule = one_forward_one_backward(2, 2);
  CHECK_NOTHROW(check_schedule(schedule));
  actions_of(schedule, 0).pop_back();
  actions_of(schedule, 0).push_back({.act = Act::update, .version = 5});
  CHECK_THROWS_WITH(check_schedule(schedule), ContainsSubstring("1F1B: rank 0: update of version 5 after 0 updates"));
}
