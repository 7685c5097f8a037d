#pragma once
// One ncclComm_t: made, watched and ended without ever blocking the host inside NCCL.
//
// Communicators are made with blocking = 0. A call may then return while NCCL still connects ranks in a thread of its
// own, and what is to come after it must not be queued before NCCL is done with that: `settle` waits for it in the one
// wait loop (mpi_wait.h), with its deadline and its look at the peers' boards. What is queued is watched by the waits
// for the GPU (gpu_wait.h). ncclCommAbort, which may block all the same, runs in a thread of its own.

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "parallel/comm/mpi_group.h"

namespace pdl {

/// Waits in the one wait loop until `test` says true. `what` is the report's name for it; `late` says who keeps it
/// waiting, unless it is collective `sequence` (> 0) of the group, whose late members are known.
void wait_for_nccl(const MpiGroup& group, const std::function<bool()>& test, const std::string& what,
                   std::int64_t sequence, const std::string& late = "");

class NcclHandle final : public GpuQueue {
 public:
  /// Empty. `group` and `device` outlive the handle; `label` is whose communicator it is, for reports.
  NcclHandle(MpiGroup& group, Device& device, std::string label);
  /// While an exception is in flight, after an error or once a rank of this host has failed: gives up all communication
  /// on this GPU, so that kernels which wait for lost peers end. Else waits for the peers to come to their end too.
  ~NcclHandle() override;

  /// What one rank makes and all members of a new communicator need.
  ncclUniqueId make_id() const;
  /// Starts to connect; `idle` says when it is done.
  void connect(ncclUniqueId id, int rank, int size, const NcclOptions& options);
  /// The group is of no use any more: the destructor aborts.
  void give_up() { failed_ = true; }
  /// Starts to come to the end, which the destructor waits for. Several handles of two ranks are all told before any is
  /// destroyed: else the ranks may wait for each other in different ones.
  void start_end();

  /// False while NCCL works on an earlier call; never waits. Throws Error(communication) when something went wrong.
  bool idle() const;
  void check_library() override;
  void start_abort() noexcept override;
  bool abort_is_over() const noexcept override { return !aborting_ || aborted_->load(); }

  /// Throws unless `result`, of function `call`, is success or in progress.
  void check(ncclResult_t result, const char* call) const;
  /// `check`, and waits until NCCL is idle.
  void settle(ncclResult_t result, const char* call, std::int64_t sequence = 0) const;

  /// Throws once it was aborted.
  ncclComm_t get() const;

 private:
  [[noreturn]] void fail(ncclResult_t result, const char* call) const;
  bool orderly() const;
  bool finish_end() const;

  std::string label_;
  std::unique_ptr<ncclComm_t> comm_;            ///< where NCCL's threads write it, so it does not move
  std::shared_ptr<std::atomic<bool>> aborted_;  ///< set by the thread that aborts, which may outlive the handle
  bool aborting_ = false, ending_ = false;
  mutable bool failed_ = false;
};

/// ncclConfig_t of all our communicators. Throws ConfigError when the environment makes NCCL's calls block.
ncclConfig_t nccl_config(const NcclOptions& options);

}  // namespace pdl
