#pragma once
// A data set answers for a global sample id. Who asks, and in which order, never changes the answer.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/tensor/tensor.h"

namespace pdl {

class SampleStaging;

/// Identity of a data set, for the record.
struct DatasetInfo {
  std::string name;      ///< "fashion-mnist", "kjv", "synthetic"
  std::string split;     ///< "train" or "validation"
  std::string source;    ///< path or package; "generated" for synthetic sets
  std::string identity;  ///< FNV-1a over the content in hex, or the generator's parameters
  bool synthetic = false;
  std::int64_t samples = 0;
  std::int64_t dropped = 0;  ///< samples or tokens of the source that fill no whole sample
  std::int64_t classes = 0;  ///< classes or vocabulary size
  /// Text: exp(cross-entropy of this split's target tokens under the training split's frequencies); else 0.
  double unigram_perplexity = 0.0;
};

/// Thread-safe for reading.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual DatasetInfo info() const = 0;
  virtual std::int64_t size() const = 0;
  /// One sample without N: fp32 [H, W, C] or int32 [T]; target int32 [1] or [T].
  virtual TensorSpec input_spec() const = 0;
  virtual TensorSpec target_spec() const = 0;
  /// Writes sample `id` to host memory of exactly those specs. Throws Error(data).
  virtual void read(std::int64_t id, Tensor input, Tensor target) const = 0;
  /// What must be told ahead of time which samples will be read (sample_staging.h); null when any can be read at any
  /// time.
  virtual SampleStaging* staging() const { return nullptr; }
};

/// The two splits of a data set.
struct DatasetPair {
  std::unique_ptr<Dataset> train, validation;
};

}  // namespace pdl
