// In which order a column layer starts a movement, computes and waits: the sum of its input gradients, and with a
// spread the gather for its weight gradient, are under way while it computes what does not need them.

#include <memory>
#include <string>
#include <vector>

#include "parallel/shard/tensor_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/op_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

using Log = std::vector<std::string>;

/// Rank 0 of two, whose peer never says anything: operations move nothing and are only written down.
class LoggedGroup final : public Communicator {
 public:
  explicit LoggedGroup(Log& log) : log_(log) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::string transport() const override { return "none"; }
  std::string axis() const override { return "tp"; }
  Work all_reduce(Tensor, ReduceOp, Stream&) override { return begin("sum"); }
  Work all_gather(Tensor, Tensor, Stream&) override { return begin("gather"); }
  Work reduce_scatter(Tensor, Tensor, ReduceOp, Stream&) override { return begin("reduce-scatter"); }
  Work reduce(Tensor, Tensor, ReduceOp, int, Stream&) override { return begin("reduce"); }
  Work broadcast(Tensor, int, Stream&) override { return begin("broadcast"); }
  Work all_to_all(Tensor, const std::vector<std::int64_t>&, Tensor, const std::vector<std::int64_t>&,
                  Stream&) override {
    return begin("all-to-all");
  }
  Work send(Tensor, int, int, Stream&) override { return begin("send"); }
  Work recv(Tensor, int, int, Stream&) override { return begin("recv"); }
  void progress() override {}
  std::unique_ptr<Communicator> split(int, int, std::string) override { return nullptr; }

 private:
  struct Wait final : Work::State {
    Wait(Log& log, std::string name) : log_(log), name_(std::move(name)) {}
    void wait(Stream&) override { log_.push_back("wait for " + name_); }
    bool done() override { return false; }
    Log& log_;
    std::string name_;
  };
  Work begin(const std::string& name) {
    log_.push_back(name);
    return Work(std::make_unique<Wait>(log_, name));
  }
  Log& log_;
};

struct LoggedReady final : LayerIo::Ready {
  explicit LoggedReady(Log& log) : log_(log) {}
  void operator()(int i) override {
    if (i == 0) log_.push_back("weight gradient");
  }
  Log& log_;
};

/// What one backward pass of a layer over x writes down.
Log backward_of(const Layer& layer, Log& log, const Shape& x_shape) {
  const CpuUnderTest cpu;
  MicroBatch batch;
  batch.size = x_shape[0];
  LayerIo io(*cpu.backend, batch);
  std::vector<OwnedTensor> params, grads, saved;
  for (const ParamSpec& spec : layer.param_specs()) {
    params.push_back(random_tensor(DType::fp64, spec.shape(), 1));
    grads.emplace_back(DType::fp64, spec.shape());
  }
  for (const TensorSpec& spec : layer.saved_specs(x_shape, DType::fp64)) {
    saved.push_back(random_tensor(spec.dtype, spec.shape, 2));
  }
  const std::vector<Tensor> p(params.begin(), params.end()), g(grads.begin(), grads.end()),
      s(saved.begin(), saved.end());
  const std::vector<char> accumulate(params.size(), 0);
  const Shape y_shape = layer.output_shape(x_shape);
  const OwnedTensor x = random_tensor(DType::fp64, x_shape, 3), y = random_tensor(DType::fp64, y_shape, 4);
  const OwnedTensor dy = random_tensor(DType::fp64, y_shape, 5), dx(DType::fp64, x_shape);
  OwnedTensor workspace(DType::uint8,
                        {std::max<std::int64_t>(1, layer.workspace_bytes(x_shape, DType::fp64, *cpu.backend))});
  io.params = p, io.grads = g, io.saved = s, io.accumulate = accumulate;
  io.x = x, io.y = y, io.dx = dx, io.dy = dy, io.workspace = workspace;
  LoggedReady ready(log);
  io.ready = &ready;
  log.clear();
  layer.backward(io);
  return log;
}

}  // namespace

TEST_CASE("a column layer computes its weight gradient while input gradients are added up") {
  Log log;
  LoggedGroup ranks(log);
  const std::unique_ptr<Device> device = make_device({.kind = "cpu"});
  const TensorGroup group = {.rank = 0, .size = 2, .ranks = &ranks, .stream = &device->compute_stream()};
  LinearOptions linear;
  linear.in = 6;
  linear.out = 8;
  linear.split = Split::column;
  linear.activation = Activation::gelu_tanh;
  const TensorParallelFactory plain(group, SpreadOver::none), spread(group, SpreadOver::sequence);
  CHECK(backward_of(*plain.linear("fc", linear), log, {3, 4, 6}) == Log{"sum", "weight gradient", "wait for sum"});
  CHECK(backward_of(*spread.linear("fc", linear), log, {3, 2, 6}) ==
        Log{"gather", "wait for gather", "reduce-scatter", "weight gradient", "wait for reduce-scatter"});
  ConvOptions conv;
  conv.in = 3;
  conv.out = 4;
  conv.split = Split::column;
  CHECK(backward_of(*plain.conv2d("conv", conv), log, {2, 5, 5, 3}) == Log{"sum", "weight gradient", "wait for sum"});
}

TEST_CASE("a row layer waits for nobody on the way back unless sequences are spread") {
  Log log;
  LoggedGroup ranks(log);
  const std::unique_ptr<Device> device = make_device({.kind = "cpu"});
  const TensorGroup group = {.rank = 0, .size = 2, .ranks = &ranks, .stream = &device->compute_stream()};
  LinearOptions linear;
  linear.in = 8;
  linear.out = 6;
  linear.split = Split::row;
  CHECK(backward_of(*TensorParallelFactory(group, SpreadOver::none).linear("fc", linear), log, {3, 4, 4}) ==
        Log{"weight gradient"});
  CHECK(backward_of(*TensorParallelFactory(group, SpreadOver::sequence).linear("fc", linear), log, {3, 4, 4}) ==
        Log{"gather", "wait for gather", "weight gradient"});
}
