#include "parallel/grid/process_grid.h"

#include <algorithm>
#include <string>
#include <vector>

#include "engine/base/error.h"
#include "tests/support/catch.h"

using namespace pdl;
using Groups = std::vector<std::vector<int>>;

TEST_CASE("the groups of 16 ranks in Megatron-LM's order") {
  const ProcessGrid grid({.tp = 2, .dp = 2, .pp = 4}, "tp-dp-pp");
  CHECK(grid.groups("dp") == Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}});
  CHECK(grid.groups("tp") == Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}});
  CHECK(grid.groups("pp") == Groups{{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}});
  CHECK(grid.group("pp", 9) == std::vector<int>{1, 5, 9, 13});
  CHECK(grid.coordinate(13) == GridCoordinate{.tp = 1, .dp = 0, .pp = 3});
}

TEST_CASE("the first axis of the order varies fastest") {
  const ProcessGrid grid({.tp = 2, .dp = 2, .pp = 3}, "pp-tp-dp");
  CHECK(grid.groups("pp") == Groups{{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 10, 11}});
  CHECK(grid.groups("tp") == Groups{{0, 3}, {1, 4}, {2, 5}, {6, 9}, {7, 10}, {8, 11}});
  CHECK(grid.groups("dp") == Groups{{0, 6}, {1, 7}, {2, 8}, {3, 9}, {4, 10}, {5, 11}});
}

TEST_CASE("every order and shape: ranks and coordinates are inverse, groups partition the ranks") {
  for (const std::string order : {"tp-dp-pp", "tp-pp-dp", "dp-tp-pp", "dp-pp-tp", "pp-tp-dp", "pp-dp-tp"}) {
    for (const GridSize size : {GridSize{1, 1, 1}, GridSize{2, 3, 1}, GridSize{3, 2, 5}, GridSize{1, 7, 2}}) {
      const ProcessGrid grid(size, order);
      for (int rank = 0; rank < size.ranks(); ++rank) CHECK(grid.rank(grid.coordinate(rank)) == rank);
      for (const std::string axis : {"tp", "dp", "pp"}) {
        std::vector<int> all;
        for (const std::vector<int>& group : grid.groups(axis)) {
          for (const int rank : group) CHECK(grid.group(axis, rank) == group);
          all.insert(all.end(), group.begin(), group.end());
        }
        std::sort(all.begin(), all.end());
        for (int rank = 0; rank < size.ranks(); ++rank) CHECK(all.at(static_cast<std::size_t>(rank)) == rank);
        CHECK(static_cast<int>(all.size()) == size.ranks());
      }
    }
  }
}

TEST_CASE("what is no grid is refused") {
  for (const std::string order : {"", "tp-dp", "tp-dp-dp", "tp,dp,pp", "tp-dp-pp-", "xx-dp-pp"}) {
    CHECK_THROWS_AS(ProcessGrid({}, order), Error);
  }
  CHECK_THROWS_AS(ProcessGrid({.tp = 0, .dp = 1, .pp = 1}), Error);
  const ProcessGrid grid({.tp = 2, .dp = 2, .pp = 1});
  CHECK_THROWS_AS(grid.coordinate(4), Error);
  CHECK_THROWS_AS(grid.coordinate(-1), Error);
  CHECK_THROWS_AS(grid.rank({.tp = 2, .dp = 0, .pp = 0}), Error);
  CHECK_THROWS_AS(grid.groups("cp"), Error);
}
