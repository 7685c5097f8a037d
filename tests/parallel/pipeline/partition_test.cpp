// Cuts of a model into stages: exact ones against all possibilities, upstream's heuristic against its own examples.

#include <functional>
#include <numeric>
#include <random>

#include "parallel/pipeline/partition.h"
#include "tests/support/catch.h"
#include "workloads/models.h"

using namespace pdl;

namespace {

double largest(const std::vector<double>& costs, const Balance& balance) {
  const std::vector<double> sums = stage_sums(costs, balance);
  return *std::max_element(sums.begin(), sums.end());
}

/// Calls `visit` with every way to cut.
void all_balances(int layers, int stages, Balance& begin, const std::function<void(const Balance&)>& visit) {
  if (stages == 1) {
    begin.push_back(layers);
    visit(begin);
    begin.pop_back();
    return;
  }
  for (int first = 1; first <= layers - stages + 1; ++first) {
    begin.push_back(first);
    all_balances(layers - first, stages - 1, begin, visit);
    begin.pop_back();
  }
}

ModelDescription gpt2_tiny(int layers) {
  const ConfigDocument document =
      ConfigDocument::parse("{}", "test", {"model=gpt2-tiny", "layers=" + std::to_string(layers)});
  return make_model(read_model_options(document.root()), 101);
}

}  // namespace

TEST_CASE("the minimax cut is the best of all cuts", "[pipeline]") {
  std::mt19937 random(7);
  for (int layers : {1, 2, 5, 9}) {
    for (int stages = 1; stages <= std::min(layers, 5); ++stages) {
      for (int repeat = 0; repeat < 10; ++repeat) {
        std::vector<double> costs;
        for (int i = 0; i < layers; ++i) costs.push_back(static_cast<double>(random() % 20));
        double best = 1e300;
        Balance begin;
        all_balances(layers, stages, begin,
                     [&](const Balance& balance) { best = std::min(best, largest(costs, balance)); });
        const Balance found = minimax_balance(costs, stages);
        CHECK(found.size() == static_cast<std::size_t>(stages));
        CHECK(largest(costs, found) == best);
        CHECK(largest(costs, block_partition(costs, stages)) >= best);
      }
    }
  }
}

TEST_CASE("a forbidden place gives the best cut without it", "[pipeline]") {
  CHECK(minimax_balance({4, 4, 4, 4}, 2) == Balance{2, 2});
  const Balance other = minimax_balance({4, 4, 4, 4}, 2, 2);
  CHECK((other == Balance{1, 3} || other == Balance{3, 1}));
  CHECK(minimax_balance({1, 1}, 2, 1).empty());
}

TEST_CASE("block partition", "[pipeline]") {
  CHECK(block_partition({1, 2, 3, 4, 5, 6}, 2) == Balance{4, 2});
  CHECK(minimax_balance({1, 2, 3, 4, 5, 6}, 2) == Balance{4, 2});
  CHECK(block_partition({0, 0}, 2) == Balance{1, 1});
  CHECK(block_partition({5, 5, 5, 5}, 4) == Balance{1, 1, 1, 1});
  CHECK_THROWS(block_partition({42}, 2));
  CHECK_THROWS(block_partition({42}, 0));
  CHECK_THROWS(minimax_balance({1, 2}, 3));
  // It stops within one largest layer of even, and so misses what the exact cut finds.
  const std::vector<double> costs = {10, 1, 1, 1, 9, 9, 1, 10};
  CHECK(largest(costs, block_partition(costs, 3)) >= largest(costs, minimax_balance(costs, 3)));
}

TEST_CASE("a balance that is not one is answered with the nearest that is", "[pipeline]") {
  CHECK(balance_fault({2, 3}, 2, 5).empty());
  CHECK(balance_fault({2, 2}, 2, 5) ==
        "[2, 2] adds up to 4, the model has 5 layers (the loss goes with the last one); nearest: [3, 2]");
  CHECK(balance_fault({5}, 2, 5) == "[5] has 1 entries for 2 stages; nearest: [4, 1]");
  CHECK(balance_fault({5, 0}, 2, 5) == "[5, 0] has a stage without layers; nearest: [4, 1]");
  CHECK_THAT(balance_fault({1, 1, 1}, 1, 3), ContainsSubstring("for 1 stage; nearest: [3]"));
  for (const Balance& wrong : std::vector<Balance>{{9, 9, 9}, {1, 1, 70}, {70, 1, 1}, {1, 2}, {1, 1, 1, 1}}) {
    const std::string text = balance_fault(wrong, 3, 7);
    INFO(text);
    CHECK_THAT(text, ContainsSubstring("nearest: ["));
  }
}

TEST_CASE("costs of a model: operations, bytes, and the loss with the head", "[pipeline]") {
  const ModelDescription model = gpt2_tiny(2);
  const LayerList layers = model.build(LayerFactory());
  const std::vector<LayerCost> costs = layer_costs(layers, model.sample_input, DType::fp32, 3);
  REQUIRE(costs.size() == 5);  // embedding, two blocks, ln_f, lm_head with the loss
  CHECK(costs.back().name == "lm_head");
  CHECK(costs[1].backward == 2.0 * costs[1].forward);
  CHECK(costs[0].backward == costs[0].forward);  // nobody wants the gradient of tokens
  CHECK(costs[1].output_bytes == 3 * 128 * 64 * 4);
  const std::vector<LayerCost> single = layer_costs(layers, model.sample_input, DType::fp32, 1);
  CHECK(costs[1].saved_bytes == 3 * single[1].saved_bytes);
  CHECK(costs[1].forward == 3.0 * single[1].forward);
  std::int64_t parameters = 0;
  for (const LayerCost& cost : costs) parameters += cost.parameters;
  CHECK(parameters == parameter_count(layers));
}

TEST_CASE("a cut explains itself", "[pipeline]") {
  const ModelDescription model = gpt2_tiny(4);
  const std::vector<LayerCost> costs = layer_costs(model.build(LayerFactory()), model.sample_input, DType::fp32, 2);
  std::vector<double> times;
  for (const LayerCost& cost : costs) times.push_back(cost.time());
  const Balance balance = minimax_balance(times, 2);
  const PlanTable table = explain_partition({balance, times, "operations", "minimax"}, costs, DType::fp32);
  CHECK_THAT(table.title, StartsWith("stages, minimax by operations: largest "));
  CHECK_THAT(table.title, ContainsSubstring("; next best ["));
  CHECK_THAT(table.title, ContainsSubstring("largest +"));  // the exact cut has no better one beside it
  REQUIRE(table.rows.size() == 2);
  for (const std::vector<std::string>& row : table.rows) CHECK(row.size() == table.columns.size());
  CHECK(table.rows[0][2] == "embedding");
  CHECK(table.rows[1][3] == "lm_head");
  // A bad cut is shown to be one: the next best cut is better.
  const PlanTable bad = explain_partition({{6, 1}, times, "operations", "explicit"}, costs, DType::fp32);
  CHECK_THAT(bad.title, ContainsSubstring("largest -"));
}
