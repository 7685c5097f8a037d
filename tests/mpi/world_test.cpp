// The world of several ranks: who is who, and the small exchanges.

#include <string>
#include <vector>

#include "tests/mpi/ranks.h"
#include "tests/support/catch.h"

using namespace pdl;

TEST_CASE("every rank knows its place") {
  const Ranks ranks;
  const RankInfo& info = ranks.world->info();
  CHECK(info.rank >= 0);
  CHECK(info.rank < info.size);
  CHECK(info.local_size <= info.size);
  CHECK(info.local_rank < info.local_size);
  CHECK(!info.host.empty());
  CHECK(!info.launcher.empty());
  CHECK(!info.mpi_library.empty());
  CHECK(info.mpi_library.find('\n') == std::string::npos);
  const std::vector<std::string> places = ranks.world->gather(std::to_string(info.rank));
  for (int rank = 0; rank < info.size; ++rank) CHECK(places.at(static_cast<std::size_t>(rank)) == std::to_string(rank));
}

TEST_CASE("numbers are reduced in rank order, texts broadcast and gathered") {
  Ranks ranks;
  std::vector<double> sum = {1.0, 0.1 * (ranks.rank + 1)}, most = {static_cast<double>(ranks.rank)}, nothing;
  ranks.world->reduce(sum, ReduceOp::sum);
  ranks.world->reduce(most, ReduceOp::max);
  ranks.world->reduce(nothing, ReduceOp::min);
  double expected = 0.1;
  for (int rank = 1; rank < ranks.size; ++rank) expected += 0.1 * (rank + 1);
  CHECK(sum == std::vector<double>{static_cast<double>(ranks.size), expected});
  CHECK(most[0] == ranks.size - 1);

  for (int root = 0; root < ranks.size; ++root) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{5}, std::size_t{1} << 20}) {
      const std::string text(bytes, static_cast<char>('a' + root));
      CHECK(ranks.world->broadcast(ranks.rank == root ? text : "to be replaced", root) == text);
    }
  }
  const std::vector<std::string> texts =
      ranks.world->gather(std::string(static_cast<std::size_t>(ranks.rank * 1000), 'x'));
  REQUIRE(static_cast<int>(texts.size()) == ranks.size);
  for (int rank = 0; rank < ranks.size; ++rank)
    CHECK(static_cast<int>(texts[static_cast<std::size_t>(rank)].size()) == rank * 1000);
  ranks.world->barrier();
}

TEST_CASE("communicators of a kind that cannot be here are refused") {
  Ranks ranks;
  for (const std::string kind : {"nccl", "smoke"}) {
    CHECK_THROWS_WITH(ranks.world->make_communicator(*ranks.device, {.kind = kind}), ContainsSubstring(kind));
  }
  if (ranks.size > 1) {
    CHECK_THROWS_AS(ranks.world->make_communicator(*ranks.device, {.kind = "self"}), ConfigError);
    CHECK(ranks.world->make_communicator(*ranks.device, {})->transport() == "mpi");
  } else {
    CHECK(ranks.world->make_communicator(*ranks.device, {.kind = "self"})->transport() == "self");
    CHECK(ranks.world->make_communicator(*ranks.device, {})->transport() == "self");
  }
}

TEST_CASE("a rank may hold many communicators, one after another") {
  Ranks ranks;
  for (int i = 0; i < 40; ++i) {
    const auto group = ranks.world->make_communicator(*ranks.device, {.kind = "mpi"});
    std::vector<std::int32_t> one = {1};
    group->all_reduce(tensor_of(one), ReduceOp::sum, ranks.stream).wait(ranks.stream);
    CHECK(one[0] == ranks.size);
  }
}
