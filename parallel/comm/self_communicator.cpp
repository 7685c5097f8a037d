#include "parallel/comm/self_communicator.h"

#include <utility>

#include "parallel/comm/collective_checks.h"

namespace pdl {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  SelfCommunicator(Device& device, std::string axis) : device_(device), axis_(std::move(axis)) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string transport() const override { return "self"; }
  std::string axis() const override { return axis_; }

  Work all_reduce(Tensor, ReduceOp, Stream&) override { return {}; }
  Work all_gather(Tensor out, Tensor in, Stream& stream) override {
    check_all_gather(out, in, 1);
    return copy(out, in, stream);
  }
  Work reduce_scatter(Tensor out, Tensor in, ReduceOp, Stream& stream) override {
    check_reduce_scatter(out, in, 1);
    return copy(out, in, stream);
  }
  Work reduce(Tensor out, Tensor in, ReduceOp, int root, Stream& stream) override {
    check_reduce(out, in, root, 0, 1);
    return copy(out, in, stream);
  }
  Work broadcast(Tensor, int root, Stream&) override {
    check_root(root, 1);
    return {};
  }
  Work all_to_all(Tensor out, const std::vector<std::int64_t>& out_counts, Tensor in,
                  const std::vector<std::int64_t>& in_counts, Stream& stream) override {
    check_all_to_all(out, out_counts, in, in_counts, 0, 1);
    return copy(out, in, stream);
  }
  Work send(Tensor, int peer, int, Stream&) override { no_peer(peer); }
  Work recv(Tensor, int peer, int, Stream&) override { no_peer(peer); }

  void progress() override {}
  std::unique_ptr<Communicator> split(int, int, std::string axis) override {
    return make_self_communicator(device_, std::move(axis));
  }

 private:
  Work copy(const Tensor& out, const Tensor& in, Stream& stream) {
    if (out.raw() != in.raw()) device_.copy(out.raw(), in.raw(), in.bytes(), stream);
    return {};
  }
  [[noreturn]] void no_peer(int peer) const {
    throw Error(str("a group of one rank has no peer ", peer, " (axis ", axis_, ")"));
  }

  Device& device_;
  std::string axis_;
};

class PlanningCommunicator final : public Communicator {
 public:
  PlanningCommunicator(int rank, int size, std::string axis) : rank_(rank), size_(size), axis_(std::move(axis)) {
    PDL_CHECK(size > 0 && rank >= 0 && rank < size, "rank ", rank, " of ", size);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string transport() const override { return "plan"; }
  std::string axis() const override { return axis_; }

  Work all_reduce(Tensor, ReduceOp, Stream&) override { refuse(); }
  Work all_gather(Tensor, Tensor, Stream&) override { refuse(); }
  Work reduce_scatter(Tensor, Tensor, ReduceOp, Stream&) override { refuse(); }
  Work reduce(Tensor, Tensor, ReduceOp, int, Stream&) override { refuse(); }
  Work broadcast(Tensor, int, Stream&) override { refuse(); }
  Work all_to_all(Tensor, const std::vector<std::int64_t>&, Tensor, const std::vector<std::int64_t>&,
                  Stream&) override {
    refuse();
  }
  Work send(Tensor, int, int, Stream&) override { refuse(); }
  Work recv(Tensor, int, int, Stream&) override { refuse(); }
  void progress() override { refuse(); }
  std::unique_ptr<Communicator> split(int, int, std::string) override { refuse(); }

 private:
  [[noreturn]] void refuse() const {
    throw Error(str("rank ", rank_, " of ", size_, " (axis ", axis_, ") exists in a plan only and cannot communicate"));
  }

  int rank_, size_;
  std::string axis_;
};

}  // namespace

std::unique_ptr<Communicator> make_self_communicator(Device& device, std::string axis) {
  return std::make_unique<SelfCommunicator>(device, std::move(axis));
}

std::unique_ptr<Communicator> make_planning_communicator(int rank, int size, std::string axis) {
  return std::make_unique<PlanningCommunicator>(rank, size, std::move(axis));
}

}  // namespace pdl
