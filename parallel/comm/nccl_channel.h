#pragma once
// Messages from one rank to another through NCCL.
//
// In NCCL a send or receive keeps its stream busy until the other side has come, and operations of one communicator run
// one after another. Two ranks that first send to and then receive from each other would wait for ever. So the messages
// of each pair and direction have a communicator of two ranks and a stream to themselves: order is kept within a
// channel, and channels do not wait for each other. A channel is connected when it is first used. That takes the other
// rank too, so a first message may wait on the host; later ones are queued at once.

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parallel/comm/nccl_handle.h"

namespace pdl {

class NcclChannel final : public MpiMachine {
 public:
  enum class Direction { out, in };

  /// Starts to connect with `peer`, a rank of the group, and returns. `group` and `device` outlive the channel.
  NcclChannel(MpiGroup& group, Device& device, std::shared_ptr<EventPool> events, int peer, Direction direction,
              const NcclOptions& options);
  ~NcclChannel() override;
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;

  /// A message after what is queued on `stream`.
  std::shared_ptr<GpuOperation> add(const Tensor& tensor, int tag, Stream& stream);
  /// Waits on the host until the message is queued, which a connected channel's are at once.
  void wait_until_queued(const GpuOperation& message) const;
  /// Takes the next steps that are possible without waiting.
  void advance() override;
  void start_end() { handle_.start_end(); }

 private:
  struct Message {
    Tensor tensor;
    std::shared_ptr<GpuOperation> operation;
  };
  bool connected();
  void start(const Message& message);

  MpiGroup& group_;
  std::shared_ptr<EventPool> events_;
  int peer_;
  Direction direction_;
  NcclOptions options_;
  ncclUniqueId id_{};                               ///< from the sender to the receiver, through MPI
  std::optional<MpiRequestOperation> id_exchange_;  ///< until it is through
  bool connected_ = false, started_ = false;        ///< started: the first of waiting_ has been given to NCCL
  std::deque<Message> waiting_;
  std::unique_ptr<Stream> stream_;
  NcclHandle handle_;  ///< uses stream_: destroyed first
};

}  // namespace pdl
