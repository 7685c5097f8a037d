#include "parallel/comm/self_communicator.h"

#include <vector>

#include "engine/device/device.h"
#include "tests/support/catch.h"

using namespace pdl;

namespace {

Tensor tensor_of(std::vector<float>& values) {
  return Tensor(values.data(), DType::fp32, Shape{static_cast<std::int64_t>(values.size())});
}

}  // namespace

TEST_CASE("alone, every collective is a copy or nothing") {
  const auto device = make_device({.kind = "cpu"});
  Stream& stream = device->compute_stream();
  const auto self = make_self_communicator(*device, "tp");
  CHECK(self->rank() == 0);
  CHECK(self->size() == 1);
  CHECK(self->transport() == "self");
  CHECK(self->axis() == "tp");

  std::vector<float> in = {1, 2, 3};
  self->all_reduce(tensor_of(in), ReduceOp::sum, stream).wait(stream);
  self->broadcast(tensor_of(in), 0, stream).wait(stream);
  CHECK(in == std::vector<float>{1, 2, 3});

  std::vector<float> out(3);
  self->all_gather(tensor_of(out), tensor_of(in), stream).wait(stream);
  CHECK(out == in);
  out.assign(3, 0);
  self->reduce_scatter(tensor_of(out), tensor_of(in), ReduceOp::max, stream).wait(stream);
  CHECK(out == in);
  out.assign(3, 0);
  self->reduce(tensor_of(out), tensor_of(in), ReduceOp::sum, 0, stream).wait(stream);
  CHECK(out == in);
  out.assign(3, 0);
  Work work = self->all_to_all(tensor_of(out), {3}, tensor_of(in), {3}, stream);
  CHECK(work.done());
  work.wait(stream);
  work.wait(stream);
  CHECK(out == in);
  self->reduce(tensor_of(in), tensor_of(in), ReduceOp::sum, 0, stream).wait(stream);
  self->progress();
  CHECK(self->split(5, 2, "dp")->axis() == "dp");
}

TEST_CASE("alone, wrong shapes, roots and peers are errors") {
  const auto device = make_device({.kind = "cpu"});
  Stream& stream = device->compute_stream();
  const auto self = make_self_communicator(*device);
  std::vector<float> three(3), four(4);
  std::vector<double> doubles(3);
  const Tensor other_type(doubles.data(), DType::fp64, Shape{3});
  CHECK_THROWS_AS(self->all_gather(tensor_of(four), tensor_of(three), stream), Error);
  CHECK_THROWS_AS(self->all_gather(other_type, tensor_of(three), stream), Error);
  CHECK_THROWS_AS(self->reduce_scatter(tensor_of(three), tensor_of(four), ReduceOp::sum, stream), Error);
  CHECK_THROWS_AS(self->reduce(tensor_of(three), tensor_of(four), ReduceOp::sum, 0, stream), Error);
  CHECK_THROWS_AS(self->broadcast(tensor_of(three), 1, stream), Error);
  CHECK_THROWS_AS(self->all_to_all(tensor_of(three), {3}, tensor_of(four), {4}, stream), Error);
  CHECK_THROWS_AS(self->all_to_all(tensor_of(three), {2}, tensor_of(three), {2}, stream), Error);
  CHECK_THROWS_AS(self->all_to_all(tensor_of(three), {3, 0}, tensor_of(three), {3, 0}, stream), Error);
  CHECK_THROWS_AS(self->send(tensor_of(three), 0, 0, stream), Error);
  CHECK_THROWS_AS(self->recv(tensor_of(three), 1, 0, stream), Error);
}

TEST_CASE("a communicator of a plan knows its shape and nothing else") {
  const auto device = make_device({.kind = "cpu"});
  Stream& stream = device->compute_stream();
  const auto plan = make_planning_communicator(3, 8, "pp");
  CHECK(plan->rank() == 3);
  CHECK(plan->size() == 8);
  CHECK(plan->axis() == "pp");
  CHECK(plan->transport() == "plan");
  std::vector<float> values(8);
  CHECK_THROWS_AS(plan->all_reduce(tensor_of(values), ReduceOp::sum, stream), Error);
  CHECK_THROWS_AS(plan->send(tensor_of(values), 0, 0, stream), Error);
  CHECK_THROWS_AS(plan->progress(), Error);
  CHECK_THROWS_WITH(plan->split(0, 0, "dp"), ContainsSubstring("rank 3 of 8"));
  CHECK_THROWS_AS(make_planning_communicator(8, 8), Error);
}
