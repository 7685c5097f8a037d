#pragma once
// Two engines side by side: what each leaves after the same steps, and how far apart that is.

#include <map>
#include <string>
#include <vector>

#include "cli/experiment.h"

namespace pdl {

/// What an engine left after some steps. Parameters are there on world rank 0 only.
struct Outcome {
  std::vector<double> losses;      ///< of each step
  std::int64_t skipped_steps = 0;  ///< for overflow of scaled gradients
  PassResult validation;           ///< over the first validation batches
  std::vector<std::string> names;  ///< of the parameters, in registration order
  std::map<std::string, std::vector<double>> values;
};

/// Prepares the experiment's engine, trains it for `steps` steps of epoch 0, evaluates. Collective over the engine's
/// ranks.
Outcome train_for_comparison(Experiment& experiment, int steps);

struct Deviation {
  std::string what;  ///< "loss of step 3", a parameter's name, "validation loss"
  bool is_loss = false;
  double error = 0.0;  ///< relative, in the Euclidean norm for tensors; infinite where a number is not finite
};

/// In the order in which things happen: step losses, parameters in registration order, validation loss.
std::vector<Deviation> compare(const Outcome& outcome, const Outcome& reference);

/// The largest error. NaN never occurs.
Deviation worst_of(const std::vector<Deviation>& deviations);

}  // namespace pdl
