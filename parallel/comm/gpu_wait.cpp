#include "parallel/comm/gpu_wait.h"

#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>
#include <utility>

#include "parallel/comm/mpi_group.h"

namespace pdl {
namespace {

using Clock = std::chrono::steady_clock;

// After the first moment a wait asks every 50 us: a step of a few milliseconds feels more, and one question costs a
// microsecond. What can go wrong is looked at less often.
constexpr WaitPace kGpuPace{.tests_per_nap = 1, .longest_nap = std::chrono::microseconds(50)};
constexpr std::chrono::milliseconds kBetweenLooks{1};
constexpr std::chrono::seconds kAbortPatience{10};
// A queue forgets by itself what is over when it gets longer than this.
constexpr std::size_t kLongQueue = 8;
// Between two marks lie some operations or layers, with tens of launches each.
constexpr std::size_t kMarksAhead = 8;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

std::unique_ptr<Event> EventPool::take(Stream& stream) {
  if (free_.empty()) return stream.make_event();
  std::unique_ptr<Event> event = std::move(free_.back());
  free_.pop_back();
  return event;
}

GpuOperation::~GpuOperation() {
  events->give_back(std::move(ready));
  events->give_back(std::move(done));
}

// ----------------------------------------------------------------------------------------------------- one stream
GpuQueue::GpuQueue(MpiGroup& group, Device& device) : group_(group) { group_.context().gpu.add(*this, device); }

GpuQueue::~GpuQueue() { group_.context().gpu.remove(*this); }

void GpuQueue::add(std::shared_ptr<GpuOperation> operation) {
  if (operation->done->in_graph()) {
    in_graphs_ = true;
    return;
  }
  operations_.push_back(std::move(operation));
  if (operations_.size() > kLongQueue) forget_what_is_over();
}

void GpuQueue::forget_what_is_over() {
  while (!operations_.empty() && operations_.front()->done->passed()) {
    if (operations_.front()->sequence > 0) group_.reach(operations_.front()->sequence);
    operations_.pop_front();
    waits_for_peers_ = false;
  }
  if (operations_.empty() || waits_for_peers_ || !operations_.front()->ready->passed()) return;
  waits_for_peers_ = true;
  since_ = Clock::now();
  if (operations_.front()->sequence > 0) group_.reach(operations_.front()->sequence);
}

void GpuQueue::check() {
  check_library();
  forget_what_is_over();
  if (operations_.empty()) return;
  if (operations_.back()->sequence > 0) group_.check(operations_.back()->sequence);
  const double waited = waited_s();
  if (timeout_s() <= 0.0 || waited <= timeout_s()) return;
  const GpuOperation& oldest = *operations_.front();
  group_.context().waiter.give_up(describe(), group_.describe_late(oldest.record, oldest.sequence, waited), waited);
}

std::string GpuQueue::describe() const {
  return operations_.empty() ? "" : group_.describe(operations_.front()->record, operations_.front()->sequence);
}

double GpuQueue::waited_s() const { return waits_for_peers_ ? seconds_since(since_) : -1.0; }

double GpuQueue::timeout_s() const { return group_.timeout_s(); }

// ---------------------------------------------------------------------------------------------------- all streams
class GpuWaiter::Wait final : public MpiWaitable {
 public:
  Wait(GpuWaiter& waiter, const std::function<bool()>& over) : waiter_(waiter), over_(over) {}

  bool test() override {
    try {
      return over_();
    } catch (const Error&) {
      waiter_.waiter_.await_explanation();
      throw;
    }
  }
  void check_peers() override { waiter_.look(); }
  std::string describe() const override { return waiter_.describe(); }
  std::string describe_late(double) const override { return "operations that are part of a graph cannot be watched"; }

 private:
  GpuWaiter& waiter_;
  const std::function<bool()>& over_;
};

void GpuWaiter::add(GpuQueue& queue, Device& device) {
  PDL_CHECK(device_ == nullptr || device_ == &device, "a rank communicates on two devices");
  if (abandoned_) throw Error("a communicator is made where others were given up", ExitCode::communication);
  device_ = &device;
  queues_.push_back(&queue);
  device.set_host_wait(this);
}

void GpuWaiter::remove(GpuQueue& queue) {
  std::erase(queues_, &queue);
  if (!queues_.empty() || device_ == nullptr) return;
  device_->set_host_wait(nullptr);
  device_ = nullptr;
  marks_.clear();
  events_ = {};
  abandoned_ = false;
}

void GpuWaiter::until(const std::function<bool()>& over) {
  if (abandoned_) throw Error("a rank waits for a GPU whose communication it has given up", ExitCode::communication);
  Wait wait(*this, over);
  try {
    if (wait.test()) return;
    waiter_.wait(wait, graph_timeout_s(), kGpuPace);
  } catch (const Error& error) {
    board_.claim_failure(error.code(), error.what());
    abandon();
    throw;
  }
}

void GpuWaiter::look() {
  if (Clock::now() - looked_ < kBetweenLooks) return;
  looked_ = Clock::now();
  for (GpuQueue* queue : queues_) queue->check();
}

void GpuWaiter::abandon() noexcept {
  if (abandoned_ || queues_.empty()) return;
  abandoned_ = true;
  for (GpuQueue* queue : queues_) queue->start_abort();
  const Clock::time_point start = Clock::now();
  for (const GpuQueue* queue : queues_) {
    while (!queue->abort_is_over()) {
      if (Clock::now() - start > kAbortPatience) end_job();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

void GpuWaiter::end_job() const {
  const FirstFailure first = board_.first_failure();
  const bool known = first.rank >= 0;
  std::fprintf(stderr, "error: rank %d: the communication of its GPU cannot be ended%s%s\n", board_.world_rank(),
               known ? "; the cause: " : "", known ? first.message.c_str() : "");
  std::fflush(nullptr);
  const auto code = static_cast<int>(known ? first.code : ExitCode::communication);
  MPI_Abort(MPI_COMM_WORLD, code);
  std::_Exit(code);
}

void GpuWaiter::pace(Stream& stream) {
  marks_.push_back(events_.take(stream));
  stream.record(*marks_.back());
  const bool in_graph = marks_.back()->in_graph();
  if (in_graph) {  // the host records work for later; events must not even be asked then
    events_.give_back(std::move(marks_.back()));
    marks_.pop_back();
    return;
  }
  while (marks_.front()->passed()) {
    events_.give_back(std::move(marks_.front()));
    marks_.pop_front();
    if (marks_.empty()) return;
  }
  if (marks_.size() > kMarksAhead) until([this] { return marks_.front()->passed(); });
}

std::string GpuWaiter::describe() const {
  const GpuQueue* longest = nullptr;
  std::string next;
  for (const GpuQueue* queue : queues_) {
    if (queue->waited_s() >= 0.0 && (longest == nullptr || queue->waited_s() > longest->waited_s())) longest = queue;
    if (next.empty()) next = queue->describe();
  }
  if (longest != nullptr) return longest->describe();
  return next.empty() ? "its own GPU" : "its own GPU, before " + next;
}

double GpuWaiter::graph_timeout_s() const {
  double timeout = 0.0;
  for (const GpuQueue* queue : queues_) {
    if (queue->in_graphs()) timeout = std::max(timeout, queue->timeout_s());
  }
  return timeout;
}

}  // namespace pdl
