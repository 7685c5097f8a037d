#include "parallel/comm/silent_communicator.h"

#include <numeric>
#include <utility>

#include "parallel/comm/collective_checks.h"

namespace pdl {
namespace {

class SilentCommunicator final : public Communicator {
 public:
  SilentCommunicator(std::unique_ptr<Communicator> inner, Device& device, const bool& silent)
      : inner_(std::move(inner)), device_(device), silent_(silent) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string transport() const override { return inner_->transport(); }
  std::string axis() const override { return inner_->axis(); }
  std::string library() const override { return inner_->library(); }

  Stream* own_stream() override { return inner_->own_stream(); }

  Work all_reduce(Tensor inout, ReduceOp op, Stream& stream) override {
    return silent_ ? Work() : inner_->all_reduce(inout, op, stream);
  }
  Work all_gather(Tensor out, Tensor in, Stream& stream) override {
    if (!silent_) return inner_->all_gather(out, in, stream);
    check_all_gather(out, in, size());
    return keep(part(out, in.elements()), in, stream);
  }
  Work reduce_scatter(Tensor out, Tensor in, ReduceOp op, Stream& stream) override {
    if (!silent_) return inner_->reduce_scatter(out, in, op, stream);
    check_reduce_scatter(out, in, size());
    return keep(out, part(in, out.elements()), stream);
  }
  Work reduce(Tensor out, Tensor in, ReduceOp op, int root, Stream& stream) override {
    if (!silent_) return inner_->reduce(out, in, op, root, stream);
    check_reduce(out, in, root, rank(), size());
    return rank() == root ? keep(out, in, stream) : Work();
  }
  Work broadcast(Tensor inout, int root, Stream& stream) override {
    return silent_ ? Work() : inner_->broadcast(inout, root, stream);
  }
  Work all_to_all(Tensor out, const std::vector<std::int64_t>& out_counts, Tensor in,
                  const std::vector<std::int64_t>& in_counts, Stream& stream) override {
    if (!silent_) return inner_->all_to_all(out, out_counts, in, in_counts, stream);
    check_all_to_all(out, out_counts, in, in_counts, rank(), size());
    return keep(own_part(out, out_counts), own_part(in, in_counts), stream);
  }
  Work send(Tensor in, int peer, int tag, Stream& stream) override {
    return silent_ ? Work() : inner_->send(in, peer, tag, stream);
  }
  Work recv(Tensor out, int peer, int tag, Stream& stream) override {
    return silent_ ? Work() : inner_->recv(out, peer, tag, stream);
  }

  void progress() override { inner_->progress(); }
  std::unique_ptr<Communicator> split(int color, int key, std::string axis) override {
    std::unique_ptr<Communicator> group = inner_->split(color, key, axis);
    if (axis == kControlAxis) return group;
    return make_silent_communicator(std::move(group), device_, silent_);
  }

 private:
  Tensor part(const Tensor& whole, std::int64_t elements) const { return whole.range(rank() * elements, elements); }
  Tensor own_part(const Tensor& whole, const std::vector<std::int64_t>& counts) const {
    const auto own = counts.begin() + rank();
    return whole.range(std::accumulate(counts.begin(), own, std::int64_t{0}), *own);
  }
  Work keep(const Tensor& out, const Tensor& in, Stream& stream) {
    if (out.raw() != in.raw()) device_.copy(out.raw(), in.raw(), in.bytes(), stream);
    return {};
  }

  std::unique_ptr<Communicator> inner_;
  Device& device_;
  const bool& silent_;
};

}  // namespace

std::unique_ptr<Communicator> make_silent_communicator(std::unique_ptr<Communicator> inner, Device& device,
                                                       const bool& silent) {
  return std::make_unique<SilentCommunicator>(std::move(inner), device, silent);
}

}  // namespace pdl
