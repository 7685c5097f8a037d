#include "parallel/comm/counting_communicator.h"

#include <chrono>
#include <thread>
#include <vector>

#include "engine/device/device.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// A group in which nothing is sent and every operation takes as long as the test says.
class PretendedGroup final : public Communicator {
 public:
  PretendedGroup(int rank, int size, std::string axis, bool& complete)
      : rank_(rank), size_(size), axis_(std::move(axis)), complete_(complete) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string transport() const override { return "pretended"; }
  std::string axis() const override { return axis_; }
  Work all_reduce(Tensor, ReduceOp, Stream&) override { return work(); }
  Work all_gather(Tensor, Tensor, Stream&) override { return work(); }
  Work reduce_scatter(Tensor, Tensor, ReduceOp, Stream&) override { return work(); }
  Work reduce(Tensor, Tensor, ReduceOp, int, Stream&) override { return work(); }
  Work broadcast(Tensor, int, Stream&) override { return work(); }
  Work all_to_all(Tensor, const std::vector<std::int64_t>&, Tensor, const std::vector<std::int64_t>&,
                  Stream&) override {
    return work();
  }
  Work send(Tensor, int, int, Stream&) override { return work(); }
  Work recv(Tensor, int, int, Stream&) override { throw Error("no message comes"); }
  void progress() override {}
  std::unique_ptr<Communicator> split(int, int, std::string axis) override {
    return std::make_unique<PretendedGroup>(0, 2, std::move(axis), complete_);
  }

 private:
  class State final : public Work::State {
   public:
    explicit State(bool& complete) : complete_(complete) {}
    void wait(Stream&) override {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      complete_ = true;
    }
    bool done() override { return complete_; }

   private:
    bool& complete_;
  };
  Work work() { return Work(std::make_unique<State>(complete_)); }

  int rank_, size_;
  std::string axis_;
  bool& complete_;
};

struct Fixture {
  std::unique_ptr<Device> device = make_device({.kind = "cpu"});
  Stream& stream = device->compute_stream();
  std::vector<float> memory = std::vector<float>(64);
  CommLedger ledger;
  bool complete = false;
  std::unique_ptr<Communicator> group(int rank, int size) {
    return make_counting_communicator(std::make_unique<PretendedGroup>(rank, size, "dp", complete), ledger);
  }
  Tensor floats(std::int64_t count) { return Tensor(memory.data(), DType::fp32, Shape{count}); }
};

}  // namespace

TEST_CASE("ring bytes are exact and rounded once") {
  CHECK(ring_bytes("all_reduce", 1, 1000) == 0);
  CHECK(ring_bytes("all_reduce", 2, 1000) == 1000);
  CHECK(ring_bytes("all_reduce", 3, 1000) == 1333);  // 1333 1/3
  CHECK(ring_bytes("all_reduce", 3, 1001) == 1335);  // 1334 2/3
  CHECK(ring_bytes("all_reduce", 4, 1001) == 1502);  // 1501 1/2, halves up
  CHECK(ring_bytes("all_gather", 4, 1000) == 750);
  CHECK(ring_bytes("reduce_scatter", 4, 1000) == 750);
  CHECK(ring_bytes("broadcast", 4, 1000) == 750);
  CHECK(ring_bytes("reduce", 8, 1 << 20) == 917504);
  CHECK(ring_bytes("all_to_all", 5, 1000) == 800);
  CHECK(ring_bytes("send", 4, 1000) == 1000);
  CHECK(ring_bytes("recv", 4, 1000) == 0);
  // Larger than what a double holds exactly.
  CHECK(ring_bytes("all_reduce", 64, (1ll << 55) + 64) == 2 * 63 * ((1ll << 49) + 1));
  CHECK_THROWS_AS(ring_bytes("allreduce", 4, 1000), Error);
}

TEST_CASE("every operation is counted under its axis, with the bytes that this rank sends") {
  Fixture f;
  const auto group = f.group(1, 4);
  group->all_reduce(f.floats(10), ReduceOp::sum, f.stream).wait(f.stream);
  group->all_reduce(f.floats(6), ReduceOp::sum, f.stream).wait(f.stream);
  group->all_gather(f.floats(16), f.floats(4), f.stream).wait(f.stream);
  group->reduce_scatter(f.floats(2), f.floats(8), ReduceOp::sum, f.stream).wait(f.stream);
  group->reduce(f.floats(8), f.floats(8), ReduceOp::sum, 0, f.stream).wait(f.stream);
  group->broadcast(f.floats(4), 0, f.stream).wait(f.stream);
  group->all_to_all(f.floats(10), {1, 2, 3, 4}, f.floats(12), {3, 2, 3, 4}, f.stream).wait(f.stream);
  group->send(f.floats(7), 2, 0, f.stream).wait(f.stream);
  CHECK_THROWS_AS(group->recv(f.floats(7), 2, 0, f.stream), Error);
  CommCounts counts = f.ledger.take();
  CHECK(counts.size() == 7);  // a call that was refused does not count
  CHECK(counts["dp.all_reduce"].calls == 2);
  CHECK(counts["dp.all_reduce"].bytes == 60 + 36);
  CHECK(counts["dp.all_gather"].bytes == 48);
  CHECK(counts["dp.reduce_scatter"].bytes == 24);
  CHECK(counts["dp.reduce"].bytes == 24);
  CHECK(counts["dp.broadcast"].bytes == 12);
  CHECK(counts["dp.all_to_all"].bytes == 40);
  CHECK(counts["dp.send"].bytes == 28);
  CHECK(f.ledger.take().empty());
}

TEST_CASE("busy runs to the completion that somebody saw, exposed is the time in wait") {
  Fixture f;
  const auto group = f.group(0, 2);
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(30)); };

  Work waited = group->all_reduce(f.floats(4), ReduceOp::sum, f.stream);
  pause();
  waited.wait(f.stream);
  CommCount count = f.ledger.take().at("dp.all_reduce");
  CHECK(count.exposed_s > 0.018);
  CHECK(count.exposed_s < count.busy_s - 0.025);

  f.complete = false;
  Work overlapped = group->all_reduce(f.floats(4), ReduceOp::sum, f.stream);
  f.complete = true;
  group->progress();  // sees the end: what comes later is not communication
  const double busy_s = f.ledger.at("dp.all_reduce").busy_s;
  CHECK(busy_s > 0.0);
  pause();
  CHECK(overlapped.done());
  CHECK(f.ledger.at("dp.all_reduce").busy_s == busy_s);
  overlapped.wait(f.stream);
  CHECK(f.ledger.at("dp.all_reduce").busy_s == busy_s);
  CHECK(f.ledger.exposed_s() == f.ledger.at("dp.all_reduce").exposed_s);
}

TEST_CASE("operations in flight may outlive the communicator, and their times go to the interval in which they end") {
  Fixture f;
  auto group = f.group(0, 2);
  Work first = group->send(f.floats(4), 1, 0, f.stream);
  { Work dropped = group->send(f.floats(4), 1, 1, f.stream); }
  group->progress();
  CHECK(f.ledger.take().at("dp.send").calls == 2);
  group.reset();
  first.wait(f.stream);
  const CommCount later = f.ledger.take().at("dp.send");
  CHECK(later.calls == 0);
  CHECK(later.busy_s > 0.0);
}

TEST_CASE("split groups share the ledger under their own axis") {
  Fixture f;
  const auto group = f.group(0, 4);
  CHECK(group->transport() == "pretended");
  const auto part = group->split(0, 0, "tp");
  part->all_reduce(f.floats(8), ReduceOp::sum, f.stream).wait(f.stream);
  CHECK(f.ledger.take().at("tp.all_reduce").bytes == 32);
}
