#pragma once
// How the host waits for a GPU that waits for other ranks.
//
// An operation that was queued on a stream waits for its peers out of the host's sight, and a host that waited for that
// stream in the driver would wait for a lost peer for ever. So while a rank has communicators that work on its GPU, all
// its waits for the GPU run in the one wait loop (mpi_wait.h), which watches the operations in flight: what their
// library reports, what the peers have called, and how long the oldest one of each stream has waited for peers. That
// time counts from when all that it was queued after is over: a rank's own computing has no deadline.
//
// Before an error leaves the loop, everything that waits for peers on this GPU is aborted, all of it at once: freeing
// memory, also that of an aborted communicator, waits for every kernel on the device.

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "engine/device/device.h"
#include "parallel/comm/mpi_wait.h"
#include "parallel/comm/rank_board.h"

namespace pdl {

class MpiGroup;

/// Events that are free again. Shared with operations, which may outlive their communicator.
class EventPool {
 public:
  std::unique_ptr<Event> take(Stream& stream);
  void give_back(std::unique_ptr<Event> event) {
    if (event) free_.push_back(std::move(event));
  }

 private:
  std::vector<std::unique_ptr<Event>> free_;
};

/// One operation, shared by whoever waits for it and by the queue that it is in.
struct GpuOperation {
  GpuOperation(const CallRecord& call, std::int64_t number, std::shared_ptr<EventPool> pool)
      : record(call), sequence(number), events(std::move(pool)) {}
  ~GpuOperation();
  GpuOperation(const GpuOperation&) = delete;
  GpuOperation& operator=(const GpuOperation&) = delete;

  CallRecord record;
  std::int64_t sequence;  ///< of a collective; 0: a message
  std::shared_ptr<EventPool> events;
  std::unique_ptr<Event> ready;  ///< in the caller's stream: what the operation was queued after
  std::unique_ptr<Event> done;   ///< in the stream of the communication; null until the operation is queued there
};

/// The operations of one communicator and its stream whose end the host has not seen.
class GpuQueue {
 public:
  /// From now on the process watches this queue when it waits for `device`. Both outlive the queue.
  GpuQueue(MpiGroup& group, Device& device);
  virtual ~GpuQueue();
  GpuQueue(const GpuQueue&) = delete;
  GpuQueue& operator=(const GpuQueue&) = delete;

  /// An operation that was just queued, `done` recorded.
  void add(std::shared_ptr<GpuOperation> operation);
  /// Throws Error(communication) when the library reports one, when a peer has called something else, and when the
  /// oldest operation has waited for longer than the group's deadline.
  void check();

  /// The oldest operation, "all_reduce of 64 fp32 (operation 17 of axis dp)"; empty when there is none.
  std::string describe() const;
  /// Seconds that it has waited for peers, as far as the host has looked; negative while it waits for this GPU.
  double waited_s() const;
  /// Some operations are part of a graph, where nobody can see them come and go.
  bool in_graphs() const { return in_graphs_; }
  double timeout_s() const;

  /// Throws Error(communication) when the library reports one.
  virtual void check_library() = 0;
  /// Kernels that wait for peers end. Returns at once.
  virtual void start_abort() noexcept = 0;
  virtual bool abort_is_over() const noexcept = 0;

 protected:
  MpiGroup& group() const { return group_; }

 private:
  void forget_what_is_over();

  MpiGroup& group_;
  std::deque<std::shared_ptr<GpuOperation>> operations_;  ///< oldest first
  bool waits_for_peers_ = false;                          ///< the oldest does
  std::chrono::steady_clock::time_point since_;           ///< when that was seen
  bool in_graphs_ = false;
};

/// All queues of this process.
class GpuWaiter final : public HostWait {
 public:
  GpuWaiter(HostBoard& board, MpiWaiter& waiter) : board_(board), waiter_(waiter) {}

  void add(GpuQueue& queue, Device& device);
  void remove(GpuQueue& queue);

  /// Throws Error(communication) as GpuQueue::check does and Error("stopped by rank r: ...") when another rank of this
  /// host has failed. A failure of this rank is claimed before its peers can feel it.
  void until(const std::function<bool()>& over) override;
  /// Does not return when the library cannot end what it has begun: the job ends, with the first failure's code.
  void abandon() noexcept override;

  /// To be called now and then while work is queued on `stream`: waits when the host is far ahead of the GPU. When the
  /// driver's queue of launches is full (after about a thousand), the next launch waits in the driver.
  void pace(Stream& stream);

 private:
  class Wait;
  void look();
  std::string describe() const;
  double graph_timeout_s() const;
  [[noreturn]] void end_job() const;

  HostBoard& board_;
  MpiWaiter& waiter_;
  Device* device_ = nullptr;  ///< null without queues
  std::vector<GpuQueue*> queues_;
  std::chrono::steady_clock::time_point looked_;
  EventPool events_;
  std::deque<std::unique_ptr<Event>> marks_;  ///< of `pace`, oldest first
  bool abandoned_ = false;
};

}  // namespace pdl
