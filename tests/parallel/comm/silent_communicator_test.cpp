#include "parallel/comm/silent_communicator.h"

#include <vector>

#include "tests/support/catch.h"

using namespace pdl;

namespace {

/// Counts what arrives.
class Listening final : public Communicator {
 public:
  Listening(int rank, int size, std::string axis, int& calls)
      : rank_(rank), size_(size), axis_(std::move(axis)), calls_(calls) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string transport() const override { return "listening"; }
  std::string axis() const override { return axis_; }
  Work all_reduce(Tensor, ReduceOp, Stream&) override { return called(); }
  Work all_gather(Tensor, Tensor, Stream&) override { return called(); }
  Work reduce_scatter(Tensor, Tensor, ReduceOp, Stream&) override { return called(); }
  Work reduce(Tensor, Tensor, ReduceOp, int, Stream&) override { return called(); }
  Work broadcast(Tensor, int, Stream&) override { return called(); }
  Work all_to_all(Tensor, const std::vector<std::int64_t>&, Tensor, const std::vector<std::int64_t>&,
                  Stream&) override {
    return called();
  }
  Work send(Tensor, int, int, Stream&) override { return called(); }
  Work recv(Tensor, int, int, Stream&) override { return called(); }
  void progress() override {}
  std::unique_ptr<Communicator> split(int, int, std::string axis) override {
    return std::make_unique<Listening>(rank_, size_, std::move(axis), calls_);
  }

 private:
  Work called() {
    ++calls_;
    return {};
  }
  int rank_, size_;
  std::string axis_;
  int& calls_;
};

struct Fixture {
  std::unique_ptr<Device> device = make_device({.kind = "cpu"});
  Stream& stream = device->compute_stream();
  int calls = 0;
  bool silent = true;
  std::unique_ptr<Communicator> group =
      make_silent_communicator(std::make_unique<Listening>(1, 3, "dp", calls), *device, silent);
  static Tensor of(std::vector<float>& values) {
    return Tensor(values.data(), DType::fp32, Shape{static_cast<std::int64_t>(values.size())});
  }
  void call_everything() {
    std::vector<float> one = {1}, three = {1, 2, 3};
    group->all_reduce(of(three), ReduceOp::sum, stream).wait(stream);
    group->all_gather(of(three), of(one), stream).wait(stream);
    group->reduce_scatter(of(one), of(three), ReduceOp::sum, stream).wait(stream);
    group->reduce(of(three), of(three), ReduceOp::sum, 0, stream).wait(stream);
    group->broadcast(of(three), 0, stream).wait(stream);
    group->all_to_all(of(three), {1, 1, 1}, of(three), {1, 1, 1}, stream).wait(stream);
    group->send(of(one), 0, 0, stream).wait(stream);
    group->recv(of(one), 0, 0, stream).wait(stream);
  }
};

}  // namespace

TEST_CASE("when silent nothing is sent, else everything is") {
  Fixture f;
  f.call_everything();
  CHECK(f.calls == 0);
  f.silent = false;
  f.call_everything();
  CHECK(f.calls == 8);
  CHECK(f.group->transport() == "listening");
}

TEST_CASE("a rank keeps its own part, and finds what others would have sent as it was") {
  Fixture f;
  std::vector<float> whole = {7, 8, 9}, part = {5};
  f.group->all_gather(f.of(whole), f.of(part), f.stream);
  CHECK(whole == std::vector<float>{7, 5, 9});
  f.group->reduce_scatter(f.of(part), f.of(whole), ReduceOp::sum, f.stream);
  CHECK(part == std::vector<float>{5});
  whole[1] = 6;
  f.group->reduce_scatter(f.of(part), f.of(whole), ReduceOp::sum, f.stream);
  CHECK(part == std::vector<float>{6});
  std::vector<float> to = {0, 0, 0}, from = {1, 2, 3};
  f.group->reduce(f.of(to), f.of(from), ReduceOp::sum, 2, f.stream);
  CHECK(to == std::vector<float>{0, 0, 0});
  f.group->reduce(f.of(to), f.of(from), ReduceOp::sum, 1, f.stream);
  CHECK(to == from);
  std::vector<float> arrived = {9, 9, 9, 9}, sent = {1, 2, 3};
  f.group->all_to_all(f.of(arrived), {2, 1, 1}, f.of(sent), {1, 1, 1}, f.stream);
  CHECK(arrived == std::vector<float>{9, 9, 2, 9});
  f.group->all_reduce(f.of(sent), ReduceOp::sum, f.stream);
  f.group->recv(f.of(sent), 0, 0, f.stream);
  CHECK(sent == std::vector<float>{1, 2, 3});
}

TEST_CASE("parts of a silent group are silent, but for the one that agrees on stopping") {
  Fixture f;
  std::vector<float> values = {1};
  f.group->split(0, 0, "tp")->all_reduce(f.of(values), ReduceOp::sum, f.stream);
  CHECK(f.calls == 0);
  f.group->split(0, 0, kControlAxis)->all_reduce(f.of(values), ReduceOp::sum, f.stream);
  CHECK(f.calls == 1);
}
