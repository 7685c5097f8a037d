#include "parallel/comm/nccl_communicator.h"

#include <cstdio>
#include <exception>
#include <limits>

#include "parallel/comm/collective_checks.h"
#include "parallel/comm/nccl_channel.h"
#include "parallel/comm/nccl_types.h"
#include "parallel/comm/self_communicator.h"

namespace pdl {
namespace {

// Of `progress`, which is called for every parameter or layer.
constexpr int kCallsPerMark = 8;
constexpr int kTags = std::numeric_limits<int>::max();

std::size_t size_in(std::int64_t elements) { return static_cast<std::size_t>(elements); }

char* bytes_at(const Tensor& tensor, std::int64_t element) {
  return static_cast<char*>(tensor.raw()) + element * size_of(tensor.dtype());
}

class NcclWork final : public Work::State {
 public:
  /// `channel` is null for a collective.
  NcclWork(std::shared_ptr<GpuOperation> operation, NcclChannel* channel, std::string axis)
      : operation_(std::move(operation)), channel_(channel), axis_(std::move(axis)) {}
  ~NcclWork() override {
#ifndef NDEBUG
    if (!waited_ && std::uncaught_exceptions() == 0) {
      std::fprintf(stderr, "bug: nobody waited for %s (axis %s)\n", describe(operation_->record).c_str(),
                   axis_.c_str());
    }
#endif
  }
  NcclWork(const NcclWork&) = delete;
  NcclWork& operator=(const NcclWork&) = delete;

  void wait(Stream& stream) override {
    waited_ = true;
    if (channel_ != nullptr) channel_->wait_until_queued(*operation_);
    stream.wait(*operation_->done);
  }
  bool done() override {
    if (!operation_->done) channel_->advance();
    return operation_->done && operation_->done->passed();
  }

 private:
  std::shared_ptr<GpuOperation> operation_;
  NcclChannel* channel_;
  std::string axis_;
  bool waited_ = false;
};

/// Rank 0 of the group names the new communicator; all ranks connect and wait for each other.
std::unique_ptr<NcclHandle> connect(MpiGroup& group, Device& device, const NcclOptions& options) {
  auto handle = std::make_unique<NcclHandle>(group, device, group.label());
  const CallRecord record{.call = CommCall::setup};
  const std::int64_t sequence = group.publish(record);
  ncclUniqueId id{};
  if (group.rank() == 0) id = handle->make_id();
  MpiRequestOperation exchange(group, record, sequence);
  PDL_MPI(MPI_Ibcast(&id, sizeof id, MPI_BYTE, 0, group.comm(), exchange.requests().add()));
  exchange.wait();
  handle->connect(id, group.rank(), group.size(), options);
  handle->settle(ncclInProgress, "ncclCommInitRankConfig", sequence);
  return handle;
}

/// All sends and receives in one group, in which none waits for another. Equal counts on both sides are the contract.
ncclResult_t exchange_parts(const Tensor& out, const std::vector<std::int64_t>& out_counts, const Tensor& in,
                            const std::vector<std::int64_t>& in_counts, ncclComm_t comm, cudaStream_t stream) {
  const auto good = [](ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; };
  const ncclDataType_t type = nccl_type(in.dtype());
  ncclResult_t result = ncclGroupStart();
  if (!good(result)) return result;
  std::int64_t out_first = 0, in_first = 0;
  for (std::size_t peer = 0; peer < in_counts.size() && good(result); ++peer) {
    const auto rank = static_cast<int>(peer);
    const std::int64_t out_count = out_counts[peer], in_count = in_counts[peer];
    if (in_count > 0) result = ncclSend(bytes_at(in, in_first), size_in(in_count), type, rank, comm, stream);
    if (out_count > 0 && good(result)) {
      result = ncclRecv(bytes_at(out, out_first), size_in(out_count), type, rank, comm, stream);
    }
    out_first += out_count;
    in_first += in_count;
  }
  const ncclResult_t end = ncclGroupEnd();
  return good(result) ? end : result;
}

}  // namespace

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "unknown";
  return str(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

NcclCommunicator::NcclCommunicator(std::unique_ptr<MpiGroup> group, Device& device, const NcclOptions& options,
                                   std::string axis)
    : group_(std::move(group)),
      device_(device),
      options_(options),
      axis_(std::move(axis)),
      events_(std::make_shared<EventPool>()),
      stream_(device.make_stream(true)),
      handle_(connect(*group_, device, options_)) {}

NcclCommunicator::~NcclCommunicator() {
  for (const auto& [place, channel] : channels_) channel->start_end();
  if (handle_) handle_->start_end();
}

std::int64_t NcclCommunicator::publish(const CallRecord& record) {
  try {
    return last_sequence_ = group_->publish(record, Executor::gpu);
  } catch (const Error&) {
    handle_->give_up();
    throw;
  }
}

/// `issue(communicator, stream)` queues the operation with NCCL's function `call`; not called for no elements.
template <typename Issue>
Work NcclCommunicator::queue(const CallRecord& record, const char* call, Stream& stream, Issue issue) {
  group_->context().gpu.pace(stream);
  const std::int64_t sequence = publish(record);
  auto operation = std::make_shared<GpuOperation>(record, sequence, events_);
  operation->ready = events_->take(stream);
  stream.record(*operation->ready);
  stream_->wait(*operation->ready);
  const ncclResult_t result = issue(handle_->get(), static_cast<cudaStream_t>(stream_->native()));
  handle_->settle(result, call, sequence);
  operation->done = events_->take(*stream_);
  stream_->record(*operation->done);
  handle_->add(operation);
  return Work(std::make_unique<NcclWork>(std::move(operation), nullptr, axis_));
}

Work NcclCommunicator::all_reduce(Tensor inout, ReduceOp op, Stream& stream) {
  const CallRecord record{.call = CommCall::all_reduce, .dtype = inout.dtype(), .op = op, .count = inout.elements()};
  return queue(record, "ncclAllReduce", stream, [&](ncclComm_t comm, cudaStream_t on) {
    if (inout.elements() == 0) return ncclSuccess;
    return ncclAllReduce(inout.raw(), inout.raw(), size_in(inout.elements()), nccl_type(inout.dtype()), nccl_op(op),
                         comm, on);
  });
}

Work NcclCommunicator::all_gather(Tensor out, Tensor in, Stream& stream) {
  check_all_gather(out, in, size());
  const CallRecord record{.call = CommCall::all_gather, .dtype = in.dtype(), .count = in.elements()};
  return queue(record, "ncclAllGather", stream, [&](ncclComm_t comm, cudaStream_t on) {
    if (in.elements() == 0) return ncclSuccess;
    return ncclAllGather(in.raw(), out.raw(), size_in(in.elements()), nccl_type(in.dtype()), comm, on);
  });
}

Work NcclCommunicator::reduce_scatter(Tensor out, Tensor in, ReduceOp op, Stream& stream) {
  check_reduce_scatter(out, in, size());
  const CallRecord record{.call = CommCall::reduce_scatter, .dtype = in.dtype(), .op = op, .count = out.elements()};
  return queue(record, "ncclReduceScatter", stream, [&](ncclComm_t comm, cudaStream_t on) {
    if (out.elements() == 0) return ncclSuccess;
    return ncclReduceScatter(in.raw(), out.raw(), size_in(out.elements()), nccl_type(in.dtype()), nccl_op(op), comm,
                             on);
  });
}

Work NcclCommunicator::reduce(Tensor out, Tensor in, ReduceOp op, int root, Stream& stream) {
  check_reduce(out, in, root, rank(), size());
  const CallRecord record{
      .call = CommCall::reduce, .dtype = in.dtype(), .op = op, .root = root, .count = in.elements()};
  return queue(record, "ncclReduce", stream, [&](ncclComm_t comm, cudaStream_t on) {
    if (in.elements() == 0) return ncclSuccess;
    void* const result = rank() == root ? out.raw() : nullptr;
    return ncclReduce(in.raw(), result, size_in(in.elements()), nccl_type(in.dtype()), nccl_op(op), root, comm, on);
  });
}

Work NcclCommunicator::broadcast(Tensor inout, int root, Stream& stream) {
  check_root(root, size());
  const CallRecord record{.call = CommCall::broadcast, .dtype = inout.dtype(), .root = root, .count = inout.elements()};
  return queue(record, "ncclBroadcast", stream, [&](ncclComm_t comm, cudaStream_t on) {
    if (inout.elements() == 0) return ncclSuccess;
    return ncclBroadcast(inout.raw(), inout.raw(), size_in(inout.elements()), nccl_type(inout.dtype()), root, comm, on);
  });
}

Work NcclCommunicator::all_to_all(Tensor out, const std::vector<std::int64_t>& out_counts, Tensor in,
                                  const std::vector<std::int64_t>& in_counts, Stream& stream) {
  check_all_to_all(out, out_counts, in, in_counts, rank(), size());
  return queue(
      {.call = CommCall::all_to_all, .dtype = in.dtype()}, "ncclSend and ncclRecv", stream,
      [&](ncclComm_t comm, cudaStream_t on) { return exchange_parts(out, out_counts, in, in_counts, comm, on); });
}

Work NcclCommunicator::send(Tensor in, int peer, int tag, Stream& stream) {
  return message(in, peer, tag, true, stream);
}

Work NcclCommunicator::recv(Tensor out, int peer, int tag, Stream& stream) {
  return message(out, peer, tag, false, stream);
}

Work NcclCommunicator::message(const Tensor& tensor, int peer, int tag, bool sends, Stream& stream) {
  check_peer(peer, tag, rank(), size(), kTags);
  std::unique_ptr<NcclChannel>& channel = channels_[{peer, sends}];
  if (!channel) {
    const auto direction = sends ? NcclChannel::Direction::out : NcclChannel::Direction::in;
    channel = std::make_unique<NcclChannel>(*group_, device_, events_, peer, direction, options_);
  }
  group_->context().gpu.pace(stream);
  std::shared_ptr<GpuOperation> operation = channel->add(tensor, tag, stream);
  return Work(std::make_unique<NcclWork>(std::move(operation), channel.get(), axis_));
}

void NcclCommunicator::progress() {
  group_->context().board.heartbeat();
  group_->context().waiter.advance();
  if (++progress_calls_ % kCallsPerMark == 0) group_->context().gpu.pace(device_.compute_stream());
  static_cast<void>(handle_->idle());  // throws when something went wrong
  try {
    if (last_sequence_ > 0) group_->check(last_sequence_);
  } catch (const Error&) {
    handle_->give_up();
    throw;
  }
}

std::unique_ptr<Communicator> NcclCommunicator::split(int color, int key, std::string axis) {
  PDL_CHECK(color >= 0, "color ", color);
  std::unique_ptr<MpiGroup> part = group_->split(color, key, "axis " + axis);
  if (part->size() == 1) return make_self_communicator(device_, std::move(axis));
  return std::make_unique<NcclCommunicator>(std::move(part), device_, options_, std::move(axis));
}

}  // namespace pdl
