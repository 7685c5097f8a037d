// How the host waits for a GPU that waits for other ranks, with events that the test makes happen in place of a GPU:
// peers that do not come, fail or do something else end every wait, in time and with the words that MPI's waits have.

#include "parallel/comm/gpu_wait.h"

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/mpi/ranks.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
void sleep_s(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

const CallRecord kSmall{.call = CommCall::all_reduce, .dtype = DType::fp32, .count = 8};
const CallRecord kLarge{.call = CommCall::all_reduce, .dtype = DType::fp32, .count = 64};

/// How far an operation has come.
struct Course {
  bool begun = false, done = false, in_graph = false;
};

class CourseEvent final : public Event {
 public:
  CourseEvent(std::shared_ptr<Course> course, bool Course::*moment) : course_(std::move(course)), moment_(moment) {}
  bool passed() const override {
    CHECK_FALSE(course_->in_graph);  // must not be asked
    return (*course_).*moment_;
  }
  bool in_graph() const override { return course_->in_graph; }

 private:
  std::shared_ptr<Course> course_;
  bool Course::*moment_;
};

class TestQueue final : public GpuQueue {
 public:
  using GpuQueue::GpuQueue;
  void check_library() override {}
  void start_abort() noexcept override { ++aborts; }
  bool abort_is_over() const noexcept override { return aborts > 0; }
  int aborts = 0;
};

/// A rank with one communicator on what it takes for a GPU, in a world of its own, which a failure spoils.
struct GpuRank {
  explicit GpuRank(double timeout_s)
      : group(dynamic_cast<MpiWorld&>(*ranks.world).make_group(timeout_s)), queue(*group, *ranks.device) {}

  std::shared_ptr<Course> launch(const CallRecord& record, Course course = {}) {
    const bool is_message = record.tag >= 0;
    const auto shared = std::make_shared<Course>(course);
    auto operation = std::make_shared<GpuOperation>(record, is_message ? 0 : group->publish(record, Executor::gpu),
                                                    std::make_shared<EventPool>());
    operation->ready = std::make_unique<CourseEvent>(shared, &Course::begun);
    operation->done = std::make_unique<CourseEvent>(shared, &Course::done);
    queue.add(std::move(operation));
    return shared;
  }
  void wait(const std::function<bool()>& over) { ranks.device->host_wait()->until(over); }
  /// Waits for what never happens; returns the message.
  std::string failure(ExitCode code = ExitCode::communication) {
    try {
      wait([] { return false; });
    } catch (const Error& error) {
      CHECK(error.code() == code);
      CHECK(queue.aborts == 1);
      CHECK_THROWS_AS(wait([] { return true; }), Error);
      return error.what();
    }
    return "no error";
  }

  Ranks ranks;
  std::unique_ptr<MpiGroup> group;
  TestQueue queue;
};

constexpr Course kDone{.begun = true, .done = true};
constexpr Course kBegun{.begun = true};

}  // namespace

TEST_CASE("a wait for the GPU is over when the work is") {
  GpuRank gpu(5.0);
  gpu.launch(kSmall, kDone);
  const auto course = gpu.launch(kLarge, kBegun);
  int asked = 0;
  gpu.wait([&] { return course->done = ++asked > 20; });
  CHECK(asked == 21);
  CHECK(gpu.queue.aborts == 0);
}

TEST_CASE("a rank that does not come to an operation on the GPU is named, with its last operation and phase") {
  const Ranks ranks;
  if (ranks.size < 2) return;
  GpuRank gpu(0.5);
  gpu.launch(kSmall, kDone);
  gpu.ranks.world->announce("step 7, backward");
  ranks.world->barrier();
  if (ranks.rank != 1) {
    gpu.launch(kLarge, kBegun);
    const auto start = Clock::now();
    const std::string message = gpu.failure();
    CHECK(seconds_since(start) < 4.0);
    CHECK_THAT(message, ContainsSubstring(" s in vain for all_reduce of 64 fp32 (operation 2 of axis world): "));
    CHECK_THAT(message, ContainsSubstring("rank 1 has not arrived"));
    if (gpu.ranks.world->first_failure().rank == ranks.rank) {  // else it was stopped by the other one that waited
      CHECK_THAT(message, StartsWith("rank " + std::to_string(ranks.rank) + " waited 0."));
      CHECK_THAT(message, ContainsSubstring("(its last operation is 1, all_reduce of 8 fp32; it announced \"step 7"));
    }
  }
  ranks.world->barrier();
  CHECK(gpu.ranks.world->first_failure().code == ExitCode::communication);
}

TEST_CASE("a rank's own computing has no deadline, and every operation has its own") {
  GpuRank gpu(0.8);
  std::vector<std::shared_ptr<Course>> courses;
  for (int i = 0; i < 4; ++i) courses.push_back(gpu.launch(kSmall));
  const auto start = Clock::now();
  gpu.wait([&] {
    for (std::size_t i = 0; i < courses.size(); ++i) {
      courses[i]->begun = seconds_since(start) > 1.2;  // all at once, in the end of their own GPU's work
      courses[i]->done = seconds_since(start) > 1.6 + 0.5 * static_cast<double>(i);
    }
    return courses.back()->done;
  });
  CHECK(seconds_since(start) > 3.0);
  CHECK(gpu.queue.aborts == 0);
}

TEST_CASE("a rank whose GPU has not come to an operation is named, with what it waits for") {
  const Ranks ranks;
  if (ranks.size < 2) return;
  GpuRank gpu(0.8);
  ranks.world->barrier();
  gpu.launch(kLarge, ranks.rank == 1 ? Course{} : kBegun);
  const std::string message = gpu.failure();
  CHECK_THAT(message, ContainsSubstring("in vain for all_reduce of 64 fp32 (operation 1 of axis world): rank 1 has "
                                        "queued it, but its GPU has not been seen in it"));
  if (gpu.ranks.world->first_failure().rank == ranks.rank) {
    CHECK(ranks.rank != 1);
    CHECK_THAT(message, ContainsSubstring("it waits for its own GPU, before all_reduce of 64 fp32 (operation 1 of"));
  }
  ranks.world->barrier();
}

TEST_CASE("a message that does not come to the GPU names the peer") {
  const Ranks ranks;
  if (ranks.size < 2) return;
  GpuRank gpu(0.3);
  if (ranks.rank == 0) {
    gpu.launch({.call = CommCall::recv, .dtype = DType::fp32, .root = 1, .count = 64, .tag = 3}, kBegun);
    CHECK_THAT(
        gpu.failure(),
        ContainsSubstring("in vain for recv of 64 fp32 from rank 1 (tag 3, axis world): rank 1 has not sent it"));
  }
  ranks.world->barrier();
}

TEST_CASE("calls that differ are found while the host waits for the GPU") {
  const Ranks ranks;
  if (ranks.size < 2) return;
  GpuRank gpu(5.0);
  const bool is_odd = ranks.rank + 1 == ranks.size;
  if (!is_odd) gpu.launch(kLarge, kBegun);
  ranks.world->barrier();
  const auto names_one = ContainsSubstring("called all_reduce of 64 fp32"),
             other = ContainsSubstring("called broadcast");
  if (is_odd) {
    const CallRecord broadcast{.call = CommCall::broadcast, .dtype = DType::fp32, .root = 0, .count = 64};
    CHECK_THROWS_WITH(gpu.launch(broadcast), names_one && other);
  }
  ranks.world->barrier();
  if (!is_odd) CHECK_THAT(gpu.failure(), names_one && other);
  ranks.world->barrier();
}

TEST_CASE("a rank that fails ends its peers' waits for their GPUs, also when these notice something else first") {
  const Ranks ranks;
  if (ranks.size < 2) return;
  for (const bool breaks : {false, true}) {
    GpuRank gpu(10.0);
    gpu.launch(kLarge, kBegun);
    ranks.world->barrier();
    if (ranks.rank == 1) {
      sleep_s(0.3);
      CHECK(gpu.ranks.world->claim_first_failure(ExitCode::out_of_memory, "no room for activations"));
    } else if (breaks) {
      const auto broken = []() -> bool { throw Error("CUDA: an illegal address was accessed"); };
      CHECK_THROWS_WITH(gpu.wait(broken), "stopped by rank 1: no room for activations");
      CHECK(gpu.queue.aborts == 1);
    } else {
      CHECK(gpu.failure(ExitCode::out_of_memory) == "stopped by rank 1: no room for activations");
    }
    ranks.world->barrier();
    CHECK(gpu.ranks.world->first_failure().rank == 1);
  }
}

TEST_CASE("what breaks by itself is this rank's failure, claimed before it ends its communication") {
  const Ranks ranks;
  GpuRank gpu(10.0);
  gpu.launch(kSmall, kBegun);
  if (ranks.rank == 0) {
    const auto broken = []() -> bool { throw Error("CUDA: an illegal address was accessed"); };
    CHECK_THROWS_WITH(gpu.wait(broken), StartsWith("CUDA: an illegal address was accessed"));
    CHECK(gpu.queue.aborts == 1);
    CHECK(gpu.ranks.world->claim_first_failure(ExitCode::internal, "the same, when it is caught"));
    CHECK_THAT(gpu.ranks.world->first_failure().message, StartsWith("CUDA: an illegal address"));
  }
  ranks.world->barrier();
}

TEST_CASE("operations in a graph cannot be told apart, so the whole wait has the deadline") {
  const Ranks ranks;
  GpuRank gpu(0.3);
  gpu.launch(kSmall, {.in_graph = true});
  const std::string message = gpu.failure();
  CHECK_THAT(message, ContainsSubstring("s in vain for its own GPU: operations that are part of a graph"));
  ranks.world->barrier();
}

TEST_CASE("communication that was given up is gone, and new communication can be made when all of it is gone") {
  const Ranks ranks;
  for (int round = 0; round < 2; ++round) {
    GpuRank gpu(5.0);
    auto other = std::make_unique<TestQueue>(*gpu.group, *gpu.ranks.device);
    HostWait* const wait = gpu.ranks.device->host_wait();
    REQUIRE(wait != nullptr);
    wait->abandon();
    wait->abandon();
    CHECK(gpu.queue.aborts == 1);
    CHECK(other->aborts == 1);
    CHECK_THROWS_AS(TestQueue(*gpu.group, *gpu.ranks.device), Error);
    other.reset();
    CHECK(gpu.ranks.device->host_wait() == wait);
    ranks.world->barrier();
  }
  const auto device = make_device({.kind = "cpu"});
  const auto group = dynamic_cast<MpiWorld&>(*ranks.world).make_group(5.0);
  for (int round = 0; round < 2; ++round) {
    {
      TestQueue queue(*group, *device);
      device->host_wait()->abandon();
      CHECK(queue.aborts == 1);
    }
    CHECK(device->host_wait() == nullptr);
  }
}

namespace {

/// A stream whose GPU does one thing for every `kLag` questions.
class SlowStream final : public Stream {
 public:
  static constexpr int kLag = 30;

  struct Mark final : Event {
    explicit Mark(SlowStream& of) : stream(of) {}
    bool passed() const override {
      CHECK_FALSE(is_in_graph);
      if (++stream.asked % kLag == 0 && stream.finished < stream.recorded) ++stream.finished;
      return place <= stream.finished;
    }
    bool in_graph() const override { return is_in_graph; }
    SlowStream& stream;
    int place = 0;
    bool is_in_graph = false;
  };
  std::unique_ptr<Event> make_event() override { return std::make_unique<Mark>(*this); }
  void record(Event& event) override {
    auto& mark = dynamic_cast<Mark&>(event);
    mark.place = ++recorded;
    mark.is_in_graph = captures;
  }
  void wait(const Event&) override {}
  void synchronize() override {}

  int recorded = 0, finished = 0, asked = 0;
  bool captures = false;
};

}  // namespace

TEST_CASE("the host does not run far ahead of the GPU") {
  const Ranks ranks;
  GpuRank gpu(5.0);
  GpuWaiter& waiter = gpu.group->context().gpu;
  SlowStream stream;
  int furthest = 0;
  for (int i = 0; i < 60; ++i) {
    waiter.pace(stream);
    furthest = std::max(furthest, stream.recorded - stream.finished);
  }
  CHECK(furthest > 4);
  CHECK(furthest < 12);
  stream.captures = true;  // then nothing may be asked
  const int asked = stream.asked;
  for (int i = 0; i < 60; ++i) waiter.pace(stream);
  CHECK(stream.asked == asked);
  ranks.world->barrier();
}
