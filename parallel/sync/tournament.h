#pragma once
// LTFB, "let a thousand flowers bloom": several models train side by side on samples of their own; now and then they
// meet in random pairs, and of each pair both go on with the better model.
//
//   trainers of P ranks each, K in all; after every `interval` updates:
//     pairs of trainers: a random permutation, the same on every rank; with an odd K one sits out
//     score my model on my trainer's tournament samples: mean loss, summed over its ranks
//     exchange weights with the rank of my number in the other trainer; score theirs on the same samples
//     keep the one with the lower loss        (who sits out scores its own model twice: all ranks read the same
//     samples)
//
// Not synchronous SGD: what comes out depends on the number of trainers. Partners judge by samples of their own, so
// they may decide differently, as upstream. The range of gradients, free between updates, keeps the own weights
// meanwhile.
//
// Paper: Jacobs, Dryden, Pearce and Van Essen, "Towards Scalable Parallel Training of Deep Neural Networks", MLHPC
// 2017. Upstream: LBANN's LTFB callback, communication_algorithm "sendrecv_weights", low_score_wins.

#include <cstdint>
#include <optional>

#include "engine/data/batch_plan.h"
#include "parallel/comm/communicator.h"
#include "parallel/sync/replica.h"

namespace pdl {

struct TournamentOptions {
  int procs_per_trainer = 0;    ///< ranks that train one model; 0: all
  std::int64_t interval = 100;  ///< updates between two meetings
  std::int64_t batches = 1;     ///< global batches of the validation split that models are scored on
  int ranks_of(int world_size) const { return procs_per_trainer == 0 ? world_size : procs_per_trainer; }
};

/// Reads the knobs from the engine's block.
TournamentOptions read_tournament_options(const ConfigReader& engine);
/// Notes in the engine's block why `options` are impossible; false when they are.
bool check_tournament_options(const ConfigReader& engine, const TournamentOptions& options,
                              const EngineContext& context);

/// Which trainer meets `trainer` in meeting `round`; itself when it sits out. Symmetric.
int tournament_partner(int trainer, int trainers, std::uint64_t seed, std::int64_t round);

class Tournament {
 public:
  /// The replica outlives it; its parameters are whole.
  Tournament(const EngineContext& context, Replica& replica, const TournamentOptions& options);

  /// `trainer` joins the ranks of this one.
  void prepare(Communicator& trainer) { trainer_ = &trainer; }
  /// Meets when update `update`, counted from 0, ends an interval. Collective over all ranks. Metrics stay as they are.
  void after_update(std::int64_t update);

  int trainers() const { return context_.world.size() / ranks(); }
  int trainer() const { return context_.world.rank() / ranks(); }
  /// Samples of one step that fall to this trainer.
  std::int64_t samples_of(std::int64_t step_samples) const;
  /// Bytes that a rank sends in a meeting.
  std::int64_t bytes_per_meeting() const;

 private:
  int ranks() const { return options_.ranks_of(context_.world.size()); }  ///< of one trainer
  double score();
  void exchange(int partner);

  const EngineContext& context_;
  Replica& replica_;
  TournamentOptions options_;
  Communicator* trainer_ = nullptr;
  std::optional<EpochPlan> plan_;  ///< whose samples models are scored on
};

}  // namespace pdl
