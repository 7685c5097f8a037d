#pragma once
// Rank arithmetic of a tp x pp x dp grid: pure integers, no communication.
//
// The order string names the axes from the fastest-varying to the slowest. "tp-dp-pp" (Megatron-LM's default) means
// rank = tp + TP * (dp + DP * pp).

#include <array>
#include <string>
#include <vector>

namespace pdl {

struct GridSize {
  int tp = 1, dp = 1, pp = 1;
  int ranks() const { return tp * dp * pp; }
};

struct GridCoordinate {
  int tp = 0, dp = 0, pp = 0;
  bool operator==(const GridCoordinate&) const = default;
};

class ProcessGrid {
 public:
  /// Throws Error when the order is no permutation of tp, dp, pp joined by '-'.
  explicit ProcessGrid(GridSize size, const std::string& order = "tp-dp-pp");

  const GridSize& size() const { return size_; }
  GridCoordinate coordinate(int rank) const;
  int rank(const GridCoordinate& coordinate) const;
  /// Ranks that share all coordinates with `rank` except along `axis` ("tp", "dp", "pp"), in axis order.
  std::vector<int> group(const std::string& axis, int rank) const;
  /// All groups along an axis, each in axis order, ordered by first rank.
  std::vector<std::vector<int>> groups(const std::string& axis) const;

 private:
  GridSize size_;
  std::array<std::string, 3> order_;
};

}  // namespace pdl
