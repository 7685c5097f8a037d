// Ranks that disagree or do not come: every rank gets an Error that says so, in time, and none hangs.

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/mpi/ranks.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// Runs an action that must fail because of its peers and returns the message.
std::string failure_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::communication);
    return error.what();
  }
  return "no error";
}

void sleep_s(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

/// The last rank does one thing, all others another; nobody may get away with it.
std::string check_mismatch(const std::function<Work(Ranks&, Communicator&)>& usual,
                           const std::function<Work(Ranks&, Communicator&)>& odd, bool deterministic) {
  Ranks ranks;
  const auto group = ranks.communicator(deterministic, 5.0);
  std::vector<float> values(8, 1.0f);
  group->all_reduce(tensor_of(values), ReduceOp::sum, ranks.stream).wait(ranks.stream);
  const std::string message = failure_of([&] {
    Work work = ranks.rank + 1 == ranks.size ? odd(ranks, *group) : usual(ranks, *group);
    work.wait(ranks.stream);
    // The root of a broadcast is through with it whatever the others do; it hears of it in the next operation.
    group->all_reduce(tensor_of(values), ReduceOp::sum, ranks.stream).wait(ranks.stream);
  });
  ranks.world->barrier();  // all came here: none hangs
  CHECK_THAT(message, ContainsSubstring("(operation 2 of axis world) while rank " + std::to_string(ranks.size - 1) +
                                        " called "));
  return message;
}

std::vector<float> floats(64, 1.0f);
std::vector<std::int32_t> integers(64, 1);

Work reduce_floats(Ranks& ranks, Communicator& group, std::int64_t count) {
  return group.all_reduce(tensor_of(floats).range(0, count), ReduceOp::sum, ranks.stream);
}

}  // namespace

TEST_CASE("ranks that call different operations, counts, types or roots all fail") {
  if (Ranks().size < 2) return;
  for (const bool deterministic : {false, true}) {
    const auto usual = [](Ranks& ranks, Communicator& group) { return reduce_floats(ranks, group, 64); };
    const std::string message = check_mismatch(
        usual,
        [](Ranks& ranks, Communicator& group) {
          return group.broadcast(tensor_of(floats).range(0, 32), 0, ranks.stream);
        },
        deterministic);
    CHECK_THAT(message, ContainsSubstring("called all_reduce of 64 fp32 (operation 2 of axis world)"));
    CHECK_THAT(message, EndsWith("called broadcast of 32 fp32 from rank 0"));
    CHECK_THAT(
        check_mismatch(
            usual, [](Ranks& ranks, Communicator& group) { return reduce_floats(ranks, group, 32); }, deterministic),
        EndsWith("called all_reduce of 32 fp32"));
    CHECK_THAT(check_mismatch(
                   usual,
                   [](Ranks& ranks, Communicator& group) {
                     return group.all_reduce(tensor_of(integers), ReduceOp::sum, ranks.stream);
                   },
                   deterministic),
               EndsWith("called all_reduce of 64 int32"));
    CHECK_THAT(check_mismatch(
                   usual,
                   [](Ranks& ranks, Communicator& group) {
                     return group.all_reduce(tensor_of(floats), ReduceOp::max, ranks.stream);
                   },
                   deterministic),
               EndsWith("called all_reduce (max) of 64 fp32"));
  }
  CHECK_THAT(
      check_mismatch(
          [](Ranks& ranks, Communicator& group) { return group.broadcast(tensor_of(floats), 0, ranks.stream); },
          [](Ranks& ranks, Communicator& group) { return group.broadcast(tensor_of(floats), 1, ranks.stream); }, false),
      EndsWith("called broadcast of 64 fp32 from rank 1"));
}

TEST_CASE("a mismatch is found at whatever moment the ranks come") {
  if (Ranks().size < 2) return;
  for (const int late_rank : {0, 1}) {
    check_mismatch(
        [late_rank](Ranks& ranks, Communicator& group) {
          if (ranks.rank == late_rank) sleep_s(0.3);
          return reduce_floats(ranks, group, 64);
        },
        [late_rank](Ranks& ranks, Communicator& group) {
          if (ranks.rank == late_rank) sleep_s(0.3);
          return reduce_floats(ranks, group, 63);
        },
        false);
  }
}

TEST_CASE("a rank that does not come is named, with its last operation and phase") {
  Ranks ranks;
  if (ranks.size < 2) return;
  for (const bool deterministic : {false, true}) {
    const auto group = ranks.communicator(deterministic, 0.5);
    reduce_floats(ranks, *group, 8).wait(ranks.stream);
    ranks.world->announce("step 7, backward");
    ranks.world->barrier();
    if (ranks.rank == 1) {
      sleep_s(1.0);
    } else {
      const auto start = std::chrono::steady_clock::now();
      const std::string message = failure_of([&] { reduce_floats(ranks, *group, 64).wait(ranks.stream); });
      CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(4));
      CHECK_THAT(message, StartsWith("rank " + std::to_string(ranks.rank) + " waited "));
      CHECK_THAT(message, ContainsSubstring(" s in vain for all_reduce of 64 fp32 (operation 2 of axis world): "));
      CHECK_THAT(message, ContainsSubstring("rank 1 has not arrived (its last operation is 1, all_reduce of 8 fp32"));
      CHECK_THAT(message, ContainsSubstring("it announced \"step 7, backward\""));
      CHECK_THAT(message, !ContainsSubstring("rank 0 has not arrived"));
    }
    ranks.world->barrier();
  }
}

TEST_CASE("the world's exchanges have a deadline too") {
  Ranks ranks;
  if (ranks.size < 2) return;
  Ranks other;  // a world of its own: the first one's exchanges stay usable
  other.world->set_timeout(0.4);
  if (ranks.rank == 1) {
    sleep_s(0.8);
  } else {
    const std::string message = failure_of([&] { other.world->barrier(); });
    CHECK_THAT(message, ContainsSubstring("in vain for barrier (operation 1 of the world's exchanges): "));
    CHECK_THAT(message, ContainsSubstring("rank 1 has not arrived (no operation yet"));
  }
  ranks.world->barrier();
  other.world->claim_first_failure(ExitCode::communication, "given up on purpose");  // its end would wait as well
}

TEST_CASE("a message that does not come names the peer") {
  Ranks ranks;
  if (ranks.size < 2) return;
  const auto group = ranks.communicator(false, 0.4);
  if (ranks.rank == 0) {
    const std::string message =
        failure_of([&] { group->recv(tensor_of(floats), 1, 3, ranks.stream).wait(ranks.stream); });
    CHECK_THAT(message, ContainsSubstring(
                            "in vain for recv of 64 fp32 from rank 1 (tag 3, axis world): rank 1 has not sent it"));
  }
  ranks.world->barrier();
}

TEST_CASE("a message of another length is an error") {
  Ranks ranks;
  if (ranks.size < 2) return;
  for (const std::int64_t sent : {32, 64}) {
    const auto group = ranks.communicator(false, 5.0);
    std::vector<float> out(48);
    if (ranks.rank == 0) {
      const std::string message =
          failure_of([&] { group->recv(tensor_of(out), 1, 0, ranks.stream).wait(ranks.stream); });
      CHECK_THAT(message, StartsWith("recv of 48 fp32 from rank 1 (tag 0, axis world): "));
      CHECK_THAT(message, ContainsSubstring(sent == 32 ? "got only 32 of 48 elements" : "runcated"));
    } else if (ranks.rank == 1) {
      group->send(tensor_of(floats).range(0, sent), 0, 0, ranks.stream).wait(ranks.stream);
    }
    ranks.world->barrier();
  }
}

TEST_CASE("when a rank has failed, waits of its peers end with its message and code") {
  Ranks ranks;
  if (ranks.size < 2) return;
  Ranks failed;
  const auto group = failed.communicator(false, 10.0);
  ranks.world->barrier();
  if (ranks.rank == 1) {
    CHECK(failed.world->claim_first_failure(ExitCode::out_of_memory, "no room for activations"));
  } else {
    try {
      reduce_floats(ranks, *group, 64).wait(ranks.stream);
      FAIL("no error");
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::out_of_memory);
      CHECK(std::string(error.what()) == "stopped by rank 1: no room for activations");
    }
    CHECK(!failed.world->claim_first_failure(ExitCode::communication, "a consequence"));
  }
  ranks.world->barrier();
  CHECK(failed.world->first_failure().rank == 1);
  CHECK(failed.world->first_failure().code == ExitCode::out_of_memory);
}
