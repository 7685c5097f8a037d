// pdlbench verify: the engine and its reference from the same initial weights over the same samples, compared tensor by
// tensor.

#include <algorithm>
#include <cstdio>

#include "cli/commands/commands.h"
#include "cli/comparison.h"
#include "cli/table.h"
#include "engine/record/json_lines.h"

namespace pdl {
namespace {

std::string scientific(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2e", value);
  return text;
}

/// Rounding of the type, added up over a few steps.
double usual_tolerance(const TrainingOptions& training) {
  if (training.dtype == DType::fp64) return 1e-11;
  if (is_half(training.dtype)) return 2e-2;
  return training.tf32 ? 2e-3 : 1e-5;
}

/// Products with rounded inputs leave some parameters, such as biases after a few steps, few right digits.
bool judges_only_losses(const TrainingOptions& training) { return is_half(training.dtype) || training.tf32; }

bool chooses_kernels_by_timing(const Experiment& experiment) {
  return !experiment.config.training.deterministic && experiment.device->info().kind == "cuda";
}

/// Prints the table; returns whether everything is within the tolerance.
bool report(std::vector<Deviation> rows, double tolerance, const Experiment& experiment, int ranks, int steps) {
  std::vector<std::vector<std::string>> cells;
  const bool only_losses = judges_only_losses(experiment.config.training);
  for (const Deviation& row : rows) {
    const bool judged = !only_losses || row.is_loss;
    cells.push_back({row.what, scientific(row.error),
                     !judged                  ? "not judged"
                     : row.error <= tolerance ? ""
                                              : "DIFFERS"});
  }
  std::fprintf(stderr, "%s", format_table({"after " + str(steps) + " steps", "relative error", ""}, cells).c_str());
  if (only_losses) std::erase_if(rows, [](const Deviation& row) { return !row.is_loss; });
  const Deviation worst = worst_of(rows);
  const auto first =
      std::find_if(rows.begin(), rows.end(), [&](const Deviation& row) { return !(row.error <= tolerance); });
  const bool same = first == rows.end();
  std::fprintf(stderr, "worst: %s, %s (tolerance %s)\n", worst.what.c_str(), scientific(worst.error).c_str(),
               scientific(tolerance).c_str());
  if (!same) std::fprintf(stderr, "first to differ: %s\n", first->what.c_str());
  if (!same && chooses_kernels_by_timing(experiment)) {
    std::fprintf(
        stderr,
        "hint: kernels chosen by timing round differently, which in a model with ReLU or max pooling now and then "
        "decides a branch: try training.deterministic=true\n");
  }
  std::printf("VERIFY %s engine=%s reference=%s ranks=%d steps=%d worst=%s tolerance=%s%s\n",
              same ? "PASSED" : "FAILED", experiment.config.engine->name.c_str(),
              experiment.config.engine->reference.c_str(), ranks, steps, scientific(worst.error).c_str(),
              scientific(tolerance).c_str(), same ? "" : (" first=\"" + first->what + "\"").c_str());
  return same;
}

/// An override for a factor at which fewer steps overflow: the one that a dynamic scale came down to, half of a static
/// one.
std::string smaller_loss_scale(const Experiment& experiment) {
  const double scale = experiment.engine->position().loss_scale.scale;
  const bool dynamic = experiment.config.training.loss_scale.name == "dynamic";
  return str(R"(training.loss_scale={"name": "static", "scale": )", json_number(dynamic ? scale : scale / 2.0), "}");
}

/// Trains the engine under test. The reference of a GPU run computes in fp64, where nothing overflows: it would make
/// the updates that the engine skips. So the engine starts again at a factor that skips none.
Outcome train_engine(World& world, const Args& args, std::unique_ptr<Experiment>& experiment) {
  std::vector<std::string> overrides = args.overrides;
  for (;;) {
    experiment.reset();  // its memory, before the next one takes as much
    experiment = make_experiment(world, args.config, overrides);
    world.announce("verify: engine");
    Outcome outcome = train_for_comparison(*experiment, args.steps);
    const bool same_arithmetic = experiment->config.device == "cpu";
    const bool scale_is_to_blame = experiment->engine->position().loss_scale.scale >= 1.0;
    if (outcome.skipped_steps == 0 || same_arithmetic || !scale_is_to_blame) return outcome;
    overrides.push_back(smaller_loss_scale(*experiment));
    if (world.info().rank == 0) {
      std::fprintf(stderr, "%lld of %zu steps overflowed; again with %s\n",
                   static_cast<long long>(outcome.skipped_steps), outcome.losses.size(), overrides.back().c_str());
    }
  }
}

}  // namespace

int verify_command(World& world, const Args& args) {
  std::unique_ptr<Experiment> experiment;
  const Outcome outcome = train_engine(world, args, experiment);
  const double tolerance = args.tolerance > 0.0 ? args.tolerance : usual_tolerance(experiment->config.training);
  // The reference runs on rank 0 alone, which may take longer than any exchange should: the others wait without a
  // deadline.
  bool same = true;
  if (world.info().rank == 0) {
    world.announce("verify: reference");
    std::unique_ptr<Experiment> reference = make_reference_experiment(*experiment);
    const int steps = static_cast<int>(outcome.losses.size());
    same = report(compare(outcome, train_for_comparison(*reference, steps)), tolerance, *experiment, world.info().size,
                  steps);
  }
  const double timeout_s = world.timeout_s();
  world.set_timeout(0.0);
  std::vector<double> failed = {same ? 0.0 : 1.0};
  world.reduce(failed, ReduceOp::max);
  world.set_timeout(timeout_s);
  return failed[0] > 0.0 ? static_cast<int>(ExitCode::check_failed) : 0;
}

}  // namespace pdl
