#include "parallel/comm/staged_communicator.h"

#include <algorithm>
#include <utility>

namespace pdl {
namespace {

/// Host buffers that are free again; the smallest that fits is used next. After the first step there is one for
/// everything.
class StagingPool {
 public:
  explicit StagingPool(Device& device) : device_(device) {}

  HostBuffer take(std::int64_t bytes) {
    auto best = free_.end();
    for (auto buffer = free_.begin(); buffer != free_.end(); ++buffer) {
      if (buffer->bytes() >= bytes && (best == free_.end() || buffer->bytes() < best->bytes())) best = buffer;
    }
    if (best == free_.end()) return device_.allocate_host(bytes);
    HostBuffer buffer = std::move(*best);
    free_.erase(best);
    return buffer;
  }
  void give_back(HostBuffer buffer) { free_.push_back(std::move(buffer)); }
  Device& device() { return device_; }

 private:
  Device& device_;
  std::vector<HostBuffer> free_;
};

/// The host copy of one tensor of one call.
class Staged {
 public:
  Staged(const Tensor& tensor, std::shared_ptr<StagingPool> pool)
      : tensor_(tensor), pool_(std::move(pool)), buffer_(pool_->take(tensor.bytes())) {}
  Staged(Staged&&) = default;
  Staged& operator=(Staged&&) = delete;
  ~Staged() {
    if (pool_) pool_->give_back(std::move(buffer_));
  }

  Tensor host() const { return Tensor(buffer_.raw(), tensor_.dtype(), tensor_.shape()); }
  void download(Stream& stream) {
    pool_->device().copy(buffer_.raw(), tensor_.raw(), tensor_.bytes(), stream);
    stream.synchronize();
  }
  void upload(Stream& stream) {
    pool_->device().copy(tensor_.raw(), buffer_.raw(), tensor_.bytes(), stream);
    stream.synchronize();
  }

 private:
  Tensor tensor_;
  std::shared_ptr<StagingPool> pool_;
  HostBuffer buffer_;
};

/// Waits for the operation on the host, then brings its result up.
class StagedWork final : public Work::State {
 public:
  StagedWork(Work inner, std::vector<Staged> operands, std::size_t result)
      : inner_(std::move(inner)), operands_(std::move(operands)), result_(result) {}

  void wait(Stream& stream) override {
    inner_.wait(stream);
    if (result_ < operands_.size()) operands_[result_].upload(stream);
  }
  bool done() override { return inner_.done(); }

 private:
  Work inner_;
  std::vector<Staged> operands_;
  std::size_t result_;  ///< which operand; past the end: none
};

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<Device> host, Device& device)
      : host_(std::move(host)),
        device_(device),
        pool_(std::make_shared<StagingPool>(device)),
        inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string transport() const override { return inner_->transport() + ", host-staged"; }
  std::string axis() const override { return inner_->axis(); }

  Work all_reduce(Tensor inout, ReduceOp op, Stream& stream) override {
    return in_place(inout, stream, [&](const Tensor& host) { return inner_->all_reduce(host, op, stream); });
  }
  Work broadcast(Tensor inout, int root, Stream& stream) override {
    return in_place(inout, stream, [&](const Tensor& host) { return inner_->broadcast(host, root, stream); });
  }
  Work all_gather(Tensor out, Tensor in, Stream& stream) override {
    return out_of(out, in, stream,
                  [&](const Tensor& to, const Tensor& from) { return inner_->all_gather(to, from, stream); });
  }
  Work reduce_scatter(Tensor out, Tensor in, ReduceOp op, Stream& stream) override {
    return out_of(out, in, stream,
                  [&](const Tensor& to, const Tensor& from) { return inner_->reduce_scatter(to, from, op, stream); });
  }
  Work reduce(Tensor out, Tensor in, ReduceOp op, int root, Stream& stream) override {
    std::vector<Staged> operands = stage({out, in});
    operands[1].download(stream);
    Work work = inner_->reduce(operands[0].host(), operands[1].host(), op, root, stream);
    return finish(std::move(work), std::move(operands), rank() == root ? 0 : kNone);
  }
  Work all_to_all(Tensor out, const std::vector<std::int64_t>& out_counts, Tensor in,
                  const std::vector<std::int64_t>& in_counts, Stream& stream) override {
    return out_of(out, in, stream, [&](const Tensor& to, const Tensor& from) {
      return inner_->all_to_all(to, out_counts, from, in_counts, stream);
    });
  }
  Work send(Tensor in, int peer, int tag, Stream& stream) override {
    std::vector<Staged> operands = stage({in});
    operands[0].download(stream);
    Work work = inner_->send(operands[0].host(), peer, tag, stream);
    return finish(std::move(work), std::move(operands), kNone);
  }
  Work recv(Tensor out, int peer, int tag, Stream& stream) override {
    std::vector<Staged> operands = stage({out});
    Work work = inner_->recv(operands[0].host(), peer, tag, stream);
    return finish(std::move(work), std::move(operands), 0);
  }

  void progress() override { inner_->progress(); }
  std::unique_ptr<Communicator> split(int color, int key, std::string axis) override {
    return make_staged_communicator(inner_->split(color, key, std::move(axis)), host_, device_);
  }

 private:
  static constexpr std::size_t kNone = 2;

  std::vector<Staged> stage(const std::vector<Tensor>& tensors) {
    std::vector<Staged> operands;
    operands.reserve(tensors.size());
    for (const Tensor& tensor : tensors) operands.emplace_back(tensor, pool_);
    return operands;
  }
  static Work finish(Work work, std::vector<Staged> operands, std::size_t result) {
    return Work(std::make_unique<StagedWork>(std::move(work), std::move(operands), result));
  }
  template <typename Issue>
  Work in_place(const Tensor& inout, Stream& stream, Issue issue) {
    std::vector<Staged> operands = stage({inout});
    operands[0].download(stream);
    Work work = issue(operands[0].host());
    return finish(std::move(work), std::move(operands), 0);
  }
  template <typename Issue>
  Work out_of(const Tensor& out, const Tensor& in, Stream& stream, Issue issue) {
    std::vector<Staged> operands = stage({out, in});
    operands[1].download(stream);
    Work work = issue(operands[0].host(), operands[1].host());
    return finish(std::move(work), std::move(operands), 0);
  }

  std::shared_ptr<Device> host_;
  Device& device_;
  std::shared_ptr<StagingPool> pool_;
  std::unique_ptr<Communicator> inner_;  ///< uses host_: destroyed first
};

}  // namespace

std::unique_ptr<Communicator> make_staged_communicator(std::unique_ptr<Communicator> inner,
                                                       std::shared_ptr<Device> host, Device& device) {
  return std::make_unique<StagedCommunicator>(std::move(inner), std::move(host), device);
}

}  // namespace pdl
