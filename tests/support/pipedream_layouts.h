#pragma once
// Layouts of stages and replicas on which pipedream is compared with its recurrence.

#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

namespace pdl::testing {

/// Replicas of each stage, and the cut where it cannot be found.
struct Layout {
  int ranks;
  std::string replicas, gpt2_balance, vgg_balance;  ///< a tiny GPT-2 of 4 blocks has 7 places, a tiny VGG more
};

inline const std::vector<Layout> kLayouts = {
    {2, "[1,1]", "", ""},
    {3, "[1,1,1]", "", ""},
    {4, "[1,1,1,1]", "", ""},
    {4, "[3,1]", "[5,2]", "[8,11]"},
    {4, "[2,2]", "[4,3]", "[8,11]"},
    {4, "[2,1,1]", "[3,2,2]", "[8,6,5]"},
    {3, "[1,2]", "[3,4]", "[5,14]"},
    {3, "[3]", "", ""},
};

/// Overrides for each layout of as many ranks as there are.
inline std::vector<Overrides> layouts(const std::string& model) {
  std::vector<Overrides> all;
  for (const Layout& layout : kLayouts) {
    if (layout.ranks != test_world().info().size) continue;
    Overrides overrides = {"engine.replicas=" + layout.replicas};
    if (model == "gpt2") overrides.push_back("workload.layers=4");
    const std::string& balance = model == "gpt2" ? layout.gpt2_balance : layout.vgg_balance;
    if (!balance.empty()) overrides.push_back("engine.balance=" + balance);
    all.push_back(overrides);
  }
  return all;
}

}  // namespace pdl::testing
