#pragma once
// What the file of a data set gives (`DatasetDefinition name_dataset()`, listed in datasets.def), and what several of
// them share: keys that they read alike, and the rule by which a set without a second file is split.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "workloads/datasets.h"

namespace pdl {

/// What the samples of a set are.
enum class SampleKind { images, text, either };

struct DatasetDefinition {
  std::string name, summary, source;  ///< as in DatasetDoc
  SampleKind kind;
  /// Reads the set's keys. Problems are noted in the reader.
  void (*read)(const ConfigReader& workload, DataOptions& options);
  /// As `open_datasets`; the model is known to read this kind of samples.
  DatasetPair (*open)(const DataOptions& options, const TensorSpec& model_input, std::uint64_t seed);
};

/// Reads train_samples and validation_samples; 0, the default of a real set, means all.
void read_limits(const ConfigReader& workload, DataOptions& options, std::int64_t train, std::int64_t validation);
/// Reads validation_fraction.
void read_fraction(const ConfigReader& workload, DataOptions& options);
/// Reads tokenizer, vocabulary_size, merges.
void read_tokenizer(const ConfigReader& workload, DataOptions& options);

/// The part of a DatasetInfo that is known before any sample.
DatasetInfo info_of(const DataOptions& options, const std::string& split, const std::string& source,
                    std::int64_t classes);

/// Every how many parts one validates.
inline std::int64_t validation_period(const DataOptions& options) {
  return std::llround(1.0 / options.validation_fraction);
}

/// Which parts of a source a split holds: with period k, parts k-1, 2k-1, ... validate and the others train; with
/// period 0 the split holds all of them.
struct SplitRule {
  std::int64_t period = 0;
  bool validation = false;

  /// Samples of the split out of `total` parts, at most `limit` unless that is 0.
  std::int64_t size(std::int64_t total, std::int64_t limit) const {
    const std::int64_t validating = period == 0 ? 0 : total / period;
    const std::int64_t held = period == 0 ? total : validation ? validating : total - validating;
    return limit == 0 ? held : std::min(held, limit);
  }
  /// The part that sample `id` of the split is.
  std::int64_t part(std::int64_t id) const {
    if (period == 0) return id;
    return validation ? (id + 1) * period - 1 : id + id / (period - 1);
  }
};

}  // namespace pdl
