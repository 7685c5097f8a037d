#pragma once
// The Communicator on MPI, for tensors in host memory.
//
//   all_reduce, reduce_scatter, reduce    MPI's own; slices in rank order (mpi_slices.h) in deterministic mode, for
//                                         16-bit floats, and where MPI cannot count that far
//   all_gather, broadcast                 MPI's own
//   all_to_all, send, recv                point-to-point
//
// Counts are 64 bits wide: what exceeds an MPI count goes in chunks. Every collective is announced on the host's board
// before it is posted (rank_board.h), so that ranks of one host which disagree get an Error that names both calls, and
// no wrong data. Ranks of different hosts have only MPI's own checks and the deadline. A message is checked for its
// length, not for its type.
//
// Nothing moves by itself: transfers advance inside `progress`, `done` and `wait`, of any communicator.

#include <cstdint>
#include <memory>
#include <string>

#include "parallel/comm/communicator.h"
#include "parallel/comm/mpi_group.h"
#include "parallel/comm/mpi_slices.h"

namespace pdl {

struct MpiCommunicatorOptions {
  bool deterministic = false;
  std::int64_t largest_count = 1 << 30;  ///< elements in one MPI call; tests make it small
};

class MpiCommunicator final : public Communicator {
 public:
  /// `device` gives the scratch of deterministic mode at once, `deterministic_scratch_bytes(size)`, and must be a CPU
  /// device. Tensors are in host memory whatever the device of the engine is.
  MpiCommunicator(std::unique_ptr<MpiGroup> group, Device& device, const MpiCommunicatorOptions& options,
                  std::string axis);

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  std::string transport() const override { return "mpi"; }
  std::string axis() const override { return axis_; }

  Work all_reduce(Tensor inout, ReduceOp op, Stream& stream) override;
  Work all_gather(Tensor out, Tensor in, Stream& stream) override;
  Work reduce_scatter(Tensor out, Tensor in, ReduceOp op, Stream& stream) override;
  Work reduce(Tensor out, Tensor in, ReduceOp op, int root, Stream& stream) override;
  Work broadcast(Tensor inout, int root, Stream& stream) override;
  Work all_to_all(Tensor out, const std::vector<std::int64_t>& out_counts, Tensor in,
                  const std::vector<std::int64_t>& in_counts, Stream& stream) override;
  /// Messages of one pair and tag arrive in order. Tags lie in [0, 30 718) at least.
  Work send(Tensor in, int peer, int tag, Stream& stream) override;
  Work recv(Tensor out, int peer, int tag, Stream& stream) override;

  void progress() override;
  /// On one rank it is `self`.
  std::unique_ptr<Communicator> split(int color, int key, std::string axis) override;

 private:
  std::unique_ptr<MpiRequestOperation> start(const CallRecord& record);
  /// True when MPI's own reduction of `elements` in one call will do.
  bool native(DType dtype, std::int64_t elements) const;
  Work slices(const CallRecord& record, SliceJob job);
  void add_send(MpiRequests& requests, const void* data, std::int64_t count, DType dtype, int peer, int tag);
  void add_recv(MpiRequests& requests, void* data, std::int64_t count, DType dtype, int peer, int tag);

  std::unique_ptr<MpiGroup> group_;
  Device& device_;
  MpiCommunicatorOptions options_;
  std::string axis_;
  int tags_ = 0;  ///< [0, tags_) for send and recv; above them all_to_all's, then the slices'
  std::unique_ptr<MpiSliceQueue> slices_;
};

}  // namespace pdl
