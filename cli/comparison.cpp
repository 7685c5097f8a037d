#include "cli/comparison.h"

#include <algorithm>
#include <cmath>

namespace pdl {
namespace {

class LossList final : public Observer {
 public:
  explicit LossList(std::vector<double>& losses) : losses_(losses) {}
  void step_end(const StepReport& report) override { losses_.push_back(report.loss); }

 private:
  std::vector<double>& losses_;
};

std::vector<double> as_doubles(const Tensor& values) {
  const auto count = static_cast<std::size_t>(values.elements());
  if (values.dtype() == DType::fp64) return {values.data<double>(), values.data<double>() + count};
  return {values.data<float>(), values.data<float>() + count};
}

double relative(double value, double reference) {
  const double error = std::abs(value - reference) / std::max(std::abs(reference), 1e-300);
  return std::isfinite(error) ? error : INFINITY;
}

/// |a - b| / |b| in the Euclidean norm; infinite when a number is not finite.
double relative(const std::vector<double>& values, const std::vector<double>& reference) {
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    difference += (values[i] - reference[i]) * (values[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  const double error = std::sqrt(difference) / std::max(std::sqrt(norm), 1e-300);
  return difference == 0.0 ? 0.0 : (std::isfinite(error) ? error : INFINITY);
}

}  // namespace

Outcome train_for_comparison(Experiment& experiment, int steps) {
  const TrainingOptions& training = experiment.config.training;
  Outcome outcome;
  experiment.device->reserve(experiment.engine->predict().memory.total());
  experiment.engine->prepare();
  experiment.silent = experiment.config.measure.without_communication;
  LossList losses(outcome.losses);
  const EpochPlan plan(experiment.data.train->size(), training.global_batch, training.seed, 0, true, training.drop_last,
                       steps);
  outcome.skipped_steps = experiment.engine->run_epoch(plan, losses).skipped_steps;
  const std::int64_t eval_steps = std::max<std::int64_t>(1, experiment.config.measure.max_eval_steps);
  const EpochPlan validation(experiment.data.validation->size(), training.global_batch, training.seed, 0, false, false,
                             eval_steps);
  outcome.validation = experiment.engine->evaluate(validation);
  experiment.engine->visit_parameters([&](const ParamSpec& spec, int, const Tensor& values) {
    outcome.names.push_back(spec.name);
    outcome.values[spec.name] = as_doubles(values);
  });
  return outcome;
}

std::vector<Deviation> compare(const Outcome& engine, const Outcome& reference) {
  std::vector<Deviation> rows;
  for (std::size_t step = 0; step < reference.losses.size(); ++step) {
    rows.push_back({str("loss of step ", step + 1), true, relative(engine.losses[step], reference.losses[step])});
  }
  for (const std::string& name : reference.names) {
    const auto found = engine.values.find(name);
    const bool comparable = found != engine.values.end() && found->second.size() == reference.values.at(name).size();
    rows.push_back({name, false, comparable ? relative(found->second, reference.values.at(name)) : INFINITY});
  }
  rows.push_back({"validation loss", true, relative(engine.validation.loss(), reference.validation.loss())});
  return rows;
}

Deviation worst_of(const std::vector<Deviation>& deviations) {
  return *std::max_element(deviations.begin(), deviations.end(),
                           [](const Deviation& a, const Deviation& b) { return a.error < b.error; });
}

}  // namespace pdl
