#include "parallel/sync/tensor_all_reduce.h"

namespace pdl {

TensorAllReduce::TensorAllReduce(const ParamStore& store, int max_in_flight)
    : store_(store), max_in_flight_(static_cast<std::size_t>(max_in_flight)) {
  PDL_CHECK(max_in_flight >= 0, max_in_flight, " in flight");
  for (int index = static_cast<int>(store.params().size()); index-- > 0;) {
    if (store.params()[static_cast<std::size_t>(index)].spec.slice.axis < 0) order_.push_back(index);
  }
  ready_.resize(store.params().size());
  work_.resize(store.params().size());
}

void TensorAllReduce::prepare(Device& device, Communicator& group) {
  device_ = &device;
  group_ = &group;
}

void TensorAllReduce::begin() {
  ready_.assign(ready_.size(), 0);
  next_ = finished_ = 0;
}

void TensorAllReduce::gradient_ready(int index) {
  ready_[static_cast<std::size_t>(index)] = 1;
  while (next_ < order_.size() && ready_[static_cast<std::size_t>(order_[next_])]) launch(order_[next_++]);
  group_->progress();
}

void TensorAllReduce::launch(int index) {
  // next_ counts this one too.
  if (max_in_flight_ > 0 && next_ - finished_ > max_in_flight_) wait(order_[finished_++]);
  const Param& param = store_.params()[static_cast<std::size_t>(index)];
  work_[static_cast<std::size_t>(index)] =
      group_->all_reduce(store_.grads().range(param.offset, param.count), ReduceOp::sum, device_->compute_stream());
}

void TensorAllReduce::begin_rest() {
  while (next_ < order_.size()) launch(order_[next_++]);
}

void TensorAllReduce::wait(int index) { work_[static_cast<std::size_t>(index)].wait(device_->compute_stream()); }

void TensorAllReduce::wait_for_all() {
  for (int index : order_) wait(index);
}

}  // namespace pdl
