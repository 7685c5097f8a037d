#include "parallel/sync/tournament.h"

#include <set>

#include "tests/support/catch.h"

using namespace pdl;

TEST_CASE("trainers meet in pairs, which change from meeting to meeting") {
  for (const int trainers : {2, 3, 4, 7, 8}) {
    std::set<int> partners_of_first;
    for (std::int64_t round = 1; round <= 40; ++round) {
      INFO(trainers << " trainers, round " << round);
      int sitting_out = 0;
      for (int trainer = 0; trainer < trainers; ++trainer) {
        const int partner = tournament_partner(trainer, trainers, 7, round);
        REQUIRE(partner >= 0);
        REQUIRE(partner < trainers);
        CHECK(tournament_partner(partner, trainers, 7, round) == trainer);
        sitting_out += partner == trainer ? 1 : 0;
      }
      CHECK(sitting_out == trainers % 2);
      partners_of_first.insert(tournament_partner(0, trainers, 7, round));
    }
    CHECK(static_cast<int>(partners_of_first.size()) == trainers - (trainers % 2 == 0 ? 1 : 0));
  }
}
