// The megatron engine on every grid that the ranks can form: against serial training, in fp64, with dropout on.

#include <algorithm>
#include <bit>
#include <set>
#include <sstream>

#include "cli/comparison.h"
#include "parallel/engines/megatron.h"
#include "parallel/pipeline/staged_model.h"
#include "tests/support/catch.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

using Overrides = std::vector<std::string>;

struct Grid {
  int tp = 1, pp = 1, dp = 1;
};

/// All grids of so many ranks.
std::vector<Grid> grids(int ranks) {
  std::vector<Grid> all;
  for (int tp = 1; tp <= ranks; ++tp) {
    for (int pp = 1; tp * pp <= ranks; ++pp) {
      if (ranks % (tp * pp) == 0) all.push_back({tp, pp, ranks / (tp * pp)});
    }
  }
  return all;
}

/// GPT-2 of 4 heads (3 for 3 ranks), whose 3 blocks do not divide by stages, nor 29 classes by ranks.
Overrides model_of(const Grid& grid) {
  const int heads = grid.tp % 3 == 0 ? 3 : grid.tp > 4 ? 8 : 4;
  return {"workload.layers=3", str("workload.heads=", heads), "workload.sequence_length=24",
          "workload.train_samples=38"};
}

Overrides knobs_of(const Grid& grid) {
  return {"engine.name=megatron", str("engine.tensor_model_parallel_size=", grid.tp),
          str("engine.pipeline_model_parallel_size=", grid.pp)};
}

std::unique_ptr<Experiment> experiment_of(const Grid& grid, const Overrides& more, const std::string& model = "gpt2") {
  Overrides overrides = knobs_of(grid);
  if (model == "gpt2") {
    const Overrides shape = model_of(grid);
    overrides.insert(overrides.end(), shape.begin(), shape.end());
  }
  overrides.push_back(str("training.global_batch_size=", 12 % grid.dp == 0 ? 12 : 16));
  overrides.insert(overrides.end(), more.begin(), more.end());
  return make_experiment(test_world(), tiny_config(model), overrides);
}

/// Largest relative error against serial training; 0 away from rank 0.
double error_of(Experiment& experiment, int steps, std::string& what) {
  const Outcome outcome = train_for_comparison(experiment, steps);
  double error = 0.0;
  if (test_world().info().rank == 0) {
    const std::unique_ptr<Experiment> reference = make_reference_experiment(experiment);
    const Deviation worst = worst_of(compare(outcome, train_for_comparison(*reference, steps)));
    what = worst.what;
    error = worst.error;
  }
  test_world().barrier();
  return error;
}

std::string hash_of(const Tensor& tensor) {
  std::uint64_t hash = 1469598103934665603ull;
  const auto* bytes = static_cast<const unsigned char*>(tensor.raw());
  for (std::int64_t i = 0; i < tensor.bytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
  return str(hash);
}

const Overrides kRecipes = {
    "training.seed=12",                        // one micro-batch: fewer than stages
    "training.micro_batch_size=1",             // accumulation; the last step has 2 samples for all ranks
    "training.optimizer.clip_grad_norm=0.05",  // clipping in force
    R"(training.optimizer={"name": "adamw", "lr": 0.003, "clip_grad_norm": 0.05})",
    R"(training.optimizer={"name": "lamb", "lr": 0.01, "weight_decay": 0.01})",
    R"(training.loss_scale={"name": "dynamic", "init_scale": 1e300, "backoff_factor": 1e-296, "growth_interval": 2})",
};

}  // namespace

TEST_CASE("every grid trains what one rank trains", "[megatron]") {
  for (const Grid& grid : grids(test_world().info().size)) {
    for (const std::string& recipe : kRecipes) {
      for (const Overrides& way :
           {Overrides{}, Overrides{"engine.sequence_parallel=true", "engine.use_distributed_optimizer=true"},
            Overrides{"engine.sequence_parallel=true", "engine.use_tp_pp_dp_mapping=true",
                      "engine.overlap_grad_reduce=true", "engine.ddp_bucket_size=2000"}}) {
        INFO("tp " << grid.tp << ", pp " << grid.pp << ", dp " << grid.dp << ", " << recipe << ", "
                   << (way.empty() ? "plain" : way.back()));
        Overrides more = way;
        more.push_back(recipe);
        const std::unique_ptr<Experiment> experiment = experiment_of(grid, more);
        std::string what;
        const double error = error_of(*experiment, 4, what);
        INFO("worst: " << what);
        CHECK(error <= 1e-11);
      }
    }
  }
}

TEST_CASE("interleaved stages train what one rank trains", "[megatron]") {
  const int ranks = test_world().info().size;
  for (const Grid& grid : grids(ranks)) {
    if (grid.pp == 1) continue;
    for (const Overrides& way : {Overrides{}, Overrides{"engine.use_distributed_optimizer=true"},
                                 Overrides{str("engine.microbatch_group_size_per_vp_stage=", 2 * grid.pp)}}) {
      Overrides more = {"workload.layers=6",
                        "training.micro_batch_size=1",
                        str("training.global_batch_size=", 4 * ranks),
                        "engine.virtual_pipeline_model_parallel_size=2",
                        "engine.overlap_grad_reduce=true",
                        "training.optimizer.clip_grad_norm=0.05"};
      more.insert(more.end(), way.begin(), way.end());
      INFO("tp " << grid.tp << ", pp " << grid.pp << ", dp " << grid.dp << ", " << more.back());
      const std::unique_ptr<Experiment> experiment = experiment_of(grid, more);
      std::string what;
      const double error = error_of(*experiment, 4, what);
      INFO("worst: " << what);
      CHECK(error <= 1e-11);
    }
  }
}

TEST_CASE("images are trained on every grid that divides their channels", "[megatron]") {
  for (const Grid& grid : grids(test_world().info().size)) {
    if (grid.tp > 2) continue;  // the narrowest layers have two channels
    // The 13th convolution of VGG-16 makes a pair with the classifier, which sees some channels of each of 2 x 2
    // pixels.
    for (const Overrides& model : {Overrides{"workload.model=vgg11", "workload.image_size=32"},
                                   Overrides{"workload.model=vgg16", "workload.image_size=64"}}) {
      INFO("tp " << grid.tp << ", pp " << grid.pp << ", dp " << grid.dp << ", " << model.front());
      Overrides more = model;
      more.insert(more.end(), {"training.micro_batch_size=1", "engine.use_distributed_optimizer=true"});
      const std::unique_ptr<Experiment> experiment = experiment_of(grid, more, "vgg");
      std::string what;
      const double error = error_of(*experiment, 4, what);
      INFO("worst: " << what);
      CHECK(error <= (grid.tp == 1 && grid.dp == 1 ? 0.0 : 1e-11));  // stages alone are plain accumulation, bit by bit
    }
  }
}

TEST_CASE("memory and bytes are the predicted ones on every grid", "[megatron]") {
  for (const Grid& grid : grids(test_world().info().size)) {
    for (const Overrides& way : {Overrides{},
                                 Overrides{"engine.sequence_parallel=true", "engine.use_distributed_optimizer=true",
                                           R"(training.optimizer={"name": "lamb", "lr": 0.01, "clip_grad_norm": 1.0})"},
                                 Overrides{"engine.recompute_granularity=full"},
                                 Overrides{"engine.sequence_parallel=true", "engine.recompute_granularity=full",
                                           "engine.recompute_method=block", "workload.dropout=0.0"}}) {
      INFO("tp " << grid.tp << ", pp " << grid.pp << ", dp " << grid.dp << ", " << way.size() << " knobs");
      Overrides more = way;
      more.insert(more.end(),
                  {"training.deterministic=true", "training.micro_batch_size=1", "workload.train_samples=96"});
      const std::unique_ptr<Experiment> experiment = experiment_of(grid, more);
      const Prediction prediction = experiment->engine->predict();
      experiment->engine->prepare();
      Observer nobody;
      experiment->ledger.take();
      const std::int64_t batch = experiment->config.training.global_batch;
      experiment->engine->run_epoch(EpochPlan(96, batch, 1, 0, true, false, 2), nobody);
      const CommCounts counted = experiment->ledger.take();
      if (test_world().info().size > 1) CHECK(counted.size() == prediction.comm_per_step.size());
      for (const auto& [operation, count] : prediction.comm_per_step) {
        INFO(operation);
        REQUIRE(counted.count(operation) == 1);
        CHECK(counted.at(operation).calls == 2 * count.calls);
        CHECK(counted.at(operation).bytes == 2 * count.bytes);
      }
      for (int kind = 0; kind < kMemoryKinds; ++kind) {
        INFO(kMemoryKindNames[static_cast<std::size_t>(kind)]);
        const auto tag = static_cast<MemoryKind>(kind);
        CHECK(experiment->device->memory().peak()[tag] == prediction.memory[tag]);
      }
    }
  }
}

namespace {

struct Ranges final : RangeListener {
  explicit Ranges(int& count) : recomputed(count) {}
  void push(const std::string& name) override { recomputed += name.ends_with("forward again") ? 1 : 0; }
  void pop() override {}
  int& recomputed;
};

/// Bits of this rank's state and the losses after two steps; `recomputed` += passes that a block went through again.
std::string bits_after_two_steps(const Grid& grid, const Overrides& overrides, int& recomputed) {
  const std::unique_ptr<Experiment> experiment = experiment_of(grid, overrides);
  experiment->device->name_ranges_to(std::make_unique<Ranges>(recomputed));
  const Outcome outcome = train_for_comparison(*experiment, 2);
  std::string bits;
  for (const double loss : outcome.losses) bits += str(std::bit_cast<std::int64_t>(loss), " ");
  for (const StateTensor& state : experiment->engine->state()) bits += hash_of(state.tensor) + " ";
  return bits;
}

}  // namespace

TEST_CASE("recomputed blocks train the same bits", "[megatron]") {
  const int ranks = test_world().info().size;
  const Overrides recipe = {"workload.layers=6", "training.micro_batch_size=1", "workload.dropout=0.2",
                            "training.deterministic=true", str("training.global_batch_size=", 4 * ranks)};
  for (const Grid& grid : grids(ranks)) {
    for (const bool is_interleaved : {false, true}) {
      if (is_interleaved && grid.pp == 1) continue;
      for (const char* spread : {"engine.sequence_parallel=false", "engine.sequence_parallel=true"}) {
        Overrides plain = recipe;
        plain.emplace_back(spread);
        if (is_interleaved) plain.emplace_back("engine.virtual_pipeline_model_parallel_size=2");
        int recomputed = 0;
        const std::string expected = bits_after_two_steps(grid, plain, recomputed);
        REQUIRE(recomputed == 0);
        for (const auto& way : {std::pair{"uniform", 1}, std::pair{"uniform", 2}, std::pair{"block", 1}}) {
          INFO("tp " << grid.tp << ", pp " << grid.pp << ", dp " << grid.dp << ", " << spread << ", "
                     << (is_interleaved ? "interleaved, " : "") << way.first << " " << way.second);
          Overrides more = plain;
          more.insert(more.end(),
                      {"engine.recompute_granularity=full", str("engine.recompute_method=", way.first),
                       str("engine.recompute_num_layers=", is_interleaved && grid.pp > 2 ? 1 : way.second)});
          int again = 0;
          CHECK(bits_after_two_steps(grid, more, again) == expected);
          // Each of 6 blocks is on as many ranks as divide it, and sees the samples of its replica, one at a time.
          int everywhere = 0;
          for (const std::string& count : test_world().gather(str(again))) everywhere += std::stoi(count);
          const int passes = 2 * 4 * ranks * grid.tp;
          if (std::string(way.first) == "uniform") {
            CHECK(everywhere == 6 * passes);
          } else {
            CHECK(everywhere >= passes);
            CHECK(everywhere <= grid.pp * (is_interleaved ? 2 : 1) * passes);
          }
        }
      }
    }
  }
}

/// Ranks of equal stage and tensor-parallel place are replicas; their weights keep the same bits.
TEST_CASE("replicas of a stage hold the same bits after every step", "[megatron]") {
  World& world = test_world();
  for (const Grid& grid : grids(world.info().size)) {
    if (grid.dp == 1) continue;
    INFO("tp " << grid.tp << ", pp " << grid.pp << ", dp " << grid.dp);
    const std::unique_ptr<Experiment> experiment = experiment_of(grid, {"engine.overlap_grad_reduce=true"});
    experiment->engine->prepare();
    Observer nobody;
    const std::int64_t batch = experiment->config.training.global_batch;
    experiment->engine->run_epoch(EpochPlan(38, batch, 1, 0, true, false, 0), nobody);
    std::string bits;
    for (const StateTensor& state : experiment->engine->state()) bits += hash_of(state.tensor) + " ";
    const std::vector<std::string> all = world.gather(bits);
    const int here = world.info().rank, place = here % grid.tp + here / (grid.tp * grid.dp) * grid.tp * grid.dp;
    CHECK(all[static_cast<std::size_t>(place)] == bits);
    CHECK(static_cast<int>(std::set<std::string>(all.begin(), all.end()).size()) == grid.tp * grid.pp);
  }
}

namespace {

/// "name bits" of the gradient of every parameter that this rank has whole, after the sums of one step.
std::vector<std::string> whole_gradients(const Grid& grid, const MegatronKnobs& knobs, const Overrides& overrides) {
  const std::unique_ptr<Experiment> experiment = experiment_of(grid, overrides);
  std::unique_ptr<StepMethod> method = make_megatron_method(*experiment->context, knobs);
  const auto& model = dynamic_cast<const StagedModel&>(method->model());
  experiment->engine = make_synchronous_engine(*experiment->context, std::move(method));
  experiment->engine->prepare();
  Observer nobody;
  const std::int64_t batch = experiment->config.training.global_batch;
  experiment->engine->run_epoch(EpochPlan(batch, batch, 1, 0, true, false, 1), nobody);
  std::vector<std::string> gradients;
  for (int chunk = 0; chunk < knobs.chunks; ++chunk) {
    const ParamStore& store = model.update().shards(chunk).store();
    for (std::size_t i = 0; i < store.params().size(); ++i) {
      if (store.params()[i].spec.slice.axis >= 0) continue;
      const Tensor gradient = store.view(store.grads(), static_cast<int>(i));
      const auto* const values = gradient.data<double>();
      const bool is_zero = std::all_of(values, values + gradient.elements(), [](double value) { return value == 0.0; });
      gradients.push_back(store.params()[i].spec.name + " " + (is_zero ? "zero" : hash_of(gradient)));
    }
  }
  return gradients;
}

}  // namespace

/// Each rank of a tensor-parallel group finds, or with sequence parallelism sums up, the gradients of what all of them
/// hold. Were one left out, weights would drift apart without a word.
TEST_CASE("gradients of replicated parameters are equal on all tensor-parallel ranks, bit by bit", "[megatron]") {
  World& world = test_world();
  for (const Grid& grid : grids(world.info().size)) {
    if (grid.tp == 1) continue;
    for (const bool spreads : {false, true}) {
      for (const int chunks : {1, 2}) {
        if (chunks > 1 && grid.pp == 1) continue;
        INFO("tp " << grid.tp << ", pp " << grid.pp << ", dp " << grid.dp << ", sequence parallel " << spreads << ", "
                   << chunks << " chunks");
        MegatronKnobs knobs;
        knobs.tp = grid.tp;
        knobs.pp = grid.pp;
        knobs.chunks = chunks;
        knobs.sequence_parallel = spreads;
        const Overrides recipe = {"workload.layers=6", "training.micro_batch_size=2"};
        std::string mine;
        for (const std::string& gradient : whole_gradients(grid, knobs, recipe)) mine += gradient + "\n";
        const std::vector<std::string> all = world.gather(mine);
        int compared = 0;
        for (int rank = 0; rank < world.info().size; ++rank) {
          std::istringstream first(all[static_cast<std::size_t>(rank - rank % grid.tp)]);
          std::istringstream here(all[static_cast<std::size_t>(rank)]);
          for (std::string expected, gradient; std::getline(first, expected);) {
            std::getline(here, gradient);
            CHECK(gradient == expected);
            CHECK(!gradient.ends_with("zero"));
            ++compared;
          }
        }
        // Two norms and two biases of row layers in each of 6 blocks, the last norm, the positions.
        CHECK(compared == (6 * 6 + 3) * grid.tp * grid.dp);
      }
    }
  }
}
