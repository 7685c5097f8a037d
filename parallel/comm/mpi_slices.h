#pragma once
// Reductions whose sums are formed in rank order on every rank: deterministic mode, and whatever MPI cannot add itself.
//
//   a piece of an all_reduce    everybody sends slice r of its elements to rank r, for all r
//                               rank r adds all contributions to its slice, in rank order
//                               rank r sends the sum to everybody
//   small all_reduce            everybody sends all of it to everybody and adds up for itself: one phase less
//   reduce_scatter, reduce      the first two lines
//
// Which rank adds an element never changes the order in which it is added, so all of them give the same bits.
//
// Pieces go through a few lanes, each with scratch of a fixed size, in the order of the operations. So scratch depends
// neither on the size nor on the number of operations, and pieces overlap as long as lanes are free. All messages are
// point-to-point, with tags of their own, since the moments at which phases begin differ from rank to rank and MPI's
// collectives must not be reordered.

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "engine/device/device.h"
#include "parallel/comm/mpi_group.h"

namespace pdl {

/// One reduction on its way through the lanes.
struct SliceJob {
  enum class Kind { all_reduce, reduce_scatter, reduce };
  Kind kind = Kind::all_reduce;
  const char* in = nullptr;
  char* out = nullptr;
  DType dtype = DType::fp32;
  ReduceOp op = ReduceOp::sum;
  int root = 0;               ///< reduce
  std::int64_t count = 0;     ///< elements; of one rank's part for reduce_scatter
  std::int64_t started = 0;   ///< elements that have entered a lane
  std::int64_t finished = 0;  ///< elements that have left it
  std::string problem = {};   ///< what went wrong, for the rank that waits
};

class MpiSliceQueue final : public MpiMachine {
 public:
  /// Takes its scratch, deterministic_scratch_bytes(size), from the device, which must be host memory. `first_tag` and
  /// the kTags - 1 tags after it are its own.
  MpiSliceQueue(MpiGroup& group, Device& device, int first_tag);
  ~MpiSliceQueue() override;
  MpiSliceQueue(const MpiSliceQueue&) = delete;
  MpiSliceQueue& operator=(const MpiSliceQueue&) = delete;

  static constexpr int kTags = 2048;
  /// Queues a reduction and starts it if a lane is free. All ranks of the group queue the same ones in the same order.
  std::shared_ptr<SliceJob> add(SliceJob job);
  void advance() override;

 private:
  /// The elements of one rank in a piece.
  struct Slice {
    std::int64_t offset = 0, count = 0;
  };
  /// A piece of a job on its way; free without a job.
  struct Lane {
    char* scratch = nullptr;
    std::shared_ptr<SliceJob> job;
    std::int64_t begin = 0, count = 0;
    int tag = 0;
    bool gathering = false;
    MpiRequests requests;
  };

  std::int64_t piece_elements(const SliceJob& job) const;
  bool is_direct(const SliceJob& job) const;
  Slice slice(const Lane& lane, int rank) const;
  void start_pieces();
  void start(Lane& lane);
  void add_up(Lane& lane);
  void gather(Lane& lane);
  void send(Lane& lane, const char* data, std::int64_t count, int peer, int tag);
  void receive(Lane& lane, char* data, std::int64_t count, int peer, int tag);
  void move(Lane& lane);
  void leave(Lane& lane);

  MpiGroup& group_;
  Buffer scratch_;
  std::int64_t lane_bytes_;
  int first_tag_;
  std::int64_t pieces_ = 0;
  std::vector<Lane> lanes_;
  std::deque<std::shared_ptr<SliceJob>> jobs_;  ///< those with elements that have not started
};

/// A job as an operation that can be waited for.
class MpiSliceOperation final : public MpiOperation {
 public:
  MpiSliceOperation(MpiGroup& group, CallRecord record, std::int64_t sequence, std::shared_ptr<SliceJob> job)
      : MpiOperation(group, record, sequence), job_(std::move(job)) {}

 protected:
  bool poll() override;

 private:
  std::shared_ptr<SliceJob> job_;
};

}  // namespace pdl
