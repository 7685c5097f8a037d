#include "parallel/comm/counting_communicator.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

namespace pdl {
namespace {

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

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

/// Who knows how long an operation runs.
enum class Busy {
  host,         ///< the host's clock, from issue to completion
  own_stream,   ///< marks in the communicator's own stream, which are made at issue
  at_the_wait,  ///< nobody: the part that somebody waits for stands in
};

/// One operation in flight and the clock on it.
class CountedWork final : public Work::State, public Observed {
 public:
  struct Issue {
    std::string key;
    std::int64_t bytes = 0;
    double at_s = 0.0;
    bool traced = false;
    Busy busy = Busy::host;
  };
  CountedWork(Work inner, CommLedger& ledger, Issue issue, std::shared_ptr<InFlight> in_flight)
      : inner_(std::move(inner)), ledger_(ledger), issue_(std::move(issue)), in_flight_(std::move(in_flight)) {
    in_flight_->push_back(this);
  }
  ~CountedWork() override { leave(); }

  void wait(Stream& stream) override {
    const CommLedger::Wait wait = ledger_.begin_wait(stream);
    inner_.wait(stream);
    ledger_.end_wait(issue_.key, wait, issue_.busy == Busy::at_the_wait);
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
    if (issue_.busy == Busy::host) {
      ledger_.ran(issue_.key, issue_.at_s, steady_seconds(), issue_.bytes, issue_.traced);
    }
    leave();
  }
  void leave() { std::erase(*in_flight_, this); }

  Work inner_;
  CommLedger& ledger_;
  Issue issue_;
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

  Stream* own_stream() override { return inner_->own_stream(); }
  std::string library() const override { return inner_->library(); }

  Work all_reduce(Tensor inout, ReduceOp op, Stream& stream) override {
    return counted("all_reduce", ring("all_reduce", inout), stream,
                   [&] { return inner_->all_reduce(inout, op, stream); });
  }
  Work all_gather(Tensor out, Tensor in, Stream& stream) override {
    return counted("all_gather", ring("all_gather", out), stream, [&] { return inner_->all_gather(out, in, stream); });
  }
  Work reduce_scatter(Tensor out, Tensor in, ReduceOp op, Stream& stream) override {
    return counted("reduce_scatter", ring("reduce_scatter", in), stream,
                   [&] { return inner_->reduce_scatter(out, in, op, stream); });
  }
  Work reduce(Tensor out, Tensor in, ReduceOp op, int root, Stream& stream) override {
    return counted("reduce", ring("reduce", in), stream, [&] { return inner_->reduce(out, in, op, root, stream); });
  }
  Work broadcast(Tensor inout, int root, Stream& stream) override {
    return counted("broadcast", ring("broadcast", inout), stream,
                   [&] { return inner_->broadcast(inout, root, stream); });
  }
  Work all_to_all(Tensor out, const std::vector<std::int64_t>& out_counts, Tensor in,
                  const std::vector<std::int64_t>& in_counts, Stream& stream) override {
    const auto own = static_cast<std::size_t>(rank());
    const std::int64_t kept = own < in_counts.size() ? in_counts[own] : 0;
    return counted("all_to_all", in.bytes() - kept * size_of(in.dtype()), stream,
                   [&] { return inner_->all_to_all(out, out_counts, in, in_counts, stream); });
  }
  Work send(Tensor in, int peer, int tag, Stream& stream) override {
    return message("send", in.bytes(), stream, [&] { return inner_->send(in, peer, tag, stream); });
  }
  Work recv(Tensor out, int peer, int tag, Stream& stream) override {
    return message("recv", 0, stream, [&] { return inner_->recv(out, peer, tag, stream); });
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

  /// A collective. In a stream of the communicator's own it is measured there, from the moment when what it was queued
  /// after is done.
  template <typename Call>
  Work counted(const char* operation, std::int64_t bytes, Stream& stream, Call call) {
    Stream* const own = ledger_.in_streams() ? inner_->own_stream() : nullptr;
    if (own == nullptr) return through_host(operation, bytes, stream, call);
    if (!watch_) {
      watch_ = ledger_.watch(*own);
      ready_ = stream.make_event();
    }
    stream.record(*ready_);
    own->wait(*ready_);
    const std::int64_t from = watch_->mark();
    Work inner = call();
    std::string key = count(operation, bytes);
    ledger_.ran_in_stream(key, watch_, from, watch_->mark(), bytes);
    return in_flight({std::move(key), bytes, 0.0, false, Busy::own_stream}, std::move(inner));
  }

  /// Messages of a communicator with streams run in others than its collectives.
  template <typename Call>
  Work message(const char* operation, std::int64_t bytes, Stream& stream, Call call) {
    const bool in_a_stream = ledger_.in_streams() && inner_->own_stream() != nullptr;
    if (!in_a_stream) return through_host(operation, bytes, stream, call);
    Work inner = call();
    return in_flight({count(operation, bytes), bytes, 0.0, false, Busy::at_the_wait}, std::move(inner));
  }

  /// The time starts before the call, since a transport may do all of the work in there.
  template <typename Call>
  Work through_host(const char* operation, std::int64_t bytes, Stream& stream, Call call) {
    const CommLedger::Wait wait = ledger_.begin_wait(stream);
    const double begin_s = steady_seconds();
    Work inner = call();
    std::string key = count(operation, bytes);
    if (!inner.pending()) {
      ledger_.ran(key, begin_s, steady_seconds(), bytes, wait.traced);
      return {};
    }
    // A device stands still while the host fetches what it is to send.
    if (ledger_.in_streams()) ledger_.end_wait(key, wait);
    return in_flight({std::move(key), bytes, begin_s, wait.traced, Busy::host}, std::move(inner));
  }

  /// Counts a call, once it was accepted; returns its key.
  std::string count(const char* operation, std::int64_t bytes) {
    std::string key = prefix_ + operation;
    CommCount& count = ledger_.at(key);
    ++count.calls;
    count.bytes += bytes;
    return key;
  }

  Work in_flight(CountedWork::Issue issue, Work inner) {
    if (!inner.pending()) return {};
    return Work(std::make_unique<CountedWork>(std::move(inner), ledger_, std::move(issue), in_flight_));
  }

  std::unique_ptr<Communicator> inner_;
  CommLedger& ledger_;
  std::string prefix_;
  std::shared_ptr<InFlight> in_flight_;
  std::shared_ptr<Stopwatch> watch_;  ///< of the communicator's own stream
  std::unique_ptr<Event> ready_;
};

}  // namespace

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
