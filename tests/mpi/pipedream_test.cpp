// PipeDream against the recurrence that defines it, bit by bit: fp64, dropout, momentum and weight decay on, 40
// mini-batches. The recurrence runs on rank 0.

#include "cli/comparison.h"
#include "tests/support/catch.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

using Overrides = std::vector<std::string>;

/// 480 samples: 40 mini-batches of 12. Sums in rank order, as the recurrence adds.
Overrides pipedream(const Overrides& more) {
  Overrides overrides = {"engine.name=pipedream", "workload.train_samples=480", "training.deterministic=true"};
  overrides.insert(overrides.end(), more.begin(), more.end());
  return overrides;
}

struct Layout {
  int ranks;
  std::string replicas, gpt2_balance, vgg_balance;  ///< a tiny GPT-2 of 4 blocks has 7 places, a tiny VGG more
};

const std::vector<Layout> kLayouts = {
    {2, "[1,1]", "", ""},
    {4, "[1,1,1,1]", "", ""},
    {4, "[3,1]", "[5,2]", "[8,11]"},
    {4, "[2,2]", "[4,3]", "[8,11]"},
    {4, "[2,1,1]", "[3,2,2]", "[8,6,5]"},
    {3, "[1,2]", "[3,4]", "[5,14]"},
    {3, "[3]", "", ""},
};

std::vector<Overrides> layouts(const std::string& model) {
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

/// Parameters have the recurrence's bits. Losses of a step whose mini-batches lie on several ranks are added in another
/// order.
void check_against_recurrence(const std::string& model, const Overrides& overrides, int steps) {
  const std::unique_ptr<Experiment> experiment = make_experiment(test_world(), tiny_config(model), overrides);
  const Outcome outcome = train_for_comparison(*experiment, steps);
  if (test_world().info().rank == 0) {
    const std::unique_ptr<Experiment> reference = make_reference_experiment(*experiment);
    const Outcome expected = train_for_comparison(*reference, steps);
    REQUIRE(outcome.losses.size() == expected.losses.size());
    REQUIRE(!outcome.losses.empty());
    for (const Deviation& deviation : compare(outcome, expected)) {
      INFO(deviation.what);
      CHECK(deviation.error <= (deviation.is_loss ? 1e-14 : 0.0));
    }
  }
  test_world().barrier();
}

Overrides joined(Overrides first, const Overrides& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

}  // namespace

TEST_CASE("pipedream has the bits of the recurrence", "[pipedream]") {
  const std::string model = GENERATE("gpt2", "vgg");
  for (const Overrides& layout : layouts(model)) {
    INFO(model << " " << layout[0]);
    check_against_recurrence(model, pipedream(layout), 40);
  }
}

TEST_CASE("so it has with fewer mini-batches than stages, and with mini-batches left out", "[pipedream]") {
  for (const Overrides& layout : layouts("gpt2")) {
    for (const int steps : {3, 4}) {
      INFO(layout[0] << ", " << steps << " steps");
      check_against_recurrence("gpt2", pipedream(layout), steps);
    }
  }
}

TEST_CASE("so it has with every optimizer, with clipping and with each rule for batches and rates", "[pipedream]") {
  for (const Overrides& layout : layouts("gpt2")) {
    for (const Overrides& recipe :
         std::vector<Overrides>{{R"(training.optimizer={"name": "adamw", "lr": 0.003, "weight_decay": 0.1})"},
                                {R"(training.optimizer={"name": "lamb", "lr": 0.01, "weight_decay": 0.01})"},
                                {"training.optimizer.clip_grad_norm=0.05"},
                                {"engine.batch_rule=match_injection", "engine.lr_staleness=inverse",
                                 R"(training.lr_schedule={"name": "cosine", "warmup_steps": 4})"},
                                {"engine.batch_rule=match_injection", "workload.train_samples=43"},
                                {"engine.mode=none"}}) {
      INFO(layout[0] << ", " << recipe[0]);
      check_against_recurrence("gpt2", joined(pipedream(layout), recipe), 12);
    }
  }
}
