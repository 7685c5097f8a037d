#pragma once
// Brings what a pipeline stage needs of each micro-batch to its device, and holds it until the stage is done with it:
// the first stage needs inputs, the last one targets, all of them sample ids and update for dropout. Stages in between
// read no data: the plan tells the ids.
//
// Replica r of R of the pipeline takes the contiguous part split_evenly(n, R, r) of a step's n samples. It is cut into
// a given number of micro-batches whose sizes differ by at most one, larger ones first; where there are fewer samples,
// there is one in each, and of none there are none.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/data/batch_plan.h"
#include "engine/data/data_loader.h"
#include "engine/device/device.h"
#include "engine/nn/layer.h"
#include "parallel/engine.h"

namespace pdl {

struct StageNeeds {
  bool input = false, target = false;
};

/// The micro-batches of a step of `samples`, as parts of the step.
std::vector<Part> cut_step(std::int64_t samples, int micro_batches);

class StageFeeder {
 public:
  /// Steps of up to `step_samples` on this replica in `micro_batches` pieces, `held` of them at a time.
  StageFeeder(const EngineContext& context, const Dataset& dataset, StageNeeds needs, std::int64_t step_samples,
              int micro_batches, int held, int replica = 0, int replicas = 1);
  /// Bytes of device memory that the constructor takes, for plans.
  static std::int64_t device_bytes(const EngineContext& context, StageNeeds needs, std::int64_t step_samples,
                                   int micro_batches, int held);

  /// Starts on a plan; what was read ahead of an abandoned plan is dropped.
  void begin(const EpochPlan& plan);
  /// Starts on these micro-batches, given as sample ids that stay valid, all in one step that has begun.
  void begin(std::vector<std::span<const std::int64_t>> micro_batches);
  /// The micro-batches of the next step, as parts of it. All of the step before have been released.
  std::span<const Part> begin_step();
  /// The next micro-batch, on its way: work queued on `stream` from now on finds it there, until it is released. size,
  /// input, target (where needed), sample_ids and update are set.
  MicroBatch next(Stream& stream, std::int64_t update);
  /// All work on micro-batch `index` of this step is queued on `stream`: its place may be used again.
  void release(int index, Stream& stream);
  /// Sends the next micro-batch ahead where its place is free; may wait for the loader. Does nothing on a CPU.
  void send_ahead();

 private:
  /// Device memory of one micro-batch.
  struct Place {
    Buffer memory;
    Tensor input, target, sample_ids, update;
    Tensor unrounded;  ///< images as they arrive, when `input` has a half type
    std::unique_ptr<Event> arrived, used;
    std::int64_t size = 0;
    bool is_free = true;
  };
  Place make_place(const EngineContext& context);
  std::vector<Part> parts_of(std::int64_t step) const;
  void restart(std::vector<std::span<const std::int64_t>> micro_batches);
  void send();
  void read_ahead();

  StageNeeds needs_;
  int micro_batches_, replica_, replicas_;
  std::int64_t largest_;  ///< samples of a micro-batch
  bool sends_ahead_;
  Device& device_;
  Backend& backend_;
  std::unique_ptr<DataLoader> loader_;  ///< none where only ids are needed
  std::unique_ptr<Stream> copies_;
  std::vector<Place> places_;
  const EpochPlan* plan_ = nullptr;
  std::int64_t step_ = -1;                          ///< the current one
  std::vector<std::span<const std::int64_t>> all_;  ///< micro-batches of all steps
  std::size_t first_ = 0, count_ = 0;               ///< those of the current step
  std::vector<Part> parts_;                         ///< likewise
  std::size_t next_ = 0;                            ///< micro-batch of the current step that `next` gives
  std::size_t sent_ = 0;                            ///< micro-batches of the current step that are sent
  std::size_t ahead_ = 0;                           ///< micro-batches that the loader has been asked for
};

}  // namespace pdl
