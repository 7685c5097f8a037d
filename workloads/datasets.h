#pragma once
// The data sets that a configuration can name, as seen from outside: read the options, open the two splits. What a data
// set's own file has to give stands in dataset_definition.h.

#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/config_reader.h"
#include "engine/data/dataset.h"
#include "engine/data/token_file.h"
#include "engine/data/tokenizer.h"
#include "workloads/models.h"

namespace pdl {

/// The data part of the "workload" block. Each set reads the keys that it knows; the other fields keep these values.
/// How long a sequence or how large an image is, the model says.
struct DataOptions {
  std::string data;                                     ///< name of the data set
  std::string path, labels_path;                        ///< where it is, for sets that are files
  std::string validation_path, validation_labels_path;  ///< the second split; empty: split off `path`
  TokenFormat format = TokenFormat::llmc;
  TokenizerOptions tokenizer;
  std::int64_t vocabulary_size = 0;  ///< of text; 0 for images
  std::int64_t classes = 0;          ///< of images; 0 for text
  std::int64_t train_samples = 0,
               validation_samples = 0;  ///< at most so many, 0: all; a generated set has exactly so many
  double validation_fraction = 0.1;     ///< where a set is split: every round(1 / fraction)-th part validates
};

/// Reads the data part of the "workload" block. What is wrong is noted in the reader.
DataOptions read_data_options(const ConfigReader& workload);

/// Vocabulary or classes of the set, known before it is opened: for plans. Throws ConfigError when the set does not
/// hold what the model reads, images fp32 [H, W, C] or tokens int32 [T].
std::int64_t planned_classes(const DataOptions& options, const ModelOptions& model);

/// Opens the set for a model that reads `model_input`: images are resized to its [H, W, C], texts cut into its [T].
/// Neither split is empty. `seed` drives generated sets only. Throws ConfigError as `planned_classes`, Error(data) for
/// missing or damaged files with what to install or which key to set.
DatasetPair open_datasets(const DataOptions& options, const TensorSpec& model_input, std::uint64_t seed);
inline DatasetPair open_datasets(const DataOptions& options, const ModelOptions& model, std::uint64_t seed) {
  return open_datasets(options, model.sample_input, seed);
}

/// A data set, for `list`.
struct DatasetDoc {
  std::string name;
  std::string kind;     ///< "images", "text" or "images, text"
  std::string summary;  ///< one line
  std::string source;   ///< the package, the key that names it, or "generated"
  std::vector<KeyDoc> keys;
};

/// All data sets, in the order of datasets.def.
std::vector<DatasetDoc> dataset_docs();

/// Entropy in nats of the next token of synthetic-learnable text given the one before it: the loss of a perfect model.
double learnable_text_entropy(std::int64_t vocabulary_size);

}  // namespace pdl
