#include "parallel/sync/tournament.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "engine/base/random.h"

namespace pdl {

TournamentOptions read_tournament_options(const ConfigReader& engine) {
  TournamentOptions options;
  options.procs_per_trainer = engine.get(
      "procs_per_trainer", options.procs_per_trainer,
      "ranks that train one model; fewer than there are: several models meet in tournaments; 0: all", {0, 1 << 30});
  options.interval = engine.get<std::int64_t>("ltfb_batch_interval", options.interval,
                                              "updates between two tournaments of several trainers", {1, 1e12});
  options.batches =
      engine.get<std::int64_t>("ltfb_tournament_batches", options.batches,
                               "global batches of the validation split that a tournament scores models on", {1, 1e12});
  return options;
}

bool check_tournament_options(const ConfigReader& engine, const TournamentOptions& options,
                              const EngineContext& context) {
  const int ranks = context.world.size(), each = options.ranks_of(ranks);
  for (const char* key : {"ltfb_batch_interval", "ltfb_tournament_batches"}) {
    if (engine.has(key) && each >= ranks)
      engine.problem(key, str("acts between several trainers: set procs_per_trainer below ", ranks));
  }
  if (ranks % each != 0) {
    int nearest = std::min(each, ranks);
    while (ranks % nearest != 0) --nearest;
    engine.problem("procs_per_trainer", str(each, " does not divide ", ranks, " ranks; nearest: ", nearest));
    return false;
  }
  if (each < ranks && LossScaler(context.training.loss_scale, context.training.dtype).active()) {
    engine.problem("procs_per_trainer", "several trainers would overflow at different steps: not with loss scaling");
    return false;
  }
  return true;
}

int tournament_partner(int trainer, int trainers, std::uint64_t seed, std::int64_t round) {
  constexpr std::uint64_t kMeetings = 0x4c544642;  // apart from the orders of samples, which the same seed decides
  const std::vector<std::int64_t> order =
      random_permutation(trainers, seed ^ kMeetings, static_cast<std::uint64_t>(round));
  const auto place = static_cast<std::size_t>(std::find(order.begin(), order.end(), trainer) - order.begin());
  const std::size_t other = place ^ 1;
  return other < order.size() ? static_cast<int>(order[other]) : trainer;
}

Tournament::Tournament(const EngineContext& context, Replica& replica, const TournamentOptions& options)
    : context_(context), replica_(replica), options_(options) {
  PDL_CHECK(ranks() > 0 && context.world.size() % ranks() == 0, ranks(), " ranks per trainer, ", context.world.size(),
            " in all");
}

std::int64_t Tournament::samples_of(std::int64_t step_samples) const {
  std::int64_t samples = 0;
  for (int i = 0; i < ranks(); ++i) {
    samples += split_evenly(step_samples, context_.world.size(), trainer() * ranks() + i).count;
  }
  return samples;
}

std::int64_t Tournament::bytes_per_meeting() const {
  return replica_.store().elements() * size_of(wide_dtype(context_.training.dtype));
}

void Tournament::after_update(std::int64_t update) {
  if ((update + 1) % options_.interval != 0) return;
  const int partner =
      tournament_partner(trainer(), trainers(), context_.training.seed, (update + 1) / options_.interval);
  Device& device = context_.device;
  Stream& stream = device.compute_stream();
  std::array<double, 2> training_metrics{};
  device.copy(training_metrics.data(), replica_.metrics().raw(), sizeof training_metrics, stream);
  stream.synchronize();

  ParamStore& store = replica_.store();
  const double own = score();
  if (partner != trainer()) exchange(partner);
  const double theirs = score();
  if (partner != trainer() && (own <= theirs || std::isnan(theirs))) {
    context_.backend.copy(store.weights(), store.grads());
    store.round_master(context_.backend);
  }
  device.copy(replica_.metrics().raw(), training_metrics.data(), sizeof training_metrics, stream);
  stream.synchronize();
}

/// Mean loss of the weights at hand over the trainer's tournament samples.
double Tournament::score() {
  if (!plan_) {
    plan_.emplace(context_.validation_samples, context_.training.global_batch, context_.training.seed, 0, false, false,
                  options_.batches);
  }
  replica_.begin_evaluation(*plan_);
  replica_.clear_metrics();
  std::int64_t samples = 0;
  for (std::int64_t step = 0; step < plan_->steps(); ++step) {
    samples += samples_of(static_cast<std::int64_t>(plan_->step_ids(step).size()));
    replica_.evaluate_step();
  }
  Stream& stream = context_.device.compute_stream();
  const Tensor loss = replica_.metrics().range(0, 1);
  trainer_->all_reduce(loss, ReduceOp::sum, stream).wait(stream);
  double sum = 0.0;
  context_.device.copy(&sum, loss.raw(), sizeof sum, stream);
  stream.synchronize();
  return samples == 0 ? 0.0 : sum / static_cast<double>(samples * context_.model.predictions_per_sample);
}

/// Leaves their weights in place of the own ones, which lie in the gradients' range from now on.
void Tournament::exchange(int partner) {
  ParamStore& store = replica_.store();
  const int peer = partner * ranks() + context_.world.rank() % ranks();
  Stream& stream = context_.device.compute_stream();
  context_.backend.copy(store.grads(), store.weights());
  Work sent = context_.world.send(store.grads(), peer, 0, stream);
  Work received = context_.world.recv(store.weights(), peer, 0, stream);
  received.wait(stream);
  sent.wait(stream);
  store.round_master(context_.backend);
}

}  // namespace pdl
