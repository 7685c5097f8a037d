#pragma once
// Brings this rank's samples of each step to the device, one micro-batch at a time, read ahead on loader threads.
// Beside a device with streams, the next micro-batch travels while the device still computes on this one.
//
// The samples of a step are decided by the epoch plan. Data-parallel rank r of R takes the contiguous part
// split_evenly(n, R, r) and cuts it into micro-batches; a rank may have none in a ragged last step. In step with the
// others it has as many as they have, of the same sizes.
//
// With a data store (data_store.h) samples come from other ranks, and a rank also serves those that others need. So
// then every rank of the world has a feeder for each split, begins the same plans and steps in the same order, and a
// rank that reads no samples has a place among 0.

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "engine/data/batch_plan.h"
#include "engine/data/data_loader.h"
#include "engine/data/sample_staging.h"
#include "engine/device/device.h"
#include "engine/nn/layer.h"
#include "parallel/engine.h"

namespace pdl {

/// Where a rank stands in the data-parallel group. Several ranks may share a place: they read the same samples.
struct DataParallelPlace {
  int rank = 0, size = 1;
  /// For layers that work on the samples of all ranks at once: every rank has the micro-batches of the rank with the
  /// largest part. Where its own is smaller, samples fill up that count nothing: no target (-1), no input (0).
  bool in_step = false;
  int shared_by = 1;  ///< ranks at this place: in step, the sizes of micro-batches are multiples of it
};

class BatchFeeder {
 public:
  /// `max_micro_batch` bounds the size of a micro-batch. Collective over the world with a data store, which starts
  /// to bring samples `steps_ahead` steps before they are needed: two, so that they have come in time to be read ahead;
  /// more where one rank can be further ahead of another.
  BatchFeeder(const EngineContext& context, const Dataset& dataset, DataParallelPlace place,
              std::int64_t max_micro_batch, int steps_ahead = 2);

  /// Bytes of device memory that the constructor takes, for plans.
  static std::int64_t device_bytes(const EngineContext& context, DataParallelPlace place, std::int64_t max_micro_batch);

  /// Starts on a plan; what was read ahead of an abandoned plan is dropped.
  void begin(const EpochPlan& plan);
  /// Micro-batches of the next step on this rank, whose sizes are given; `next` must be called as often.
  std::span<const Part> begin_step();
  /// How many micro-batches the rank has that has most of this step.
  std::int64_t rounds() const { return rounds_; }
  /// The next micro-batch, on its way: work queued on `stream` from now on finds it there. Valid until the next call.
  /// size, input, target, sample_ids and update are set, in step also group_sample_ids.
  MicroBatch next(Stream& stream, std::int64_t update);
  /// Sends the micro-batch after that one ahead, if the plan has one; may wait for the loader. To be called when the
  /// work on this one is queued. Does nothing on a CPU, where there is no time to win.
  void send_ahead();

 private:
  /// Device memory of one micro-batch.
  struct Upload {
    Buffer memory;
    Tensor input, target, sample_ids;  ///< for max_micro_batch samples
    Tensor group_sample_ids;           ///< of all ranks, when they are in step
    Tensor update;                     ///< int64 [1]
    Tensor unrounded;                  ///< images as they arrive, when `input` has a half type
    std::unique_ptr<Event> arrived, used;
    std::int64_t size = 0, filled_up = 0;  ///< samples; how many of them, at the end, count nothing
  };
  /// A micro-batch that the loader was asked for: the samples at these offsets into the rank's part of the step.
  struct Request {
    std::int64_t step = 0;
    Part window;
  };
  Upload make_upload(const EngineContext& context);
  std::int64_t step_samples(std::int64_t step) const;
  std::vector<Part> windows(std::int64_t step, int rank) const;
  int own_windows() const { return place_.in_step ? 0 : place_.rank; }  ///< whose windows this rank has
  Part samples_of(const Request& request, int rank) const;
  void send();
  void send_group_ids(const Upload& upload, const Request& request);
  enum class Patience { none, for_one_batch };
  void read_ahead(Patience patience);

  DataParallelPlace place_;
  std::int64_t max_micro_batch_;
  Device& device_;
  Backend& backend_;
  SampleStaging* staging_;  ///< null when every sample can be read at any time
  DataLoader loader_;
  const EpochPlan* plan_ = nullptr;
  std::int64_t step_ = 0;  ///< next step to begin
  std::int64_t rounds_ = 0;
  std::int64_t ahead_step_ = 0;  ///< step from which samples are asked for
  std::size_t ahead_piece_ = 0;
  std::vector<Part> pieces_, ahead_pieces_;
  std::deque<Request> asked_;  ///< of the loader, not sent yet
  std::vector<std::int64_t> group_ids_;
  std::unique_ptr<Stream> copies_;
  std::vector<Upload> uploads_;  ///< one on a CPU, else two that take turns
  std::size_t next_upload_ = 0;  ///< where the next micro-batch goes or has gone
  bool sent_ahead_ = false;
};

}  // namespace pdl
