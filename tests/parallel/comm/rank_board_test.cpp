#include "parallel/comm/rank_board.h"

#include <memory>
#include <string>
#include <vector>

#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// Three ranks of one host, world ranks 4 to 6, and a fourth of a group that lives elsewhere; all in this process.
struct Host {
  std::vector<std::unique_ptr<RankBoard>> memory;
  std::vector<std::unique_ptr<HostBoard>> ranks;
  std::vector<std::unique_ptr<GroupBoard>> groups;

  explicit Host(bool with_stranger = false) {
    std::vector<RankBoard*> boards;
    for (int i = 0; i < 3; ++i) {
      memory.push_back(std::make_unique<RankBoard>());
      boards.push_back(memory.back().get());
    }
    for (int i = 0; i < 3; ++i) ranks.push_back(std::make_unique<HostBoard>(boards, std::vector<int>{4, 5, 6}, i));
    std::vector<BoardMember> members;
    for (int i = 0; i < 3; ++i) {
      groups.push_back(std::make_unique<GroupBoard>(*ranks[static_cast<std::size_t>(i)]));
      members.push_back(groups.back()->mine());
    }
    if (with_stranger) members.push_back({.world_rank = 9, .ring = 0, .generation = 1});
    for (auto& group : groups) group->set_members(members);
  }
};

const CallRecord kAllReduce{.call = CommCall::all_reduce, .dtype = DType::fp32, .count = 64};
const CallRecord kBroadcast{.call = CommCall::broadcast, .dtype = DType::fp32, .root = 1, .count = 32};

}  // namespace

TEST_CASE("calls in words") {
  CHECK(describe(kAllReduce) == "all_reduce of 64 fp32");
  CHECK(describe({.call = CommCall::all_reduce, .dtype = DType::int64, .op = ReduceOp::max, .count = 1}) ==
        "all_reduce (max) of 1 int64");
  CHECK(describe(kBroadcast) == "broadcast of 32 fp32 from rank 1");
  CHECK(describe({.call = CommCall::send, .dtype = DType::bf16, .root = 2, .count = 8, .tag = 3}) ==
        "send of 8 bf16 to rank 2");
  CHECK(describe({.call = CommCall::all_to_all, .dtype = DType::fp64}) == "all_to_all of fp64");
  CHECK(describe({.call = CommCall::barrier}) == "barrier");
}

TEST_CASE("a ring keeps the last 64 calls") {
  const auto ring = std::make_unique<CallRing>();
  ring->reset();
  CallRing::Entry entry;
  CHECK(!ring->find(1, entry));
  for (int i = 1; i <= 100; ++i)
    CHECK(ring->publish({.call = CommCall::broadcast, .dtype = DType::fp16, .root = 0, .count = i}, Executor::host) ==
          i);
  CHECK(ring->last() == 100);
  CHECK(!ring->find(36, entry));
  CHECK(!ring->find(101, entry));
  REQUIRE(ring->find(37, entry));
  CHECK(entry.record == CallRecord{.call = CommCall::broadcast, .dtype = DType::fp16, .root = 0, .count = 37});
  ring->reset();
  CHECK(ring->last() == 0);
  CHECK(!ring->find(100, entry));
}

TEST_CASE("calls that differ are told apart, the lower rank first") {
  Host host;
  CHECK(host.groups[1]->publish(kBroadcast) == 1);
  CHECK(host.groups[1]->difference(1, "axis dp").empty());
  CHECK(host.groups[0]->publish(kAllReduce) == 1);
  const std::string text = host.groups[0]->difference(1, "axis dp");
  CHECK(text ==
        "rank 4 called all_reduce of 64 fp32 (operation 1 of axis dp) while rank 5 called broadcast of 32 fp32 from "
        "rank 5");
  CHECK(host.groups[1]->difference(1, "axis dp") == text);
  CHECK(host.groups[2]->publish(kAllReduce) == 1);
  CHECK_THAT(host.groups[2]->difference(1, "axis dp"), StartsWith("rank 5 called broadcast"));
}

TEST_CASE("a peer that has not come so far is compared at its last call") {
  Host host;
  host.groups[0]->publish(kBroadcast);  // a root is through with its broadcast before anybody else comes
  host.groups[0]->publish(kAllReduce);
  CHECK(host.groups[0]->difference(2, "axis dp").empty());
  host.groups[1]->publish(kAllReduce);
  CHECK_THAT(host.groups[0]->difference(2, "axis dp"),
             StartsWith("rank 4 called broadcast of 32 fp32 from rank 5 (operation 1 of"));
}

TEST_CASE("operation, type, count, root and reduction are compared, tags are not") {
  const std::vector<CallRecord> others = {
      {.call = CommCall::reduce, .dtype = DType::fp32, .root = 0, .count = 64},
      {.call = CommCall::broadcast, .dtype = DType::int32, .root = 0, .count = 64},
      {.call = CommCall::broadcast, .dtype = DType::fp32, .root = 1, .count = 64},
      {.call = CommCall::broadcast, .dtype = DType::fp32, .op = ReduceOp::max, .root = 0, .count = 64},
      {.call = CommCall::broadcast, .dtype = DType::fp32, .root = 0, .count = (1ll << 40) + 64}};
  for (const CallRecord& other : others) {
    Host host;
    host.groups[0]->publish({.call = CommCall::broadcast, .dtype = DType::fp32, .root = 0, .count = 64});
    host.groups[2]->publish(other);
    CHECK(!host.groups[0]->difference(1, "axis tp").empty());
  }
  Host host;
  host.groups[0]->publish({.call = CommCall::barrier, .tag = 1});
  host.groups[2]->publish({.call = CommCall::barrier, .tag = 2});
  CHECK(host.groups[0]->difference(1, "axis tp").empty());
}

TEST_CASE("a difference that is no longer on the board is still noticed") {
  Host host;
  host.groups[0]->publish(kBroadcast);
  for (int i = 0; i < 80; ++i) host.groups[0]->publish(kAllReduce);
  host.groups[1]->publish(kAllReduce);
  CHECK(host.groups[1]->difference(1, "axis dp").empty());  // rank 4's first call is gone
  for (int i = 0; i < 80; ++i) host.groups[1]->publish(kAllReduce);
  CHECK_THAT(host.groups[1]->difference(81, "axis dp"), ContainsSubstring("called different operations before it"));
}

TEST_CASE("who is late, and what is known of it") {
  Host host(true);
  host.groups[1]->publish(kAllReduce);
  host.ranks[1]->mine().phase.write("step 3, backward");
  host.ranks[1]->mine().waiting.write("recv of 8 fp32");
  for (int i = 0; i < 2; ++i) host.groups[0]->publish(kAllReduce);
  const std::string text = host.groups[0]->late_members(2, 100.0);
  CHECK(text ==
        "rank 5 has not arrived (its last operation is 1, all_reduce of 64 fp32; it waits for recv of 8 fp32; it "
        "announced \"step 3, backward\"); rank 6 has not arrived (no operation yet); ranks on other hosts, which "
        "cannot be "
        "seen from here: 1");
  for (int i = 0; i < 2; ++i) host.groups[2]->publish(kAllReduce);
  host.groups[1]->publish(kAllReduce);
  CHECK_THAT(host.groups[0]->late_members(2, 100.0),
             StartsWith("all ranks of this host have arrived; ranks on other hosts"));
  CHECK_THAT(host.groups[0]->late_members(2, 0.0),
             ContainsSubstring("rank 6 has arrived but has been silent for 0.0 s"));
  CHECK(host.groups[0]->describe_member(3) == "on another host");
}

TEST_CASE("a rank whose GPU has not come to an operation is late, though its host has called it") {
  Host host;
  for (auto& group : host.groups) group->publish(kAllReduce, Executor::gpu);
  host.groups[0]->reach(1);
  host.groups[2]->reach(1);
  host.ranks[1]->mine().waiting.write("its own GPU");
  CHECK(host.groups[0]->late_members(1, 100.0) ==
        "rank 5 has queued it, but its GPU has not been seen in it (its last operation is 1, all_reduce of 64 fp32; it "
        "waits for its own GPU)");
  host.groups[1]->reach(1);
  CHECK(host.groups[0]->late_members(1, 100.0) == "all ranks of this host have arrived");
  CHECK(host.groups[1]->publish(kBroadcast) == 2);  // the host's own
  host.groups[1]->reach(1);                         // no way back
  host.groups[0]->publish(kBroadcast);
  host.groups[2]->publish(kBroadcast);
  CHECK(host.groups[0]->late_members(2, 100.0) == "all ranks of this host have arrived");
}

TEST_CASE("a ring serves the next communicator when its own is gone") {
  Host host;
  host.groups[1]->publish(kBroadcast);
  host.groups[1].reset();
  host.groups[0]->publish(kAllReduce);
  CHECK(!host.groups[0]->difference(1, "axis dp").empty());  // what was written stays until the ring is used again
  std::vector<std::unique_ptr<GroupBoard>> more;
  for (int i = 0; i < RankBoard::kRings; ++i) more.push_back(std::make_unique<GroupBoard>(*host.ranks[1]));
  CHECK(host.groups[0]->difference(1, "axis dp").empty());
  CHECK_THAT(host.groups[0]->late_members(1, 100.0), StartsWith("rank 5 has left this group"));
  CHECK_THROWS_AS(GroupBoard(*host.ranks[1]), Error);
  more.pop_back();
  const GroupBoard again(*host.ranks[1]);
}

TEST_CASE("the first failure of a host is claimed once") {
  Host host;
  CHECK(host.ranks[2]->first_failure().rank == -1);
  CHECK(host.ranks[1]->claim_failure(ExitCode::out_of_memory, "no room"));
  CHECK(!host.ranks[0]->claim_failure(ExitCode::communication, "a peer is gone"));
  CHECK(host.ranks[1]->claim_failure(ExitCode::internal, "a consequence"));  // it is the first; its first words stand
  const FirstFailure failure = host.ranks[2]->first_failure();
  CHECK(failure.rank == 5);
  CHECK(failure.message == "no room");
  CHECK(failure.code == ExitCode::out_of_memory);
}

TEST_CASE("texts on the board are cut, replaced and emptied") {
  BoardText text;
  CHECK(text.read().empty());
  text.write(std::string(500, 'x'));
  CHECK(text.read() == std::string(BoardText::kBytes, 'x'));
  text.write("short");
  CHECK(text.read() == "short");
  text.write("");
  CHECK(text.read().empty());
}
