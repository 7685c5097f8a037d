// What communication costs on a device that lags behind the host, told by streams with clocks that the test moves.

#include "parallel/comm/comm_ledger.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/record/recorder.h"
#include "parallel/comm/counting_communicator.h"
#include "tests/support/catch.h"
#include "tests/support/virtual_device.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

enum class Carrier { own_stream, host };

/// Every operation takes two seconds. In a stream of its own it starts when what it was queued after is done; through
/// the host the caller's stream stands still for a quarter of a second at the issue and for half a second at the wait.
class TimedGroup final : public Communicator {
 public:
  explicit TimedGroup(Carrier carrier, std::string axis = "dp") : carrier_(carrier), axis_(std::move(axis)) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::string transport() const override { return "timed"; }
  std::string axis() const override { return axis_; }
  Stream* own_stream() override { return carrier_ == Carrier::own_stream ? &own : nullptr; }

  Work all_reduce(Tensor, ReduceOp, Stream& stream) override { return work(stream, own); }
  Work all_gather(Tensor, Tensor, Stream& stream) override { return work(stream, own); }
  Work reduce_scatter(Tensor, Tensor, ReduceOp, Stream& stream) override { return work(stream, own); }
  Work reduce(Tensor, Tensor, ReduceOp, int, Stream& stream) override { return work(stream, own); }
  Work broadcast(Tensor, int, Stream& stream) override { return work(stream, own); }
  Work all_to_all(Tensor, const std::vector<std::int64_t>&, Tensor, const std::vector<std::int64_t>&,
                  Stream& stream) override {
    return work(stream, own);
  }
  Work send(Tensor, int, int, Stream& stream) override { return work(stream, channel); }
  Work recv(Tensor, int, int, Stream& stream) override { return work(stream, channel); }
  void progress() override {}
  std::unique_ptr<Communicator> split(int, int, std::string) override { throw Error("not in this test"); }

  VirtualStream own, channel;

 private:
  class State final : public Work::State {
   public:
    State(Carrier carrier, double end_s) : carrier_(carrier) { done_.at_s = end_s; }
    void wait(Stream& stream) override {
      stream.wait(done_);
      if (carrier_ == Carrier::host) static_cast<VirtualStream&>(stream).now_s += 0.5;
    }
    bool done() override { return false; }

   private:
    Carrier carrier_;
    VirtualEvent done_;
  };
  Work work(Stream& caller, VirtualStream& carrier) {
    auto& stream = static_cast<VirtualStream&>(caller);
    if (carrier_ == Carrier::host) {
      stream.now_s += 0.25;
      return Work(std::make_unique<State>(carrier_, 0.0));
    }
    VirtualEvent ready;
    stream.record(ready);
    carrier.wait(ready);
    carrier.now_s += 2.0;
    return Work(std::make_unique<State>(carrier_, carrier.now_s));
  }

  Carrier carrier_;
  std::string axis_;
};

struct Fixture {
  explicit Fixture(Carrier carrier = Carrier::own_stream, const std::string& axis = "dp") {
    ledger.measure_on(device);
    auto timed = std::make_unique<TimedGroup>(carrier, axis);
    own = &timed->own;
    group = make_counting_communicator(std::move(timed), ledger);
  }
  Work all_reduce() { return group->all_reduce(values, ReduceOp::sum, compute); }
  void compute_for(double seconds) { compute.now_s += seconds; }

  VirtualDevice device;
  VirtualStream& compute = device.compute_stream();
  std::vector<float> memory = std::vector<float>(8);
  Tensor values = Tensor(memory.data(), DType::fp32, Shape{8});
  CommLedger ledger;
  VirtualStream* own = nullptr;
  std::unique_ptr<Communicator> group;
};

}  // namespace

TEST_CASE("exposed is how long the compute stream stands still, busy how long the operation ran") {
  Fixture f;
  f.compute_for(1.0);
  Work first = f.all_reduce();  // 1 to 3
  f.compute_for(0.5);
  Work second = f.all_reduce();  // 3 to 5: its stream is occupied until 3
  f.compute_for(1.0);
  first.wait(f.compute);  // 2.5 to 3
  f.compute_for(4.0);
  second.wait(f.compute);  // is long over
  CHECK(f.compute.now_s == 7.0);
  const CommCount count = f.ledger.take().at("dp.all_reduce");
  CHECK(count.calls == 2);
  CHECK(count.busy_s == 4.0);
  CHECK(count.exposed_s == 0.5);
  CHECK(f.ledger.take().empty());
}

TEST_CASE("an operation that waits for its data is not busy") {
  Fixture f;
  Work early = f.all_reduce();  // 0 to 2
  f.compute_for(10.0);
  Work late = f.all_reduce();  // 10 to 12, though its stream is free from 2 on
  early.wait(f.compute);
  late.wait(f.compute);
  CHECK(f.ledger.take().at("dp.all_reduce").busy_s == 4.0);
}

TEST_CASE("exposed time belongs to the step in which the wait was queued") {
  Fixture f;
  for (int step = 0; step < 3; ++step) {
    Work sum = f.all_reduce();
    f.compute_for(0.5 * step);
    sum.wait(f.compute);
    f.group->broadcast(f.values, 0, f.compute).wait(f.compute);
    f.ledger.step_end({});
  }
  f.all_reduce().wait(f.compute);  // of no step
  CHECK(f.ledger.take_steps() == std::vector<double>{4.0, 3.5, 3.0});
  CHECK(f.ledger.exposed_s() == 12.5);
  f.all_reduce().wait(f.compute);
  f.ledger.step_end({});
  CHECK(f.ledger.take_steps() == std::vector<double>{2.0});

  f.all_reduce().wait(f.compute);
  f.ledger.step_done(0);
  f.all_reduce().wait(f.compute);
  f.all_reduce().wait(f.compute);
  f.ledger.step_done(1);
  f.ledger.step_end({});  // reports that come late end nothing
  f.ledger.step_end({});
  CHECK(f.ledger.take_steps() == std::vector<double>{2.0, 4.0});
}

TEST_CASE("neither host nor device waits for the measurement") {
  Fixture f;
  constexpr int kWaits = 5000;  // more than a stopwatch remembers
  for (int i = 0; i < kWaits; ++i) {
    Work sum = f.all_reduce();
    if (i == 500) CHECK(f.device.reads->count == 0);
    f.compute_for(1.0);
    sum.wait(f.compute);
  }
  CHECK(f.device.reads->count > 0);
  CHECK(f.device.reads->fewest_marks_behind > 1000);
  const CommCount count = f.ledger.take().at("dp.all_reduce");
  CHECK(count.exposed_s == kWaits * 1.0);
  CHECK(count.busy_s == kWaits * 2.0);
  CHECK(f.device.reads->count == 2 * kWaits);
  CHECK(f.compute.synchronized + f.own->synchronized == 0);
}

TEST_CASE("waits of another stream than the compute stream expose nothing") {
  Fixture f;
  VirtualStream other;
  f.all_reduce().wait(other);
  const CommCount count = f.ledger.take().at("dp.all_reduce");
  CHECK(count.exposed_s == 0.0);
  CHECK(count.busy_s == 2.0);
}

TEST_CASE("of messages the exposed part stands for the whole") {
  Fixture f;
  Work message = f.group->send(f.values, 1, 0, f.compute);
  f.compute_for(1.5);
  message.wait(f.compute);
  const CommCount count = f.ledger.take().at("dp.send");
  CHECK(count.exposed_s == 0.5);
  CHECK(count.busy_s == 0.5);
}

TEST_CASE("through the host a device stands still at the issue too") {
  Fixture f(Carrier::host);
  Work sum = f.all_reduce();
  f.compute_for(3.0);
  sum.wait(f.compute);
  const CommCount count = f.ledger.take().at("dp.all_reduce");
  CHECK(count.exposed_s == 0.75);
  CHECK(count.busy_s >= 0.0);  // the host's clock, which does not move much here
  CHECK(count.busy_s < 10.0);
}

TEST_CASE("a clock that is told of waits knows what the compute stream stood still for") {
  for (const std::string axis : {"pp", "dp"}) {
    Fixture f(Carrier::own_stream, axis);
    PhaseClock clock(0, f.device.make_stopwatch());
    f.ledger.tell_waits_to(&clock);
    clock.epoch_begin();
    clock.step_begin();
    clock.schedule_part(SchedulePart::steady);
    clock.phase(Phase::forward);
    Work message = f.group->recv(f.values, 1, 0, f.compute);  // 0 to 2
    f.compute_for(0.5);
    message.wait(f.compute);
    VirtualStream other;
    f.all_reduce().wait(other);  // 2 to 4, and no wait of the compute stream
    clock.task_begin({TaskKind::forward, 0});
    f.compute_for(1.0);
    f.all_reduce().wait(f.compute);  // 4 to 6, from 3 on: its stream is occupied until 4
    clock.task_end();
    clock.step_end({});
    const PipelineRankRecord mine = clock.epoch_end().pipeline.value();
    CHECK(mine.other_s == 0.5);
    CHECK(mine.wait_s[1] == (axis == "pp" ? 1.5 : 0.0));
    CHECK(mine.comm_s == (axis == "pp" ? 0.0 : 1.5));
    CHECK(mine.forward_s == 1.0);
    CHECK(mine.comm_passes_s == 3.0);
    CHECK(mine.train_s == 6.0);
    f.ledger.tell_waits_to(nullptr);
  }
}

TEST_CASE("waits and operations go into the trace while it records") {
  Fixture f;
  f.all_reduce().wait(f.compute);  // before it
  Trace trace;
  f.ledger.trace_to(&trace);
  f.ledger.anchor();
  trace.record(true);
  Work sum = f.all_reduce();  // 2 to 4
  f.compute_for(1.0);
  sum.wait(f.compute);  // 3 to 4
  trace.record(false);
  f.all_reduce().wait(f.compute);  // behind it
  f.ledger.take();
  const auto json = nlohmann::json::parse(trace_file({trace.events(3, "rank", 1000.0)}));
  std::vector<nlohmann::json> waits, operations;
  for (const auto& event : json["traceEvents"]) {
    if (event["ph"] == "X") waits.push_back(event);
    if (event["ph"] == "b" || event["ph"] == "e") operations.push_back(event);
  }
  REQUIRE(waits.size() == 1);
  CHECK(waits[0]["name"] == "dp.all_reduce");
  CHECK(waits[0]["ts"] == 3e6);
  CHECK(waits[0]["dur"] == 1e6);
  CHECK(waits[0]["pid"] == 3);
  REQUIRE(operations.size() == 2);
  CHECK(operations[0]["ts"] == 2e6);
  CHECK(operations[0]["args"]["bytes"] == 32);
  CHECK(operations[1]["ts"] == 4e6);
  CHECK(operations[0]["id"] == operations[1]["id"]);
}

TEST_CASE("a communicator that is first used within the trace is drawn, too") {
  Fixture f;
  Trace trace;
  f.ledger.trace_to(&trace);
  f.ledger.anchor();
  trace.record(true);
  f.all_reduce().wait(f.compute);
  CHECK_NOTHROW(f.ledger.take());
}
