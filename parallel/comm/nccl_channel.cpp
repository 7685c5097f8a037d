#include "parallel/comm/nccl_channel.h"

#include <utility>

#include "parallel/comm/nccl_types.h"

namespace pdl {
namespace {

std::string channel_label(const MpiGroup& group, int peer, NcclChannel::Direction direction) {
  const auto world_rank = group.board().members()[static_cast<std::size_t>(peer)].world_rank;
  return str("messages ", direction == NcclChannel::Direction::out ? "to" : "from", " rank ", world_rank, " of ",
             group.label());
}

}  // namespace

NcclChannel::NcclChannel(MpiGroup& group, Device& device, std::shared_ptr<EventPool> events, int peer,
                         Direction direction, const NcclOptions& options)
    : group_(group),
      events_(std::move(events)),
      peer_(peer),
      direction_(direction),
      options_(options),
      stream_(device.make_stream(true)),
      handle_(group, device, channel_label(group, peer, direction)) {
  constexpr int kTag = 0;  // of the one MPI message between two ranks that this group ever has
  const bool sends = direction_ == Direction::out;
  if (sends) id_ = handle_.make_id();
  id_exchange_.emplace(group_,
                       CallRecord{.call = sends ? CommCall::send : CommCall::recv,
                                  .dtype = DType::uint8,
                                  .root = peer_,
                                  .count = sizeof id_,
                                  .tag = kTag},
                       0);
  MpiRequests& requests = id_exchange_->requests();
  if (sends) {
    PDL_MPI(MPI_Isend(&id_, sizeof id_, MPI_BYTE, peer_, kTag, group_.comm(), requests.add()));
  } else {
    PDL_MPI(MPI_Irecv(&id_, sizeof id_, MPI_BYTE, peer_, kTag, group_.comm(), requests.add(sizeof id_)));
  }
  group_.context().waiter.add(*this);
}

NcclChannel::~NcclChannel() { group_.context().waiter.remove(*this); }

std::shared_ptr<GpuOperation> NcclChannel::add(const Tensor& tensor, int tag, Stream& stream) {
  const CallRecord record{.call = direction_ == Direction::out ? CommCall::send : CommCall::recv,
                          .dtype = tensor.dtype(),
                          .root = peer_,
                          .count = tensor.elements(),
                          .tag = tag};
  auto operation = std::make_shared<GpuOperation>(record, 0, events_);
  operation->ready = events_->take(stream);
  stream.record(*operation->ready);
  waiting_.push_back({tensor, operation});
  advance();
  return operation;
}

void NcclChannel::wait_until_queued(const GpuOperation& message) const {
  if (message.done) return;
  const GroupBoard& board = group_.board();
  // The waiter moves this channel, among all others of the process.
  wait_for_nccl(
      group_, [&message] { return message.done != nullptr; }, group_.describe(message.record, 0), 0,
      str("this pair of ranks is not connected: rank ", board.members()[static_cast<std::size_t>(peer_)].world_rank,
          direction_ == Direction::out ? " has not asked for it (" : " has not sent it (", board.describe_member(peer_),
          ")"));
}

bool NcclChannel::connected() {
  if (connected_) return true;
  if (id_exchange_) {
    if (!id_exchange_->test()) return false;
    id_exchange_.reset();
    handle_.connect(id_, direction_ == Direction::out ? 0 : 1, 2, options_);
  }
  connected_ = handle_.idle();
  return connected_;
}

void NcclChannel::advance() {
  if (!connected()) return;
  while (!waiting_.empty()) {
    if (!started_) start(waiting_.front());
    started_ = true;
    if (!handle_.idle()) return;  // NCCL connects the GPUs at the first message
    const std::shared_ptr<GpuOperation> operation = waiting_.front().operation;
    std::unique_ptr<Event> done = events_->take(*stream_);
    stream_->record(*done);
    operation->done = std::move(done);
    started_ = false;
    waiting_.pop_front();
    handle_.add(operation);
  }
  static_cast<void>(handle_.idle());  // throws when a message went wrong
}

void NcclChannel::start(const Message& message) {
  stream_->wait(*message.operation->ready);
  const Tensor& tensor = message.tensor;
  if (tensor.elements() == 0) return;
  const auto count = static_cast<std::size_t>(tensor.elements());
  const ncclDataType_t type = nccl_type(tensor.dtype());
  const auto stream = static_cast<cudaStream_t>(stream_->native());
  if (direction_ == Direction::out) {
    handle_.check(ncclSend(tensor.raw(), count, type, 1, handle_.get(), stream), "ncclSend");
  } else {
    handle_.check(ncclRecv(tensor.raw(), count, type, 0, handle_.get(), stream), "ncclRecv");
  }
}

}  // namespace pdl
