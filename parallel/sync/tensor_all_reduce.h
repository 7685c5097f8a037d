#pragma once
// Sums gradients over replicas weight by weight: one non-blocking all-reduce for each, inside the gradient range, begun
// as soon as the gradient is final. Nobody waits for a weight but those who need it.
//
//   gradient_ready(p):  begin p's all-reduce, once those of all later weights are begun; before that, with a limit on
//                       how many are in flight, wait for the oldest
//   wait(p):            what is queued from now on finds the sum in p's gradient
//
// Weights are begun strictly in reverse order of registration on every rank, which is the order in which backward
// passes finish them, so collectives always match.

#include <cstdint>
#include <vector>

#include "engine/nn/layer.h"
#include "parallel/comm/communicator.h"

namespace pdl {

class TensorAllReduce final : public GradientListener {
 public:
  /// Plans only. `max_in_flight` 0: no limit. Parameters of which this rank holds a slice are left alone.
  TensorAllReduce(const ParamStore& store, int max_in_flight);

  /// Sums are over `group`.
  void prepare(Device& device, Communicator& group);
  /// Before each backward pass whose gradients are to be reduced.
  void begin();
  void gradient_ready(int index) override;
  /// After the backward pass: begins what was not heard of, as on a rank without samples.
  void begin_rest();
  /// Of params()[index]; after begin_rest. At once for what needs no reduction or was waited for.
  void wait(int index);
  void wait_for_all();

  std::size_t max_in_flight() const { return max_in_flight_; }
  /// Indices into ParamStore::params(), in the order in which they are begun.
  const std::vector<int>& order() const { return order_; }

 private:
  void launch(int index);

  const ParamStore& store_;
  std::size_t max_in_flight_;
  Device* device_ = nullptr;
  Communicator* group_ = nullptr;
  std::vector<int> order_;
  std::vector<char> ready_;              ///< of each parameter
  std::size_t next_ = 0, finished_ = 0;  ///< places in order_: first not begun, first that may be in flight
  std::vector<Work> work_;               ///< of each parameter
};

}  // namespace pdl
