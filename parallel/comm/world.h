#pragma once
// The processes of this run: who we are, small exchanges between hosts, and how the job ends together.
//
// A World is created once in `main` before anything else and passed on. Its exchanges are for set-up, records and
// agreement on small values; the training data goes through Communicators. Every wait has a deadline and backs off; a
// wait ends early, with an Error, when another rank of this host has claimed the first failure. The stop flag ends no
// wait: the harness reads it between steps, where all ranks can agree on it.
//
// How a failure ends the job. The rank that catches an Error calls `claim_first_failure`, prints only if that says
// true, and calls `abort(first_failure().code)`. So the root cause stands there once, and mpirun gets one code. A wait
// for a GPU (gpu_wait.h) claims its own failure already before it throws, as what it does next may trouble its peers.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/base/error.h"
#include "parallel/comm/communicator.h"

namespace pdl {

/// Where this process stands among the others, as the launcher and MPI see it.
struct RankInfo {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  ///< among the ranks of this host
  std::string host;
  std::string launcher;     ///< "hydra", "slurm", "openmpi", "flux", "pals", "jsrun" or "none"
  std::string mpi_library;  ///< version line, empty without MPI
};

/// How much of a GPU NCCL may take. Each thread block (CTA) of an operation occupies a multiprocessor while it runs.
struct NcclOptions {
  int min_ctas = 0;  ///< fewest blocks of an operation; 0: NCCL's choice
  int max_ctas = 0;  ///< most blocks; 0: NCCL's choice
};

struct CommOptions {
  std::string kind = "auto";   ///< auto, self, mpi, nccl; see World::make_communicator
  bool deterministic = false;  ///< reductions in rank order with mpi; nccl has an order of its own, see its header
  double timeout_s = 60.0;     ///< deadline of every wait of the host; 0: none
  NcclOptions nccl = {};
};

/// Bytes of MemoryKind::communication, host memory, that a deterministic MPI communicator of `size` ranks takes when it
/// is made, whatever it is used for: 1 MiB up to 17 ranks, then 64 KiB for each peer; 0 for one rank. For plans.
std::int64_t deterministic_scratch_bytes(int size);

/// The failure that came first among the ranks of this host; rank -1: none.
struct FirstFailure {
  int rank = -1;
  ExitCode code = ExitCode::ok;
  std::string message;  ///< cut at 192 bytes
};

class World {
 public:
  virtual ~World() = default;
  virtual const RankInfo& info() const = 0;

  /// The communicator over all ranks that `options` ask for. Collective. "auto" is `self` on one rank, MPI on CPUs,
  /// NCCL when the build has it and every rank has a GPU of its own, else MPI by way of host memory. Throws
  /// ConfigError(unsupported) for a kind that cannot be had.
  virtual std::unique_ptr<Communicator> make_communicator(Device& device, const CommOptions& options) = 0;

  virtual void barrier() = 0;
  /// Element-wise over all ranks, in place.
  virtual void reduce(std::vector<double>& values, ReduceOp op) = 0;
  /// Rank `root`'s text on every rank.
  virtual std::string broadcast(const std::string& text, int root) = 0;
  /// Every rank's text, in rank order, on every rank.
  virtual std::vector<std::string> gather(const std::string& text) = 0;

  /// Asks every rank to stop (from a signal handler: async-signal-safe through request_stop()).
  virtual bool stop_requested() const = 0;
  void set_timeout(double seconds) { timeout_s_ = seconds; }
  double timeout_s() const { return timeout_s_; }

  /// What this rank is doing, for the report when a peer waits in vain: shown by the peers of a rank that is late.
  virtual void announce(const std::string& phase) = 0;

  /// True for the one rank of this host that fails first, however often it asks. Its peers' waits then end with
  /// Error("stopped by rank r: message") and the same code.
  virtual bool claim_first_failure(ExitCode code, const std::string& message) = 0;
  virtual FirstFailure first_failure() const = 0;

  /// Ends all ranks with this code. `main` calls it after printing the one message. The first to fail leaves its peers
  /// a moment to close their records; the others leave it two seconds to get its message out.
  [[noreturn]] virtual void abort(ExitCode code) = 0;

 protected:
  double timeout_s_ = 120.0;
};

/// Starts MPI. Refuses (ConfigError, unsupported) a lone rank under a launcher that says there are more, naming both
/// numbers and the cure. Also installs the handlers of SIGTERM, SIGINT and SIGUSR1 that set the stop flag.
std::unique_ptr<World> make_world(int* argc, char*** argv);

/// A World on an MPI that somebody else started and will end: for test programs. Leaves signals alone.
std::unique_ptr<World> attach_world();

/// Sets the flag that `stop_requested` reads. Async-signal-safe.
void request_stop();

}  // namespace pdl
