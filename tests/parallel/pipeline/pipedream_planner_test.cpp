// PipeDream's planner: upstream's own plans for its VGG-16 profile, small plans worked out by hand, and every possible
// plan of small models.

#include "parallel/pipeline/pipedream_planner.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

#include "parallel/pipeline/layer_profile.h"
#include "tests/parallel/pipeline/pipedream_vgg16_profile.h"
#include "tests/support/catch.h"
#include "workloads/models.h"

using namespace pdl;

namespace {

/// Parameters of one byte, so that weights are given in bytes.
PlannerOptions plain(int ranks, double bandwidth, PlanCost cost = PlanCost::sum) {
  return {.ranks = ranks,
          .node_bandwidth = bandwidth,
          .network_bandwidth = bandwidth,
          .cost = cost,
          .version_bytes = 1,
          .state_bytes = 2};
}

std::vector<LayerCost> chain(const std::vector<double>& seconds, const std::vector<std::int64_t>& weights,
                             const std::vector<std::int64_t>& outputs) {
  std::vector<LayerCost> costs;
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    costs.push_back({.name = "layer" + std::to_string(i),
                     .forward = seconds[i] / 3.0,
                     .backward = seconds[i] * 2.0 / 3.0,
                     .output_bytes = outputs[i],
                     .saved_bytes = outputs[i],
                     .parameters = weights[i]});
  }
  return costs;
}

std::vector<LayerCost> upstream_vgg16() {
  std::vector<LayerCost> costs;
  for (const ProfiledNode& node : kPipedreamVgg16) {
    costs.push_back({.name = std::to_string(node.node),
                     .forward = node.forward_ms * 1e-3,
                     .backward = node.backward_ms * 1e-3,
                     .output_bytes = static_cast<std::int64_t>(node.output_bytes),
                     .saved_bytes = static_cast<std::int64_t>(node.output_bytes),
                     .parameters = static_cast<std::int64_t>(node.parameter_bytes)});
  }
  return costs;
}

/// Upstream's formula for a whole plan on one node.
double upstream_seconds(const std::vector<LayerCost>& costs, double bandwidth, double compression,
                        const Balance& balance, const std::vector<int>& replicas) {
  double slowest = 0.0;
  std::size_t layer = 0;
  for (std::size_t stage = 0; stage < balance.size(); ++stage) {
    const double q = replicas[stage];
    const auto transfer = [&](std::size_t end) {
      const bool counts = compression > 0.0 && stage > 0 && end < costs.size();
      return counts ? 2.0 * static_cast<double>(costs[end - 1].output_bytes) / (bandwidth * q) / compression : 0.0;
    };
    slowest = std::max(slowest, transfer(layer));
    double seconds = 0.0;
    for (int i = 0; i < balance[stage]; ++i, ++layer) {
      const auto weights = static_cast<double>(costs[layer].parameters);
      seconds += (costs[layer].time() + 4.0 * (q - 1.0) / q * weights / bandwidth) / q;
    }
    slowest = std::max({slowest, transfer(layer), seconds});
  }
  return slowest;
}

/// Every balance and all replicas of exactly so many ranks.
void all_plans(int layers, int ranks, Balance& balance, std::vector<int>& replicas,
               const std::function<void()>& visit) {
  if (layers == 0 && ranks == 0) return visit();
  for (int count = 1; count <= layers; ++count) {
    for (int copies = 1; copies <= ranks; ++copies) {
      balance.push_back(count);
      replicas.push_back(copies);
      all_plans(layers - count, ranks - copies, balance, replicas, visit);
      balance.pop_back();
      replicas.pop_back();
    }
  }
}

/// The header's formulas, written down plainly for a whole plan; infinity when it does not fit.
double seconds_of(const std::vector<LayerCost>& costs, const PlannerOptions& options, const Balance& balance,
                  const std::vector<int>& replicas) {
  const bool is_max = options.cost == PlanCost::max;
  const int ranks = std::accumulate(replicas.begin(), replicas.end(), 0);
  double slowest = 0.0;
  int layer = 0, first_rank = 0;
  for (std::size_t stage = 0; stage < balance.size(); ++stage) {
    const int q = replicas[stage], last_rank = first_rank + q - 1;
    double compute = 0.0, weights = 0.0, saved = 0.0;
    const double in = layer == 0 ? 0.0 : static_cast<double>(costs[static_cast<std::size_t>(layer) - 1].output_bytes);
    for (const int end = layer + balance[stage]; layer < end; ++layer) {
      compute += costs[static_cast<std::size_t>(layer)].time();
      weights += static_cast<double>(costs[static_cast<std::size_t>(layer)].parameters);
      saved += static_cast<double>(costs[static_cast<std::size_t>(layer)].saved_bytes);
    }
    const bool is_last = stage + 1 == balance.size();
    const double out = is_last ? 0.0 : static_cast<double>(costs[static_cast<std::size_t>(layer) - 1].output_bytes);
    const auto link = [&](int from, int to) {
      const int nodes_apart =
          options.ranks_per_node == 0 ? 0 : to / options.ranks_per_node - from / options.ranks_per_node;
      return nodes_apart == 0 ? options.node_bandwidth : options.network_bandwidth;
    };
    const double in_seconds = in == 0.0 ? 0.0 : 2.0 * in / link(first_rank - 1, last_rank) / q;
    const double out_seconds = out == 0.0 ? 0.0 : 2.0 * out / link(first_rank, last_rank + 1) / q;
    const double reduce = 2.0 * (q - 1) / q * weights / link(first_rank, last_rank);
    const double busy = (is_max ? std::max(compute, reduce) : compute + reduce) / q;
    slowest = std::max({slowest, busy, in_seconds, out_seconds});
    const int depth = (ranks - 1 - first_rank) / q;
    const double memory = (depth + 1) * (weights + saved) + 2.0 * weights + 2.0 * (in + out);
    if (options.memory_limit > 0 && memory > static_cast<double>(options.memory_limit)) return 1e300;
    first_rank += q;
  }
  return slowest;
}

std::vector<LayerCost> random_chain(std::mt19937& random, int layers) {
  std::vector<double> seconds;
  std::vector<std::int64_t> weights, outputs;
  for (int i = 0; i < layers; ++i) {
    seconds.push_back(1.0 + static_cast<double>(random() % 1000) / 100.0);
    weights.push_back(static_cast<std::int64_t>(random() % 60));
    outputs.push_back(static_cast<std::int64_t>(1 + random() % 20));
  }
  return chain(seconds, weights, outputs);
}

}  // namespace

TEST_CASE("upstream's plans for its own VGG-16 profile", "[pipeline]") {
  struct Golden {
    int ranks;
    double bandwidth;
    bool straight;
    double compression;
    Balance balance;
    std::vector<int> replicas;
    double milliseconds;
    bool is_only = true;  ///< else other cuts are as fast: upstream takes the first in an order of its own
  };
  const Golden golden = GENERATE(values<Golden>({
      {2, 1e9, false, 0.0, {8, 32}, {1, 1}, 370.93},
      {4, 1e9, false, 0.0, {15, 25}, {3, 1}, 175.73},
      {8, 1e9, false, 0.0, {8, 6, 4, 4, 18}, {4, 1, 1, 1, 1}, 93.51, false},
      {4, 150e9, true, 0.0, {3, 8, 9, 20}, {1, 1, 1, 1}, 216.45, false},
      {8, 10e9, false, 1.0, {22, 18}, {7, 1}, 89.93},
      {4, 150e9, false, 0.0, {15, 25}, {3, 1}, 169.60},
  }));
  PlannerOptions options = plain(golden.ranks, golden.bandwidth, PlanCost::upstream);
  options.straight = golden.straight;
  options.compression_ratio = golden.compression;
  const std::vector<LayerCost> costs = upstream_vgg16();
  const std::optional<StagePlan> plan = plan_stages(costs, options);
  REQUIRE(plan);
  INFO(golden.ranks << " ranks, " << golden.bandwidth);
  if (golden.is_only) CHECK(plan->balance() == golden.balance);
  CHECK(plan->replicas() == golden.replicas);
  CHECK(std::abs(1e3 * plan->seconds - golden.milliseconds) <= 0.0051);
  CHECK(upstream_seconds(costs, golden.bandwidth, golden.compression, golden.balance, golden.replicas) ==
        Approx(plan->seconds));
}

TEST_CASE("fast links leave PipeDream's planner little to win on VGG-16", "[pipeline]") {
  const std::vector<LayerCost> costs = upstream_vgg16();
  const auto one_stage = [&](const PlannerOptions& options) {
    return evaluate_plan(costs, options, {40}, {options.ranks}).seconds;
  };
  const PlannerOptions slow = plain(4, 1e9), fast = plain(4, 150e9);
  CHECK(one_stage(slow) > 1.2 * plan_stages(costs, slow)->seconds);
  CHECK(one_stage(fast) < 1.01 * plan_stages(costs, fast)->seconds);
}

TEST_CASE("plans worked out by hand", "[pipeline]") {
  const std::vector<LayerCost> heavy_end = chain({9, 9, 9, 3}, {0, 0, 0, 60}, {8, 4, 2, 1});
  const std::optional<StagePlan> added = plan_stages(heavy_end, plain(4, 10.0));
  CHECK(added->balance() == Balance{3, 1});
  CHECK(added->replicas() == std::vector<int>{3, 1});
  CHECK(added->seconds == Approx(9.0));
  const std::optional<StagePlan> overlapped = plan_stages(heavy_end, plain(4, 10.0, PlanCost::max));
  CHECK(overlapped->replicas() == std::vector<int>{4});
  CHECK(overlapped->seconds == Approx(7.5));

  const std::vector<LayerCost> even = chain({4, 4, 4, 4}, {0, 0, 0, 0}, {1, 1, 1, 1});
  CHECK(plan_stages(even, plain(4, 10.0))->replicas() == std::vector<int>{4});
  CHECK(plan_stages(even, plain(4, 10.0))->seconds == Approx(4.0));
  PlannerOptions straight = plain(2, 10.0);
  straight.straight = true;
  CHECK(plan_stages(even, straight)->balance() == Balance{2, 2});
  CHECK(plan_stages(even, straight)->seconds == Approx(8.0));
  straight.ranks = 5;
  CHECK(!plan_stages(even, straight));  // more stages than layers
}

TEST_CASE("the plan and its runner-up are the best of all plans", "[pipeline]") {
  std::mt19937 random(11);
  for (int repeat = 0; repeat < 40; ++repeat) {
    const int layers = 1 + static_cast<int>(random() % 8);
    const std::vector<LayerCost> costs = random_chain(random, layers);
    for (int ranks = 1; ranks <= 4; ++ranks) {
      for (const PlanCost cost : {PlanCost::sum, PlanCost::max}) {
        PlannerOptions options = plain(ranks, 20.0, cost);
        if (repeat % 2 == 1) {
          options.ranks_per_node = 2;
          options.network_bandwidth = 4.0;
        }
        if (repeat % 3 == 2) options.memory_limit = 600;
        double best = 1e300, second = 1e300;
        Balance balance;
        std::vector<int> replicas;
        all_plans(layers, ranks, balance, replicas, [&] {
          const double seconds = seconds_of(costs, options, balance, replicas);
          if (seconds < 1e300) {  // memory apart, of any plan's
            CHECK(evaluate_plan(costs, options, balance, replicas).seconds == Approx(seconds));
          }
          second = std::min(second, std::max(best, seconds));
          best = std::min(best, seconds);
        });
        const std::optional<StagePlan> plan = plan_stages(costs, options);
        INFO("repeat " << repeat << ", " << ranks << " ranks");
        REQUIRE(plan.has_value() == (best < 1e300));
        if (!plan) continue;
        CHECK(plan->seconds == Approx(best));
        CHECK(seconds_of(costs, options, plan->balance(), plan->replicas()) == Approx(best));
        const std::optional<StagePlan> next = runner_up_plan(costs, options, *plan);
        REQUIRE(next.has_value() == (second < 1e300));
        if (next) CHECK(next->seconds == Approx(second));
        if (next) CHECK((next->balance() != plan->balance() || next->replicas() != plan->replicas()));
      }
    }
  }
}

TEST_CASE("upstream's cost finds the best of all plans by upstream's formula", "[pipeline]") {
  std::mt19937 random(12);
  for (int repeat = 0; repeat < 30; ++repeat) {
    const int layers = 1 + static_cast<int>(random() % 8), ranks = 1 + static_cast<int>(random() % 4);
    const std::vector<LayerCost> costs = random_chain(random, layers);
    for (const double compression : {0.0, 0.5}) {
      double best = 1e300;
      Balance balance;
      std::vector<int> replicas;
      all_plans(layers, ranks, balance, replicas,
                [&] { best = std::min(best, upstream_seconds(costs, 20.0, compression, balance, replicas)); });
      PlannerOptions options = plain(ranks, 20.0, PlanCost::upstream);
      options.compression_ratio = compression;
      CHECK(plan_stages(costs, options)->seconds == Approx(best));
    }
  }
}

TEST_CASE("a stage with large weights stays within a node", "[pipeline]") {
  // By upstream's two steps and by ours: inside a node replicas are cheap, between nodes they are not.
  const std::vector<LayerCost> costs = chain({7, 9}, {400, 400}, {1, 1});
  for (const PlanCost cost : {PlanCost::sum, PlanCost::upstream}) {
    PlannerOptions options = plain(4, 1e6, cost);
    CHECK(plan_stages(costs, options)->replicas() == std::vector<int>{4});
    options.ranks_per_node = 2;
    options.network_bandwidth = 10.0;
    const std::optional<StagePlan> plan = plan_stages(costs, options);
    CHECK(plan->replicas() == std::vector<int>{2, 2});
    CHECK(plan->balance() == Balance{1, 1});
    CHECK(plan->seconds == Approx(4.5).epsilon(1e-3));
  }
}

TEST_CASE("ranks are left out where fewer are faster", "[pipeline]") {
  const std::vector<LayerCost> costs = chain({5, 5}, {1000, 1000}, {1, 1});
  for (const PlanCost cost : {PlanCost::sum, PlanCost::upstream}) {
    PlannerOptions options = plain(4, 1.0, cost);
    CHECK(plan_stages(costs, options)->seconds > 10.0);
    options.fewer_ranks = true;
    const std::optional<StagePlan> plan = plan_stages(costs, options);
    CHECK(plan->replicas() == std::vector<int>{1, 1});
    CHECK(plan->seconds == Approx(5.0));
  }
}

TEST_CASE("memory decides where speed alone would not", "[pipeline]") {
  const std::vector<LayerCost> costs = chain({4, 5, 4, 4}, {100, 100, 100, 100}, {1, 1, 1, 1});
  PlannerOptions options = plain(2, 1e6);
  const std::optional<StagePlan> fastest = plan_stages(costs, options);
  CHECK(fastest->replicas() == std::vector<int>{2});
  CHECK(fastest->stages[0].memory == 404 + 2 * 400);  // one mini-batch in flight; gradient and momentum
  options.memory_limit = 1000;
  const std::optional<StagePlan> smaller = plan_stages(costs, options);
  CHECK(smaller->balance() == Balance{2, 2});
  CHECK(smaller->stages[0].memory == 2 * 202 + 2 * 200 + 2);
  CHECK(smaller->stages[1].memory == 202 + 2 * 200 + 2);
  options.memory_limit = 300;
  CHECK(!plan_stages(costs, options));
}

TEST_CASE("GPT2-xl on 64 ranks is planned within a second", "[pipeline]") {
  const ConfigDocument document = ConfigDocument::parse("{}", "test", {"model=gpt2-xl"});
  const ModelDescription model = make_model(read_model_options(document.root()), 50257);
  std::vector<LayerCost> costs = layer_costs(model.build(LayerFactory()), model.sample_input, DType::fp32, 8);
  CHECK(costs.size() >= 50);
  for (LayerCost& cost : costs) {
    cost.forward /= 1e14;
    cost.backward /= 1e14;
  }
  PlannerOptions options{.ranks = 64, .ranks_per_node = 8, .node_bandwidth = 150e9, .network_bandwidth = 12e9};
  options.memory_limit = std::int64_t{140} << 30;
  const auto start = std::chrono::steady_clock::now();
  CHECK(plan_stages(costs, options));
  options.cost = PlanCost::upstream;
  CHECK(plan_stages(costs, options));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(2));  // of both
}

TEST_CASE("a plan is explained beside its alternatives, each stage with what it is bound by", "[pipeline]") {
  const std::vector<LayerCost> costs = chain({9, 9, 9, 3}, {0, 0, 0, 60}, {8, 4, 200, 1});
  PlannerOptions options = plain(4, 10.0);
  options.memory_limit = 1 << 20;
  const StagePlan plan = evaluate_plan(costs, options, {3, 1}, {3, 1});
  CHECK(plan.seconds == Approx(2.0 * 200 / 10));
  const std::vector<PlanTable> tables = explain_plan(costs, options, plan);
  REQUIRE(tables.size() == 2);
  REQUIRE(tables[0].rows.size() == 4);
  CHECK(tables[0].rows[0][1] == "[3, 1]");
  CHECK(tables[0].rows[0][5] == "transfer of stage 1");
  CHECK(tables[0].rows[2][1] == "[4]");
  CHECK(tables[0].rows[3][2] == "[1 x 4]");
  REQUIRE(tables[1].rows.size() == 2);
  CHECK(tables[1].rows[0][8] == "1.333e+04 *");  // against 9000 of compute
  CHECK(tables[1].rows[1][7].find("*") == std::string::npos);
}

TEST_CASE("a file of pdlbench profile is a planner's input", "[pipeline]") {
  std::vector<LayerCost> costs = chain({1, 1}, {5, 6}, {7, 8});
  const std::string path = (std::filesystem::temp_directory_path() / "pdl_planner_profile.json").string();
  std::ofstream(path) << to_json({.model = "test", .samples = 2, .layers = {{"layer0", 0.5, 1.0}, {"layer1", 2, 4}}});
  costs = measured_costs(costs, path, 4);
  std::filesystem::remove(path);
  CHECK(costs[0].forward == Approx(1.0));
  CHECK(costs[1].backward == Approx(8.0));
  CHECK(costs[1].parameters == 6);
  CHECK(plan_stages(costs, plain(1, 1.0))->seconds == Approx(15.0));
}
