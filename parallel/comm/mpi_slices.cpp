#include "parallel/comm/mpi_slices.h"

#include <algorithm>
#include <utility>

#include "parallel/comm/rank_order.h"
#include "parallel/comm/world.h"

namespace pdl {
namespace {

constexpr int kLanes = 4;
constexpr std::int64_t kLaneBytes = 256 << 10;
constexpr std::int64_t kLaneBytesPerPeer = 16 << 10;  // keeps messages of large groups from becoming tiny
constexpr std::int64_t kDirectBytes = 4 << 10;        // below this a message costs more than its bytes

std::int64_t bytes_of_lane(int size) { return std::max(kLaneBytes, kLaneBytesPerPeer * (size - 1)); }

}  // namespace

std::int64_t deterministic_scratch_bytes(int size) { return size <= 1 ? 0 : kLanes * bytes_of_lane(size); }

MpiSliceQueue::MpiSliceQueue(MpiGroup& group, Device& device, int first_tag)
    : group_(group),
      lane_bytes_(bytes_of_lane(group.size())),
      first_tag_(first_tag),
      lanes_(group.size() > 1 ? kLanes : 0) {
  if (!lanes_.empty()) scratch_ = device.allocate(deterministic_scratch_bytes(group.size()), MemoryKind::communication);
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    lanes_[lane].scratch = static_cast<char*>(scratch_.raw()) + static_cast<std::int64_t>(lane) * lane_bytes_;
  }
  group_.context().waiter.add(*this);
}

MpiSliceQueue::~MpiSliceQueue() { group_.context().waiter.remove(*this); }

std::shared_ptr<SliceJob> MpiSliceQueue::add(SliceJob job) {
  auto shared = std::make_shared<SliceJob>(std::move(job));
  if (group_.size() == 1) {  // the only contribution is the result
    reduce_in_rank_order(shared->out, {shared->in}, shared->count, shared->dtype, shared->op);
    shared->finished = shared->count;
  } else if (shared->count > 0) {
    jobs_.push_back(shared);
    start_pieces();
  }
  return shared;
}

bool MpiSliceQueue::is_direct(const SliceJob& job) const {
  const std::int64_t bytes = job.count * size_of(job.dtype);
  return job.kind == SliceJob::Kind::all_reduce && bytes <= kDirectBytes && bytes * (group_.size() - 1) <= lane_bytes_;
}

/// As many elements as let the peers' contributions to one rank's slice fit into a lane.
std::int64_t MpiSliceQueue::piece_elements(const SliceJob& job) const {
  const std::int64_t slice_elements = lane_bytes_ / (group_.size() - 1) / size_of(job.dtype);
  return job.kind == SliceJob::Kind::all_reduce && !is_direct(job) ? slice_elements * group_.size() : slice_elements;
}

MpiSliceQueue::Slice MpiSliceQueue::slice(const Lane& lane, int rank) const {
  const SliceJob& job = *lane.job;
  switch (job.kind) {
    case SliceJob::Kind::all_reduce: {
      if (is_direct(job)) break;
      const std::int64_t first = lane.count * rank / group_.size(), end = lane.count * (rank + 1) / group_.size();
      return {lane.begin + first, end - first};
    }
    case SliceJob::Kind::reduce_scatter:
      return {rank * job.count + lane.begin, lane.count};
    case SliceJob::Kind::reduce:
      return {lane.begin, rank == job.root ? lane.count : 0};
  }
  return {lane.begin, lane.count};
}

void MpiSliceQueue::advance() {
  for (Lane& lane : lanes_) {
    if (lane.job) move(lane);
  }
  start_pieces();
}

void MpiSliceQueue::start_pieces() {
  for (Lane& lane : lanes_) {
    if (jobs_.empty()) return;
    if (!lane.job) start(lane);
  }
}

void MpiSliceQueue::start(Lane& lane) {
  SliceJob& job = *jobs_.front();
  lane.job = jobs_.front();
  lane.begin = job.started;
  lane.count = std::min(piece_elements(job), job.count - job.started);
  job.started += lane.count;
  if (job.started == job.count) jobs_.pop_front();
  // A tag returns after so many pieces that those of one tag start in the same order on both sides.
  lane.tag = first_tag_ + 2 * static_cast<int>(pieces_++ % (kTags / 2));
  lane.gathering = false;

  const std::int64_t element_bytes = size_of(job.dtype), own_count = slice(lane, group_.rank()).count;
  char* place = lane.scratch;
  // Each rank begins with its neighbour, so that nobody is everybody's first.
  for (int step = 1; step < group_.size(); ++step) {
    const int peer = (group_.rank() + group_.size() - step) % group_.size();
    receive(lane, place, own_count, peer, lane.tag);
    place += own_count * element_bytes;
  }
  for (int step = 1; step < group_.size(); ++step) {
    const int peer = (group_.rank() + step) % group_.size();
    const Slice theirs = slice(lane, peer);
    send(lane, job.in + theirs.offset * element_bytes, theirs.count, peer, lane.tag);
  }
  move(lane);
}

/// The piece's next step if its messages are through.
void MpiSliceQueue::move(Lane& lane) {
  std::string problem;
  if (!lane.job->problem.empty()) return;  // the rank that waits for it ends the run
  if (!lane.requests.test(mpi_type(lane.job->dtype), problem)) return;
  if (!problem.empty()) {
    lane.job->problem = problem;
    return;
  }
  if (lane.gathering) return leave(lane);
  add_up(lane);
  if (lane.job->kind != SliceJob::Kind::all_reduce || is_direct(*lane.job)) return leave(lane);
  gather(lane);
}

void MpiSliceQueue::add_up(Lane& lane) {
  const SliceJob& job = *lane.job;
  const Slice own = slice(lane, group_.rank());
  if (own.count == 0) return;
  const std::int64_t element_bytes = size_of(job.dtype);
  std::vector<const void*> contributions(static_cast<std::size_t>(group_.size()));
  contributions[static_cast<std::size_t>(group_.rank())] = job.in + own.offset * element_bytes;
  for (int step = 1; step < group_.size(); ++step) {
    const int peer = (group_.rank() + group_.size() - step) % group_.size();
    contributions[static_cast<std::size_t>(peer)] = lane.scratch + (step - 1) * own.count * element_bytes;
  }
  const std::int64_t place = job.kind == SliceJob::Kind::all_reduce ? own.offset : lane.begin;
  reduce_in_rank_order(job.out + place * element_bytes, contributions, own.count, job.dtype, job.op);
}

void MpiSliceQueue::gather(Lane& lane) {
  const SliceJob& job = *lane.job;
  const std::int64_t element_bytes = size_of(job.dtype);
  const Slice own = slice(lane, group_.rank());
  lane.gathering = true;
  for (int step = 1; step < group_.size(); ++step) {
    const int peer = (group_.rank() + group_.size() - step) % group_.size();
    const Slice theirs = slice(lane, peer);
    receive(lane, job.out + theirs.offset * element_bytes, theirs.count, peer, lane.tag + 1);
  }
  for (int step = 1; step < group_.size(); ++step) {
    const int peer = (group_.rank() + step) % group_.size();
    send(lane, job.out + own.offset * element_bytes, own.count, peer, lane.tag + 1);
  }
}

void MpiSliceQueue::send(Lane& lane, const char* data, std::int64_t count, int peer, int tag) {
  if (count == 0) return;
  PDL_MPI(MPI_Isend(data, static_cast<int>(count), mpi_type(lane.job->dtype), peer, tag, group_.comm(),
                    lane.requests.add()));
}

void MpiSliceQueue::receive(Lane& lane, char* data, std::int64_t count, int peer, int tag) {
  if (count == 0) return;
  const int expected = static_cast<int>(count);
  PDL_MPI(MPI_Irecv(data, expected, mpi_type(lane.job->dtype), peer, tag, group_.comm(), lane.requests.add(expected)));
}

void MpiSliceQueue::leave(Lane& lane) {
  lane.job->finished += lane.count;
  lane.job.reset();
}

bool MpiSliceOperation::poll() {
  if (job_->problem.empty()) return job_->finished == job_->count;
  check_peers();
  throw Error(str(describe(), ": ", job_->problem), ExitCode::communication);
}

}  // namespace pdl
