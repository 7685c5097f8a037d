#pragma once
// Brings parameters that are divided over ranks to the layers that use them.
//
//   blocks that every rank holds whole: gathered in place once after each update, waited for by the first layer that
//   uses them. The others: gathered before use and let go after it, by a schedule that is known beforehand.

#include <vector>

#include "engine/nn/parameter_host.h"
#include "parallel/comm/communicator.h"
#include "parallel/sync/gather_schedule.h"
#include "parallel/sync/gradient_shards.h"
#include "parallel/sync/sharded_weights.h"

namespace pdl {

class ParameterGatherer final : public ParameterHost {
 public:
  /// Plans only. `users[i]` are the layers that use parameter i; gradients lie where `gradients` says.
  ParameterGatherer(const ParamStore& store, const ShardMap& map, const std::vector<std::vector<int>>& users,
                    int layers, const ShardedWeights& weights, GradientShards& gradients, const GatherOptions& options,
                    DType dtype);

  /// Takes memory for gathered blocks. `group` is used for nothing but gathering, so that it may run beside reductions.
  void prepare(Device& device, Communicator& group);
  /// Bytes that `prepare` takes.
  MemoryByKind predicted_memory() const;

  /// What the gatherings of one micro-batch and those after one update send.
  CommCount predicted_pass() const;
  CommCount predicted_regathers() const;

  /// Begins to make a whole block equal on all ranks again, after the slices were updated.
  void regather(int block);
  /// Waits for all that `regather` began.
  void wait_for_regathers();

  void begin_pass(bool training) override;
  void before_layer(int position) override;
  void after_layer(int position) override;
  Tensor value(int index) override;
  Tensor gradient(int index) override { return gradients_.gradient(index); }

  /// Over one micro-batch: forward and backward. Empty when all blocks are whole.
  const GatherSchedule& training() const { return training_.schedule; }
  /// The layer of each use in `training`; backward ones follow the forward ones.
  const std::vector<LayerUse>& training_uses() const { return training_.uses; }

 private:
  /// A pass as it is planned.
  struct Plan {
    std::vector<LayerUse> uses;
    std::vector<int> use_of_call;  ///< which use the n-th layer call is; -1: a layer without parameters
    GatherSchedule schedule;
  };
  Plan plan_pass(bool training, int layers, const GatherOptions& options) const;
  void add_gather(int block, CommCount& count) const;
  void start(const Gather& gather, Work& work);

  const ParamStore& store_;
  const ShardMap& map_;
  const ShardedWeights& weights_;
  GradientShards& gradients_;
  DType dtype_;
  std::vector<std::vector<int>> blocks_of_layer_;
  std::vector<std::int64_t> elements_of_layer_;
  Plan training_, evaluation_;
  std::int64_t memory_elements_ = 0;
  Device* device_ = nullptr;
  Communicator* group_ = nullptr;
  Buffer memory_;
  std::vector<Work> regathers_;                ///< of each block
  const Plan* pass_ = nullptr;                 ///< under way
  std::size_t call_ = 0;                       ///< of a layer in this pass
  std::vector<Work> works_;                    ///< of each gather in this pass
  std::vector<std::int64_t> offset_of_block_;  ///< where each block is now
};

}  // namespace pdl
