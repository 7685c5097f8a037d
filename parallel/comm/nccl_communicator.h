#pragma once
// The Communicator on NCCL, for tensors in device memory, one GPU for each rank.
//
// Each group has a stream of its own, of high priority. An operation waits there for what is queued on the caller's
// stream so far, and `Work::wait` makes a stream wait for it: the host queues and goes on, so communication overlaps
// with whatever else the GPU does. All of it may be recorded into a CUDA graph, once each operation has run before.
//
// Order of sums. NCCL adds along rings or trees, in an order that depends on the number of ranks, how they are wired,
// the number of elements and its settings, but not on chance: the same job has the same sums each time. It is not the
// rank order of the deterministic MPI communicator, and differs between all_reduce and reduce_scatter, so that engines
// which are equal bit by bit on MPI are equal up to rounding here. 16-bit floats are rounded at every addition.
//
// Messages. NCCL has no tags: those of one pair arrive in the order in which they were sent, whatever their tags are,
// and must be received in it. Messages of different pairs and directions do not wait for each other (nccl_channel.h).
//
// Failures. Collectives are announced on the host's board as those of MPI are, so that ranks which disagree get an
// Error and no hang. Connecting has the deadline. Once an operation is on its stream only the GPU waits for peers: what
// watches it then is the host's waits for the GPU, all of them (gpu_wait.h). After an error nothing can be sent or
// received on this GPU any more.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "parallel/comm/communicator.h"
#include "parallel/comm/mpi_group.h"

namespace pdl {

class NcclChannel;
class NcclHandle;

/// "2.28.9": of the library that runs.
std::string nccl_version();

class NcclCommunicator final : public Communicator {
 public:
  /// Collective over the group, and waits until all ranks are connected.
  NcclCommunicator(std::unique_ptr<MpiGroup> group, Device& device, const NcclOptions& options, std::string axis);
  ~NcclCommunicator() override;
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  std::string transport() const override { return "nccl"; }
  std::string axis() const override { return axis_; }
  std::string library() const override { return "NCCL " + nccl_version(); }
  Stream* own_stream() override { return stream_.get(); }

  Work all_reduce(Tensor inout, ReduceOp op, Stream& stream) override;
  Work all_gather(Tensor out, Tensor in, Stream& stream) override;
  Work reduce_scatter(Tensor out, Tensor in, ReduceOp op, Stream& stream) override;
  Work reduce(Tensor out, Tensor in, ReduceOp op, int root, Stream& stream) override;
  Work broadcast(Tensor inout, int root, Stream& stream) override;
  Work all_to_all(Tensor out, const std::vector<std::int64_t>& out_counts, Tensor in,
                  const std::vector<std::int64_t>& in_counts, Stream& stream) override;
  Work send(Tensor in, int peer, int tag, Stream& stream) override;
  Work recv(Tensor out, int peer, int tag, Stream& stream) override;

  /// Throws Error(communication) when NCCL reports that an operation went wrong, or a peer has called another one.
  /// Waits when the host is far ahead of the GPU.
  void progress() override;
  /// The part connects on its own, without ncclCommSplit: that writes to a communicator that nobody keeps for ranks
  /// without a part, at a time of its choosing. On one rank the result is `self`.
  std::unique_ptr<Communicator> split(int color, int key, std::string axis) override;

 private:
  std::int64_t publish(const CallRecord& record);
  template <typename Issue>
  Work queue(const CallRecord& record, const char* call, Stream& stream, Issue issue);
  Work message(const Tensor& tensor, int peer, int tag, bool sends, Stream& stream);

  std::unique_ptr<MpiGroup> group_;
  Device& device_;
  NcclOptions options_;
  std::string axis_;
  std::int64_t last_sequence_ = 0;  ///< of the collective that was announced last
  std::int64_t progress_calls_ = 0;
  std::shared_ptr<EventPool> events_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<NcclHandle> handle_;                                     ///< uses stream_: destroyed first
  std::map<std::pair<int, bool>, std::unique_ptr<NcclChannel>> channels_;  ///< by peer and whether we send
};

}  // namespace pdl
