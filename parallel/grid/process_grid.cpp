#include "parallel/grid/process_grid.h"

#include <algorithm>

#include "engine/base/error.h"

namespace pdl {
namespace {

/// The entry of an axis: extents and coordinates have the same names.
template <typename Triple>
auto& along(Triple& triple, const std::string& axis) {
  PDL_CHECK(axis == "tp" || axis == "dp" || axis == "pp", "a grid has no axis \"", axis, "\": there are tp, dp and pp");
  return axis == "tp" ? triple.tp : axis == "dp" ? triple.dp : triple.pp;
}

}  // namespace

ProcessGrid::ProcessGrid(GridSize size, const std::string& order) : size_(size) {
  PDL_CHECK(size.tp > 0 && size.dp > 0 && size.pp > 0, "tp ", size.tp, ", dp ", size.dp, ", pp ", size.pp);
  // Two letters an axis, one dash between: any permutation is eight characters long.
  const bool fits = order.size() == 8 && order[2] == '-' && order[5] == '-';
  for (std::size_t axis = 0; fits && axis < order_.size(); ++axis) order_[axis] = order.substr(3 * axis, 2);
  std::array<std::string, 3> sorted = order_;
  std::sort(sorted.begin(), sorted.end());
  PDL_CHECK((sorted == std::array<std::string, 3>{"dp", "pp", "tp"}),
            "the order of a grid is tp, dp and pp joined by dashes, not \"", order, "\"");
}

GridCoordinate ProcessGrid::coordinate(int rank) const {
  PDL_CHECK(rank >= 0 && rank < size_.ranks(), "rank ", rank, " of ", size_.ranks());
  GridCoordinate coordinate;
  for (const std::string& axis : order_) {
    along(coordinate, axis) = rank % along(size_, axis);
    rank /= along(size_, axis);
  }
  return coordinate;
}

int ProcessGrid::rank(const GridCoordinate& coordinate) const {
  int rank = 0;
  for (auto axis = order_.rbegin(); axis != order_.rend(); ++axis) {
    const int extent = along(size_, *axis), place = along(coordinate, *axis);
    PDL_CHECK(place >= 0 && place < extent, *axis, " ", place, " of ", extent);
    rank = rank * extent + place;
  }
  return rank;
}

std::vector<int> ProcessGrid::group(const std::string& axis, int rank) const {
  GridCoordinate coordinate = this->coordinate(rank);
  std::vector<int> members;
  for (int place = 0; place < along(size_, axis); ++place) {
    along(coordinate, axis) = place;
    members.push_back(this->rank(coordinate));
  }
  return members;
}

std::vector<std::vector<int>> ProcessGrid::groups(const std::string& axis) const {
  std::vector<std::vector<int>> groups;
  for (int rank = 0; rank < size_.ranks(); ++rank) {
    const GridCoordinate place = coordinate(rank);
    if (along(place, axis) == 0) groups.push_back(group(axis, rank));
  }
  return groups;
}

}  // namespace pdl
