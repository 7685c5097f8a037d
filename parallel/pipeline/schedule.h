#pragma once
// Pipeline schedules as data: for each rank the list of what it does, in order. Generators are pure functions; a
// checker (schedule_check.h) proves that a schedule can be run, a simulator (schedule_timeline.h) says how long it
// takes, one executor runs them all.
//
// The model is cut into `stages * chunks` virtual stages. Chunk c on a rank of stage s is virtual stage
// c * stages + s, so with one chunk a virtual stage is a stage. A stage may have several ranks, its replicas, which
// take turns: micro-batch t is replica t mod r's.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pdl {

/// What a rank does. Messages go to the rank that holds the next virtual stage (activations) or the previous one
/// (gradients).
enum class Act {
  receive_activation,
  forward,
  send_activation,
  recompute,
  loss,
  receive_gradient,
  backward,
  send_gradient,
  reduce,
  update
};

/// "forward of micro-batch 3", "send of the gradient of micro-batch 2": for messages.
std::string_view name_of(Act act);

struct Action {
  Act act = Act::forward;
  int micro_batch = 0;
  int chunk = 0;
  /// forward, recompute, backward: the weights it uses, as the number of updates that made them; reduce, update: the
  /// weights that are updated, of which `micro_batch` is the last one to have gradients.
  int version = 0;
  int peer = -1;     ///< the other rank of a message
  bool keep = true;  ///< forward: what backward needs stays; else it is computed again by `recompute`
};

/// What one rank does.
struct RankSchedule {
  int stage = 0, replica = 0;
  int in_flight = 0;  ///< bound: (micro-batch, chunk) pairs between forward and backward
  int versions = 1;   ///< bound: weight versions held at a time
  std::vector<Action> actions;
};

struct Schedule {
  std::string name;
  int stages = 1, chunks = 1;
  int micro_batches = 1;
  std::vector<int> replicas;  ///< ranks of each stage
  /// Messages of one kind (activations, gradients) that a rank may have sent without the other side having received
  /// them: one on its way, one that is being written. A further one waits for the oldest.
  int send_buffers = 2;
  bool same_weights = true;  ///< a micro-batch uses the same weights forward and backward
  std::vector<RankSchedule> ranks;

  int virtual_stages() const { return stages * chunks; }
  int virtual_stage(int rank, int chunk) const { return chunk * stages + ranks[static_cast<std::size_t>(rank)].stage; }
  /// The rank that runs a micro-batch at a virtual stage.
  int rank_of(int virtual_stage, int micro_batch) const;
};

/// Which forward passes are computed again in the backward pass, so that only their inputs are kept.
enum class Checkpoint { always, except_last, never };

/// GPipe (Huang et al. 2019; Kim et al. 2020): all forwards, then all backwards in reverse order, one update. With
/// `gathered_loss` the last stage leaves the loss out: it is computed for all micro-batches once all outputs are there.
Schedule fill_drain(int stages, int micro_batches, Checkpoint checkpoint, bool gathered_loss = false);

/// 1F1B with flush (Narayanan et al. 2021): backwards as early as possible, one update.
Schedule one_forward_one_backward(int stages, int micro_batches);

/// Interleaved 1F1B (Narayanan et al. 2021, section 2.2): each rank has `chunks` virtual stages. Micro-batches advance
/// in groups of `group` (0: as many as stages). Needs two stages, stages <= group <= micro_batches, and a last group of
/// at least as many micro-batches as stages. Fewer micro-batches than stages go as one group, all forward before any
/// goes backward.
Schedule interleaved(int stages, int micro_batches, int chunks, int group = 0);

/// Which weights a mini-batch uses where updates go on between its forward and its backward pass.
enum class Stashing {
  stash,         ///< in both those that are the newest when it first comes to the stage
  none,          ///< the newest each time: two different ones, so what backward computes is no gradient
  vertical_sync  ///< in both, and on every stage, those that were the newest on the first stage
};

/// 1F1B without flush (Narayanan et al. 2019, PipeDream's 1F1B-RR): a stage updates after each round of its replicas'
/// mini-batches, `replicas[s]` for stage s. Every replica count divides the number of mini-batches; with vertical_sync
/// there are no replicas.
///
/// `before`: the schedule goes on after so many mini-batches, as one over all of them would. Versions still count from
/// the newest at its beginning, 0, so that the first mini-batches use negative ones. Without it all weights begin anew.
Schedule continuous(const std::vector<int>& replicas, int mini_batches, Stashing stashing = Stashing::stash,
                    std::optional<std::int64_t> before = std::nullopt);
/// Mini-batches that a replica of the stage starts before its first backward, when there are enough.
int warm_up_depth(const std::vector<int>& replicas, int stage);

/// PipeDream-2BW (Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training"): 1F1B over `batches`
/// batches of `micro_batches` without a flush in between; batch k uses the weights before batch k - 1's update. Two
/// versions suffice when micro_batches >= stages - 1; with fewer the schedule cannot be run, as its check says.
/// `before`: micro-batches, as above.
Schedule double_buffered(int stages, int micro_batches, int batches, std::optional<std::int64_t> before = std::nullopt);

/// 1F1B with a flush and an update after every `micro_batches`, `batches` times.
Schedule flushed(int stages, int micro_batches, int batches);

/// Evaluation: forwards only. Replicas take turns; with `chunks` above 1 there are none.
Schedule forward_only(const std::vector<int>& replicas, int micro_batches, int chunks, bool gathered_loss = false);

/// What a rank computes, messages left out: "F0 F1 B0 U0". Chunks show as "F0.1" where there are several, versions as
/// "F0@1" where there are several. R: recompute, L: gathered loss, U: update.
std::string compute_order(const Schedule& schedule, int rank);

}  // namespace pdl
