#pragma once
// A data set dealt out over the ranks: rank r of N keeps samples r, r + N, r + 2N, ... in host memory, and ranks bring
// each other the samples of coming steps. Each sample is read from storage once, by the rank that keeps it: when the
// store is made, or (`preload` false) when it is first needed. Where all samples are trained on, storage is not touched
// after the first epoch.
//
//   begin_step(s):  for each other rank, one message of the samples kept here that it reads in step s + steps_ahead,
//                   and one message of those that it keeps and this rank reads
//   at_hand, wait:  those of a step have arrived
//
// Which samples a rank reads follows from the plan, who keeps a sample from its id: every rank knows what goes where,
// so nothing is negotiated. All communication is non-blocking point-to-point in host memory, on a group of its own,
// by the thread that calls SampleStaging. With N ranks, B samples a step and s bytes a sample, a rank sends about
// (N - 1) / N * B / N * s bytes a step, and keeps 1 / N of the data set.
//
// After the data store of LBANN (its options --use_data_store and --preload_data_store).

#include <cstdint>
#include <memory>

#include "engine/data/dataset.h"
#include "engine/data/sample_staging.h"
#include "parallel/comm/communicator.h"

namespace pdl {

struct DataStoreOptions {
  bool enabled = false;
  bool preload = true;     ///< read all samples of this rank at once; else when a step first needs them
  int loader_threads = 1;  ///< that read from storage; 0: the calling thread
};

/// Answers like the data set in storage, but only for samples kept here or at hand: reading another one is an error of
/// the reader, which did not say ahead of time that it would.
class DataStore final : public Dataset {
 public:
  /// `ranks` carries tensors in host memory, those of the device `host`, which outlives the store. Reads this rank's
  /// samples when `options.preload`; throws what the data set in storage throws.
  DataStore(std::unique_ptr<Dataset> storage, std::unique_ptr<Communicator> ranks, Device& host,
            const DataStoreOptions& options);
  ~DataStore() override;

  DatasetInfo info() const override;
  std::int64_t size() const override;
  TensorSpec input_spec() const override;
  TensorSpec target_spec() const override;
  void read(std::int64_t id, Tensor input, Tensor target) const override;
  SampleStaging* staging() const override;

 private:
  class Exchange;
  std::unique_ptr<Exchange> exchange_;
};

}  // namespace pdl
