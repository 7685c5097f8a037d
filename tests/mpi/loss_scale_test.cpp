// Loss scaling in every engine of the registry, in fp64 on CPUs: a power of two changes no bit; a step that overflows
// leaves no trace on any rank, however few of them it overflowed on; a checkpoint carries the scale on.

#include <cmath>
#include <filesystem>
#include <optional>

#include "cli/checkpoint.h"
#include "cli/comparison.h"
#include "engine/record/json_lines.h"
#include "tests/support/catch.h"
#include "tests/support/engine_candidates.h"
#include "tests/support/mpi_world.h"
#include "tests/support/tiny_experiments.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

using Overrides = std::vector<std::string>;

const std::string kNone = R"(training.loss_scale={"name": "none"})";

/// A dynamic scale of which the first factor makes gradients overflow; one overflow brings it to `settled`.
std::string falls_once(double settled, int growth_interval, double growth_factor = 2.0) {
  constexpr double kTooLarge = 0x1p1021;
  return str(R"(training.loss_scale={"name": "dynamic", "init_scale": )", json_number(kTooLarge),
             R"(, "backoff_factor": )", json_number(settled / kTooLarge), R"(, "growth_factor": )",
             json_number(growth_factor), R"(, "growth_interval": )", growth_interval, "}");
}

std::unique_ptr<Experiment> make(const Candidate& engine, const std::string& model, Overrides overrides) {
  overrides.push_back("training.deterministic=true");
  overrides.insert(overrides.end(), engine.overrides.begin(), engine.overrides.end());
  return make_experiment(test_world(), tiny_config(model), overrides);
}

/// Calls test(candidate) with each engine and variant that this number of ranks can run the model with.
template <typename Test>
void for_each_engine(const std::string& model, Test test) {
  for (const Candidate& candidate : candidates(test_world().info().size, model)) {
    INFO(candidate.name << ", " << model << " on " << test_world().info().size << " ranks");
    if (candidate.synchronous) {
      test(candidate);
    } else {
      CHECK_THROWS_WITH(make(candidate, model, {R"(training.loss_scale={"name": "static", "scale": 2})"}),
                        ContainsSubstring("cannot skip a step together"));
    }
  }
}

/// The bytes of this rank's weights and moments.
std::vector<std::string> bits(Engine& engine) {
  std::vector<std::string> tensors;
  for (const StateTensor& state : engine.state()) {
    tensors.emplace_back(static_cast<const char*>(state.tensor.raw()), static_cast<std::size_t>(state.tensor.bytes()));
  }
  return tensors;
}

PassResult train(Engine& engine, const EpochPlan& plan) {
  Observer nobody;
  return engine.run_epoch(plan, nobody);
}

/// One step of one sample, which rank 0 has: the others' gradients are zero before they are summed.
EpochPlan one_sample() { return {1, 12, 1, 0, true, false, 0}; }
EpochPlan four_steps(std::int64_t epoch) { return {43, 12, 1, epoch, true, false, 0}; }

}  // namespace

TEST_CASE("a loss scale that is a power of two changes no bit of training", "[loss_scale]") {
  const std::string constant = R"(training.loss_scale={"name": "static", "scale": 1048576})",
                    growing = R"(training.loss_scale={"name": "dynamic", "growth_interval": 1})";
  const std::vector<Overrides> pieces = {{}, {"training.micro_batch_size=1", "workload.train_samples=43"}};
  std::vector<Overrides> pieces_and_optimizers = pieces;
  pieces_and_optimizers.push_back({R"(training.optimizer={"name": "adamw", "lr": 0.003, "clip_grad_norm": 0.05})"});
  pieces_and_optimizers.push_back({R"(training.optimizer={"name": "lamb", "lr": 0.01, "weight_decay": 0.01})"});
  // Optimizers see flat ranges, whatever the model.
  for (const auto& [model, recipes] : {std::pair("gpt2", pieces_and_optimizers), std::pair("vgg", pieces)}) {
    for_each_engine(model, [&](const Candidate& engine) {
      for (const Overrides& recipe : recipes) {
        INFO((recipe.empty() ? "plain" : recipe.front()));
        std::optional<Outcome> unscaled;
        const bool is_plain = recipe.empty();
        for (const std::string& scale :
             is_plain ? std::vector{kNone, constant, growing} : std::vector{kNone, growing}) {
          INFO(scale);
          Overrides overrides = recipe;
          overrides.push_back(scale);
          const std::unique_ptr<Experiment> experiment = make(engine, model, overrides);
          const Outcome outcome = train_for_comparison(*experiment, 4);
          CHECK(outcome.skipped_steps == 0);
          if (scale == kNone) unscaled = outcome;
          CHECK(outcome.losses == unscaled->losses);
          CHECK(outcome.values == unscaled->values);
          CHECK(outcome.validation.loss_sum == unscaled->validation.loss_sum);
        }
      }
    });
  }
}

TEST_CASE("the loss scale reaches the gradients and is taken out again", "[loss_scale]") {
  for_each_engine("gpt2", [](const Candidate& engine) {
    // A factor with digits of its own is in the last bits of everything.
    const std::unique_ptr<Experiment> plain = make(engine, "gpt2", {kNone});
    const std::unique_ptr<Experiment> scaled =
        make(engine, "gpt2", {R"(training.loss_scale={"name": "static", "scale": 1000.1})"});
    const Outcome expected = train_for_comparison(*plain, 3), outcome = train_for_comparison(*scaled, 3);
    CHECK(worst_of(compare(outcome, expected)).error <= 1e-11);
    CHECK(bits(*scaled->engine) != bits(*plain->engine));
  });
}

TEST_CASE("a step that overflows on one rank leaves no trace on any", "[loss_scale]") {
  const std::vector<Overrides> recipes = {{},
                                          {R"(training.optimizer={"name": "adamw", "lr": 0.003, "clip_grad_norm": 1})",
                                           R"(training.lr_schedule={"name": "cosine", "warmup_steps": 3})"}};
  for_each_engine("gpt2", [&](const Candidate& engine) {
    for (const Overrides& recipe : recipes) {
      INFO((recipe.empty() ? "plain" : recipe.front()));
      Overrides with_scale = recipe, without = recipe;
      with_scale.push_back(falls_once(1024.0, 2));
      without.push_back(kNone);
      const std::unique_ptr<Experiment> scaled = make(engine, "gpt2", with_scale);
      const std::unique_ptr<Experiment> plain = make(engine, "gpt2", without);
      scaled->engine->prepare();
      plain->engine->prepare();
      const std::vector<std::string> before = bits(*scaled->engine);
      REQUIRE(before == bits(*plain->engine));

      const PassResult skipped = train(*scaled->engine, one_sample());
      CHECK(skipped.steps == 1);
      CHECK(skipped.skipped_steps == 1);
      CHECK(std::isfinite(skipped.loss()));
      CHECK(bits(*scaled->engine) == before);
      CHECK(scaled->engine->position().updates == 0);
      CHECK(scaled->engine->position().loss_scale == LossScaleState{1024.0, 0, 1, 0});

      const PassResult trained = train(*scaled->engine, four_steps(1));
      const PassResult expected = train(*plain->engine, four_steps(1));
      CHECK(trained.skipped_steps == 0);
      CHECK(trained.loss_sum == expected.loss_sum);
      CHECK(bits(*scaled->engine) == bits(*plain->engine));
      CHECK(bits(*scaled->engine) != before);
      CHECK(scaled->engine->position().updates == 4);
      CHECK(scaled->engine->position().loss_scale == LossScaleState{4096.0, 0, 1, 0});
    }
  });
}

TEST_CASE("a step is skipped by an engine where its reference skips it", "[loss_scale]") {
  for_each_engine("vgg", [](const Candidate& engine) {
    const std::unique_ptr<Experiment> experiment = make(engine, "vgg", {falls_once(1000.0, 2, 3.0)});
    const Outcome outcome = train_for_comparison(*experiment, 5);
    CHECK(outcome.skipped_steps == 1);
    if (test_world().info().rank == 0) {
      const std::unique_ptr<Experiment> reference = make_reference_experiment(*experiment);
      const Outcome expected = train_for_comparison(*reference, 5);
      CHECK(expected.skipped_steps == 1);
      CHECK(worst_of(compare(outcome, expected)).error <= 1e-11);
    }
    test_world().barrier();
  });
}

TEST_CASE("a scale that cannot fall ends every rank alike after ten skips in a row", "[loss_scale]") {
  for_each_engine("gpt2", [](const Candidate& engine) {
    const std::unique_ptr<Experiment> experiment =
        make(engine, "gpt2", {R"(training.loss_scale={"name": "static", "scale": 1e307})"});
    experiment->engine->prepare();
    CHECK(train(*experiment->engine, four_steps(0)).skipped_steps == 4);
    CHECK(train(*experiment->engine, four_steps(1)).skipped_steps == 4);
    try {
      train(*experiment->engine, four_steps(2));
      FAIL("trained on though nothing is updated");
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::numeric);
      CHECK_THAT(error.what(), ContainsSubstring("not finite in 10 steps in a row, and the loss scale, 1e+307, cannot "
                                                 "fall: training is given up in epoch 2, step 1: rank 0, first in"));
    }
  });
}

TEST_CASE("a loss that is not finite ends the run, whatever the scale", "[loss_scale]") {
  for_each_engine("vgg", [](const Candidate& engine) {
    const std::unique_ptr<Experiment> experiment =
        make(engine, "vgg",
             {"training.optimizer.lr=1e6", "training.dtype=fp32", R"(training.loss_scale={"name": "dynamic"})"});
    experiment->engine->prepare();
    CHECK_THROWS_WITH(train(*experiment->engine, four_steps(0)), ContainsSubstring("the loss stopped being finite"));
  });
}

TEST_CASE("training from a checkpoint goes on bit for bit, the loss scale with it", "[loss_scale]") {
  World& world = test_world();
  const CheckpointIdentity identity = {"config", "data"};
  for_each_engine("gpt2", [&](const Candidate& engine) {
    const std::string directory =
        world.broadcast((std::filesystem::temp_directory_path() / str("pdl_loss_scale_", ::getpid())).string(), 0);
    // Growth by 3 puts the scale into the last bits of all that follows, from one step before the checkpoint on.
    const Overrides overrides = {falls_once(1000.0, 3, 3.0)};
    const std::unique_ptr<Experiment> whole = make(engine, "gpt2", overrides);
    whole->engine->prepare();
    train(*whole->engine, one_sample());
    train(*whole->engine, four_steps(1));
    const TrainingPosition saved = whole->engine->position();
    CHECK(saved.loss_scale == LossScaleState{3000.0, 1, 1, 0});
    save_checkpoint(world, *whole->device, *whole->engine, directory, 1, identity);
    const PassResult expected = train(*whole->engine, four_steps(2));

    const std::unique_ptr<Experiment> resumed = make(engine, "gpt2", overrides);
    resumed->engine->prepare();
    CHECK(load_checkpoint(world, *resumed->device, *resumed->engine, directory, identity) == 1);
    CHECK(resumed->engine->position().updates == saved.updates);
    CHECK(resumed->engine->position().loss_scale == saved.loss_scale);
    CHECK(train(*resumed->engine, four_steps(2)).loss_sum == expected.loss_sum);
    CHECK(bits(*resumed->engine) == bits(*whole->engine));
    CHECK(resumed->engine->position().loss_scale == LossScaleState{9000.0, 2, 1, 0});
    world.barrier();
    if (world.info().rank == 0) std::filesystem::remove_all(directory);
  });
}
