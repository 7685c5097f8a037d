#pragma once
// The World on MPI, and the only place that starts, ends or aborts it.
//
// Setting up uses the few MPI calls that have no non-blocking form: MPI_Init_thread, MPI_Comm_split_type and
// MPI_Win_allocate_shared for the host's board, later MPI_Comm_split for axes; the end uses MPI_Win_free and
// MPI_Finalize, after a barrier with a deadline. Everything else goes through the wait loop.

#include <mpi.h>

#include <memory>
#include <string>
#include <vector>

#include "parallel/comm/mpi_communicator.h"
#include "parallel/comm/mpi_group.h"
#include "parallel/comm/world.h"

namespace pdl {

class MpiWorld final : public World {
 public:
  enum class Mpi { ours, theirs };  ///< who started MPI, and so who ends it

  /// MPI is running. Collective over all ranks.
  MpiWorld(Mpi owner, const std::string& launcher);
  /// Ends MPI if it is ours, after all ranks have come here. While an exception is in flight, or once a failure was
  /// claimed, it leaves MPI alone if there are peers, which may be anywhere: `abort` or the end of the process then
  /// ends the job.
  ~MpiWorld() override;
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  const RankInfo& info() const override { return info_; }
  std::unique_ptr<Communicator> make_communicator(Device& device, const CommOptions& options) override;
  /// `make_communicator` for kind "mpi", with what only tests set.
  std::unique_ptr<MpiCommunicator> make_mpi_communicator(Device& device, const MpiCommunicatorOptions& options,
                                                         double timeout_s);

  /// A group of all ranks, which communicators stand on, with an MPI communicator of its own. Collective.
  std::unique_ptr<MpiGroup> make_group(double timeout_s);

  void barrier() override;
  void reduce(std::vector<double>& values, ReduceOp op) override;
  std::string broadcast(const std::string& text, int root) override;
  std::vector<std::string> gather(const std::string& text) override;

  bool stop_requested() const override;
  void announce(const std::string& phase) override;
  bool claim_first_failure(ExitCode code, const std::string& message) override;
  FirstFailure first_failure() const override;
  [[noreturn]] void abort(ExitCode code) override;

 private:
  /// Collective. Whether every rank has a GPU of its own; throws ConfigError when `kind` insists on NCCL and it is not
  /// so.
  bool can_use_nccl(Device& device, const std::string& kind);
  HostBoard open_board();
  void close_board();

  Mpi owner_;
  RankInfo info_;
  MPI_Comm host_comm_ = MPI_COMM_NULL;
  MPI_Win window_ = MPI_WIN_NULL;  ///< the memory of the boards of all ranks of this host
  std::shared_ptr<MpiContext> context_;
  std::unique_ptr<MpiGroup> group_;  ///< of the exchanges; communicators have duplicates of their own
};

}  // namespace pdl
