#include "parallel/comm/counting_communicator.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

namespace pdl {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// numerator / denominator, both not negative, rounded to the nearest integer, halves up.
std::int64_t rounded(std::int64_t numerator, std::int64_t denominator) {
  return (numerator + denominator / 2) / denominator;
}

/// Operations in flight; they look at their own completion when the communicator is told to progress.
class Observed {
 public:
  virtual ~Observed() = default;
  virtual void observe() = 0;
};
using InFlight = std::vector<Observed*>;

/// One operation in flight and the clock on it.
class CountedWork final : public Work::State, public Observed {
 public:
  CountedWork(Work inner, CommLedger& ledger, std::string key, Clock::time_point issued,
              std::shared_ptr<InFlight> in_flight)
      : inner_(std::move(inner)),
        ledger_(ledger),
        key_(std::move(key)),
        issued_(issued),
        in_flight_(std::move(in_flight)) {
    in_flight_->push_back(this);
  }
  ~CountedWork() override { leave(); }

  void wait(Stream& stream) override {
    const Clock::time_point begin = Clock::now();
    inner_.wait(stream);
    ledger_.at(key_).exposed_s += seconds_since(begin);
    complete();
  }
  bool done() override {
    observe();
    return completed_;
  }
  void observe() override {
    if (!completed_ && inner_.done()) complete();
  }

 private:
  void complete() {
    if (completed_) return;
    completed_ = true;
    ledger_.at(key_).busy_s += seconds_since(issued_);
    leave();
  }
  void leave() { std::erase(*in_flight_, this); }

  Work inner_;
  CommLedger& ledger_;
  std::string key_;
  Clock::time_point issued_;
  std::shared_ptr<InFlight> in_flight_;  ///< shared, because a Work may outlive its communicator
  bool completed_ = false;
};

class CountingCommunicator final : public Communicator {
 public:
  CountingCommunicator(std::unique_ptr<Communicator> inner, CommLedger& ledger)
      : inner_(std::move(inner)),
        ledger_(ledger),
        prefix_(inner_->axis() + "."),
        in_flight_(std::make_shared<InFlight>()) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string transport() const override { return inner_->transport(); }
  std::string axis() const override { return inner_->axis(); }

  Work all_reduce(Tensor inout, ReduceOp op, Stream& stream) override {
    return counted("all_reduce", ring("all_reduce", inout), [&] { return inner_->all_reduce(inout, op, stream); });
  }
  Work all_gather(Tensor out, Tensor in, Stream& stream) override {
    return counted("all_gather", ring("all_gather", out), [&] { return inner_->all_gather(out, in, stream); });
  }
  Work reduce_scatter(Tensor out, Tensor in, ReduceOp op, Stream& stream) override {
    return counted("reduce_scatter", ring("reduce_scatter", in),
                   [&] { return inner_->reduce_scatter(out, in, op, stream); });
  }
  Work reduce(Tensor out, Tensor in, ReduceOp op, int root, Stream& stream) override {
    return counted("reduce", ring("reduce", in), [&] { return inner_->reduce(out, in, op, root, stream); });
  }
  Work broadcast(Tensor inout, int root, Stream& stream) override {
    return counted("broadcast", ring("broadcast", inout), [&] { return inner_->broadcast(inout, root, stream); });
  }
  Work all_to_all(Tensor out, const std::vector<std::int64_t>& out_counts, Tensor in,
                  const std::vector<std::int64_t>& in_counts, Stream& stream) override {
    const auto own = static_cast<std::size_t>(rank());
    const std::int64_t kept = own < in_counts.size() ? in_counts[own] : 0;
    return counted("all_to_all", in.bytes() - kept * size_of(in.dtype()),
                   [&] { return inner_->all_to_all(out, out_counts, in, in_counts, stream); });
  }
  Work send(Tensor in, int peer, int tag, Stream& stream) override {
    return counted("send", in.bytes(), [&] { return inner_->send(in, peer, tag, stream); });
  }
  Work recv(Tensor out, int peer, int tag, Stream& stream) override {
    return counted("recv", 0, [&] { return inner_->recv(out, peer, tag, stream); });
  }

  void progress() override {
    inner_->progress();
    // An operation that turns out to be complete leaves the list.
    for (Observed* operation : InFlight(*in_flight_)) operation->observe();
  }
  std::unique_ptr<Communicator> split(int color, int key, std::string axis) override {
    return make_counting_communicator(inner_->split(color, key, std::move(axis)), ledger_);
  }

 private:
  std::int64_t ring(const char* operation, const Tensor& whole) const {
    return ring_bytes(operation, inner_->size(), whole.bytes());
  }

  /// Counts a call once it was accepted; its time starts before the call, since a transport may do all of the work in
  /// there.
  template <typename Issue>
  Work counted(const char* operation, std::int64_t bytes, Issue issue) {
    const Clock::time_point begin = Clock::now();
    Work inner = issue();
    std::string key = prefix_ + operation;
    CommCount& count = ledger_.at(key);
    ++count.calls;
    count.bytes += bytes;
    if (!inner.pending()) {
      count.busy_s += seconds_since(begin);
      return {};
    }
    return Work(std::make_unique<CountedWork>(std::move(inner), ledger_, std::move(key), begin, in_flight_));
  }

  std::unique_ptr<Communicator> inner_;
  CommLedger& ledger_;
  std::string prefix_;
  std::shared_ptr<InFlight> in_flight_;
};

}  // namespace

CommCounts CommLedger::take() { return std::exchange(counts_, {}); }

double CommLedger::exposed_s() const {
  double sum = 0.0;
  for (const auto& [key, count] : counts_) sum += count.exposed_s;
  return sum;
}

std::unique_ptr<Communicator> make_counting_communicator(std::unique_ptr<Communicator> inner, CommLedger& ledger) {
  return std::make_unique<CountingCommunicator>(std::move(inner), ledger);
}

std::int64_t ring_bytes(const std::string& operation, int size, std::int64_t bytes) {
  PDL_CHECK(size > 0 && bytes >= 0, operation, " of ", bytes, " bytes over ", size, " ranks");
  if (operation == "all_reduce") return rounded(2 * (size - 1) * bytes, size);
  if (operation == "all_gather" || operation == "reduce_scatter" || operation == "broadcast" || operation == "reduce" ||
      operation == "all_to_all") {
    return rounded((size - 1) * bytes, size);
  }
  if (operation == "send") return bytes;
  if (operation == "recv") return 0;
  throw Error(str("no collective is called \"", operation, "\""));
}

}  // namespace pdl
