#include "parallel/comm/mpi_communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "parallel/comm/collective_checks.h"
#include "parallel/comm/self_communicator.h"

namespace pdl {
namespace {

char* bytes_at(const Tensor& tensor, std::int64_t element) {
  return static_cast<char*>(tensor.raw()) + element * size_of(tensor.dtype());
}

void copy(void* destination, const void* source, std::int64_t bytes) {
  if (bytes > 0 && destination != source) std::memmove(destination, source, static_cast<std::size_t>(bytes));
}

/// Calls post(first, count) for chunks of at most `largest` elements.
template <typename Post>
void in_chunks(std::int64_t elements, std::int64_t largest, Post post) {
  for (std::int64_t first = 0; first < elements; first += largest) {
    post(first, static_cast<int>(std::min(largest, elements - first)));
  }
}

/// The largest tag that MPI takes; at least 32 767.
int largest_tag(MPI_Comm comm) {
  int* value = nullptr;
  int found = 0;
  PDL_MPI(MPI_Comm_get_attr(comm, MPI_TAG_UB, &value, &found));
  return found ? *value : 32767;
}

}  // namespace

MpiCommunicator::MpiCommunicator(std::unique_ptr<MpiGroup> group, Device& device, const MpiCommunicatorOptions& options,
                                 std::string axis)
    : group_(std::move(group)), device_(device), options_(options), axis_(std::move(axis)) {
  // The attribute belongs to the library, not to a communicator; some libraries answer on MPI_COMM_WORLD only.
  tags_ = largest_tag(MPI_COMM_WORLD) - MpiSliceQueue::kTags - 1;
  if (options_.deterministic && size() > 1) slices_ = std::make_unique<MpiSliceQueue>(*group_, device_, tags_ + 1);
}

std::unique_ptr<MpiRequestOperation> MpiCommunicator::start(const CallRecord& record) {
  const bool message = record.call == CommCall::send || record.call == CommCall::recv;
  return std::make_unique<MpiRequestOperation>(*group_, record, message ? 0 : group_->publish(record));
}

bool MpiCommunicator::native(DType dtype, std::int64_t elements) const {
  return !options_.deterministic && mpi_can_reduce(dtype) && elements <= options_.largest_count;
}

Work MpiCommunicator::slices(const CallRecord& record, SliceJob job) {
  if (!slices_) slices_ = std::make_unique<MpiSliceQueue>(*group_, device_, tags_ + 1);
  const std::int64_t sequence = group_->publish(record);
  job.dtype = record.dtype;
  job.op = record.op;
  job.count = record.count;
  return Work(std::make_unique<MpiSliceOperation>(*group_, record, sequence, slices_->add(std::move(job))));
}

Work MpiCommunicator::all_reduce(Tensor inout, ReduceOp op, Stream&) {
  const CallRecord record{.call = CommCall::all_reduce, .dtype = inout.dtype(), .op = op, .count = inout.elements()};
  if (!native(inout.dtype(), 0)) {
    auto* data = static_cast<char*>(inout.raw());
    return slices(record, {.kind = SliceJob::Kind::all_reduce, .in = data, .out = data});
  }
  auto work = start(record);
  in_chunks(inout.elements(), options_.largest_count, [&](std::int64_t first, int count) {
    PDL_MPI(MPI_Iallreduce(MPI_IN_PLACE, bytes_at(inout, first), count, mpi_type(inout.dtype()), mpi_op(op),
                           group_->comm(), work->requests().add()));
  });
  return Work(std::move(work));
}

Work MpiCommunicator::all_gather(Tensor out, Tensor in, Stream&) {
  check_all_gather(out, in, size());
  const std::int64_t part = in.elements();
  auto work = start({.call = CommCall::all_gather, .dtype = in.dtype(), .count = part});
  if (part == 0) return Work(std::move(work));
  if (out.elements() <= options_.largest_count) {
    const bool in_place = in.raw() == bytes_at(out, rank() * part);
    const MPI_Datatype type = mpi_type(in.dtype());
    PDL_MPI(MPI_Iallgather(in_place ? MPI_IN_PLACE : in.raw(), static_cast<int>(part), type, out.raw(),
                           static_cast<int>(part), type, group_->comm(), work->requests().add()));
    return Work(std::move(work));
  }
  copy(bytes_at(out, rank() * part), in.raw(), in.bytes());
  for (int step = 1; step < size(); ++step) {
    const int from = (rank() + size() - step) % size(), to = (rank() + step) % size();
    add_recv(work->requests(), bytes_at(out, from * part), part, out.dtype(), from, tags_);
    add_send(work->requests(), in.raw(), part, in.dtype(), to, tags_);
  }
  return Work(std::move(work));
}

Work MpiCommunicator::reduce_scatter(Tensor out, Tensor in, ReduceOp op, Stream&) {
  check_reduce_scatter(out, in, size());
  const std::int64_t part = out.elements();
  const CallRecord record{.call = CommCall::reduce_scatter, .dtype = in.dtype(), .op = op, .count = part};
  if (!native(in.dtype(), in.elements())) {
    return slices(record, {.kind = SliceJob::Kind::reduce_scatter,
                           .in = static_cast<const char*>(in.raw()),
                           .out = static_cast<char*>(out.raw())});
  }
  auto work = start(record);
  if (part == 0) return Work(std::move(work));
  const bool inside = out.raw() == bytes_at(in, rank() * part);
  PDL_MPI(MPI_Ireduce_scatter_block(inside ? MPI_IN_PLACE : in.raw(), inside ? in.raw() : out.raw(),
                                    static_cast<int>(part), mpi_type(in.dtype()), mpi_op(op), group_->comm(),
                                    work->requests().add()));
  // In place, MPI leaves the result at the start of `in`.
  if (inside) work->at_end([out, in] { copy(out.raw(), in.raw(), out.bytes()); });
  return Work(std::move(work));
}

Work MpiCommunicator::reduce(Tensor out, Tensor in, ReduceOp op, int root, Stream&) {
  check_reduce(out, in, root, rank(), size());
  const CallRecord record{
      .call = CommCall::reduce, .dtype = in.dtype(), .op = op, .root = root, .count = in.elements()};
  if (!native(in.dtype(), 0)) {
    return slices(record, {.kind = SliceJob::Kind::reduce,
                           .in = static_cast<const char*>(in.raw()),
                           .out = static_cast<char*>(out.raw()),
                           .root = root});
  }
  auto work = start(record);
  const bool in_place = rank() == root && out.raw() == in.raw();
  in_chunks(in.elements(), options_.largest_count, [&](std::int64_t first, int count) {
    PDL_MPI(MPI_Ireduce(in_place ? MPI_IN_PLACE : bytes_at(in, first), rank() == root ? bytes_at(out, first) : nullptr,
                        count, mpi_type(in.dtype()), mpi_op(op), root, group_->comm(), work->requests().add()));
  });
  return Work(std::move(work));
}

Work MpiCommunicator::broadcast(Tensor inout, int root, Stream&) {
  check_root(root, size());
  auto work = start({.call = CommCall::broadcast, .dtype = inout.dtype(), .root = root, .count = inout.elements()});
  in_chunks(inout.elements(), options_.largest_count, [&](std::int64_t first, int count) {
    PDL_MPI(MPI_Ibcast(bytes_at(inout, first), count, mpi_type(inout.dtype()), root, group_->comm(),
                       work->requests().add()));
  });
  return Work(std::move(work));
}

Work MpiCommunicator::all_to_all(Tensor out, const std::vector<std::int64_t>& out_counts, Tensor in,
                                 const std::vector<std::int64_t>& in_counts, Stream&) {
  check_all_to_all(out, out_counts, in, in_counts, rank(), size());
  auto work = start({.call = CommCall::all_to_all, .dtype = in.dtype()});
  std::int64_t out_first = 0, in_first = 0;
  for (int peer = 0; peer < size(); ++peer) {
    const std::int64_t out_count = out_counts[static_cast<std::size_t>(peer)],
                       in_count = in_counts[static_cast<std::size_t>(peer)];
    if (peer == rank()) {
      copy(bytes_at(out, out_first), bytes_at(in, in_first), in_count * size_of(in.dtype()));
    } else {
      add_recv(work->requests(), bytes_at(out, out_first), out_count, out.dtype(), peer, tags_);
      add_send(work->requests(), bytes_at(in, in_first), in_count, in.dtype(), peer, tags_);
    }
    out_first += out_count;
    in_first += in_count;
  }
  return Work(std::move(work));
}

Work MpiCommunicator::send(Tensor in, int peer, int tag, Stream&) {
  check_peer(peer, tag, rank(), size(), tags_);
  auto work = start({.call = CommCall::send, .dtype = in.dtype(), .root = peer, .count = in.elements(), .tag = tag});
  add_send(work->requests(), in.raw(), in.elements(), in.dtype(), peer, tag);
  return Work(std::move(work));
}

Work MpiCommunicator::recv(Tensor out, int peer, int tag, Stream&) {
  check_peer(peer, tag, rank(), size(), tags_);
  auto work = start({.call = CommCall::recv, .dtype = out.dtype(), .root = peer, .count = out.elements(), .tag = tag});
  add_recv(work->requests(), out.raw(), out.elements(), out.dtype(), peer, tag);
  return Work(std::move(work));
}

void MpiCommunicator::add_send(MpiRequests& requests, const void* data, std::int64_t count, DType dtype, int peer,
                               int tag) {
  in_chunks(count, options_.largest_count, [&](std::int64_t first, int chunk) {
    PDL_MPI(MPI_Isend(static_cast<const char*>(data) + first * size_of(dtype), chunk, mpi_type(dtype), peer, tag,
                      group_->comm(), requests.add()));
  });
}

void MpiCommunicator::add_recv(MpiRequests& requests, void* data, std::int64_t count, DType dtype, int peer, int tag) {
  in_chunks(count, options_.largest_count, [&](std::int64_t first, int chunk) {
    PDL_MPI(MPI_Irecv(static_cast<char*>(data) + first * size_of(dtype), chunk, mpi_type(dtype), peer, tag,
                      group_->comm(), requests.add(chunk)));
  });
}

void MpiCommunicator::progress() {
  group_->context().board.heartbeat();
  group_->context().waiter.advance();
  // Asking for a message that never comes makes MPI look after those that do.
  int found = 0;
  PDL_MPI(MPI_Iprobe(MPI_ANY_SOURCE, tags_ + MpiSliceQueue::kTags + 1, group_->comm(), &found, MPI_STATUS_IGNORE));
}

std::unique_ptr<Communicator> MpiCommunicator::split(int color, int key, std::string axis) {
  PDL_CHECK(color >= 0, "color ", color);
  std::unique_ptr<MpiGroup> group = group_->split(color, key, "axis " + axis);
  if (group->size() == 1) return make_self_communicator(device_, std::move(axis));
  return std::make_unique<MpiCommunicator>(std::move(group), device_, options_, std::move(axis));
}

}  // namespace pdl
