// fashion-mnist:  60,000 + 10,000 grey images 28 x 28 of 10 classes (Xiao, Rasul, Vollgraf 2017).
// idx:            any pair of IDX files; without a second pair, every 10th image validates.
// Images stay in memory as bytes; resizing, spreading over channels and normalising happen when a sample is read.

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <memory>
#include <utility>

#include "engine/data/content_hash.h"
#include "engine/data/idx_reader.h"
#include "workloads/bilinear.h"
#include "workloads/dataset_definition.h"

namespace pdl {
namespace {

constexpr const char* kFashionMnistPackage = "dataset-fashion-mnist";
constexpr const char* kFashionMnistPath = "/usr/share/datasets/fashion-mnist";

/// Of pixels as numbers from 0 to 1.
struct PixelStatistics {
  double mean = 0.0, deviation = 1.0;
};

PixelStatistics statistics_of(const std::vector<std::uint8_t>& pixels) {
  std::array<std::int64_t, 256> counts{};
  for (const std::uint8_t pixel : pixels) ++counts[pixel];
  double sum = 0.0, squares = 0.0;
  for (std::size_t value = 0; value < counts.size(); ++value) {
    const double level = static_cast<double>(value) / 255.0;
    sum += static_cast<double>(counts[value]) * level;
    squares += static_cast<double>(counts[value]) * level * level;
  }
  const auto total = static_cast<double>(pixels.size());
  const double mean = sum / total;
  const double variance = squares / total - mean * mean;
  // A set of one colour has nothing to normalise.
  return {mean, variance > 1e-12 ? std::sqrt(variance) : 1.0};
}

class ImageSet final : public Dataset {
 public:
  /// `info` brings name, split, source and classes. `output` is [H, W, C].
  ImageSet(DatasetInfo info, std::shared_ptr<const IdxSet> set, const Shape& output, PixelStatistics statistics,
           SplitRule rule, std::int64_t limit)
      : info_(std::move(info)),
        set_(std::move(set)),
        output_(output),
        resize_(set_->images.height, set_->images.width, output[0], output[1]),
        mean_(static_cast<float>(255.0 * statistics.mean)),
        scale_(static_cast<float>(1.0 / (255.0 * statistics.deviation))),
        rule_(rule) {
    const IdxImages& images = set_->images;
    if (images.channels != 1 && images.channels != output[2])
      throw Error(str(info_.source, ": images of ", images.channels, " channels for a model that reads ", output[2]),
                  ExitCode::data);
    info_.samples = rule.size(images.count, limit);
    if (info_.samples == 0)
      throw Error(str(info_.source, ": ", images.count, " images leave no ", info_.split, " sample"), ExitCode::data);
    ContentHash hash;
    for (std::int64_t id = 0; id < info_.samples; ++id) {
      hash.add(pixels(id), static_cast<std::size_t>(images.bytes_per_image()));
      hash.add(&set_->labels[static_cast<std::size_t>(rule_.part(id))], 1);
    }
    info_.identity = hash.hex();
  }

  DatasetInfo info() const override { return info_; }
  std::int64_t size() const override { return info_.samples; }
  TensorSpec input_spec() const override { return {DType::fp32, output_}; }
  TensorSpec target_spec() const override { return {DType::int32, Shape{1}}; }

  void read(std::int64_t id, Tensor input, Tensor target) const override {
    PDL_CHECK(id >= 0 && id < info_.samples, "sample ", id, " of ", info_.samples);
    PDL_CHECK(input.elements() == output_.elements() && target.elements() == 1, input.shape().to_string());
    resize_(pixels(id), set_->images.channels, input.data<float>(), output_[2], mean_, scale_);
    *target.data<std::int32_t>() = set_->labels[static_cast<std::size_t>(rule_.part(id))];
  }

 private:
  const std::uint8_t* pixels(std::int64_t id) const {
    return set_->images.pixels.data() + rule_.part(id) * set_->images.bytes_per_image();
  }

  DatasetInfo info_;
  std::shared_ptr<const IdxSet> set_;
  Shape output_;
  BilinearResize resize_;
  float mean_, scale_;
  SplitRule rule_;
};

DatasetPair make_pair(const DataOptions& options, const Shape& output, IdxSet train, const std::string& train_source,
                      IdxSet validation, const std::string& validation_source) {
  const bool splits = validation.labels.empty();
  const std::int64_t period = splits ? validation_period(options) : 0;
  const auto train_set = std::make_shared<const IdxSet>(std::move(train));
  const auto validation_set = splits ? train_set : std::make_shared<const IdxSet>(std::move(validation));
  const PixelStatistics statistics = statistics_of(train_set->images.pixels);
  return {std::make_unique<ImageSet>(info_of(options, "train", train_source, options.classes), train_set, output,
                                     statistics, SplitRule{period, false}, options.train_samples),
          std::make_unique<ImageSet>(info_of(options, "validation", validation_source, options.classes), validation_set,
                                     output, statistics, SplitRule{period, true}, options.validation_samples)};
}

void read_fashion_mnist_keys(const ConfigReader& workload, DataOptions& options) {
  options.path = workload.get<std::string>("path", kFashionMnistPath, "folder of the four IDX files, plain or gzip");
  options.classes = workload.get<std::int64_t>("classes", 10, "outputs of the model; the set has 10", {10, 1e6});
  read_limits(workload, options, 0, 0);
}

// The file as packaged or unpacked.
std::string fashion_mnist_file(const std::string& folder, const std::string& name) {
  for (const char* ending : {".gz", ""}) {
    const std::string path = str(folder, "/", name, ending);
    if (std::error_code ignored; std::filesystem::exists(path, ignored)) return path;
  }
  throw Error(str(folder, "/", name, ".gz: no such file: install the Debian package ", kFashionMnistPackage,
                  ", or name the folder that holds the four IDX files as \"path\", or use the data set "
                  "synthetic-learnable"),
              ExitCode::data);
}

DatasetPair open_fashion_mnist(const DataOptions& options, const TensorSpec& model_input, std::uint64_t) {
  const std::string folder = options.path.empty() ? kFashionMnistPath : options.path;
  const auto read_part = [&](const std::string& part) {
    return read_idx_set(fashion_mnist_file(folder, part + "-images-idx3-ubyte"),
                        fashion_mnist_file(folder, part + "-labels-idx1-ubyte"), 10);
  };
  const std::string source = folder == kFashionMnistPath ? str("package ", kFashionMnistPackage) : folder;
  return make_pair(options, model_input.shape, read_part("train"), source, read_part("t10k"), source);
}

void read_idx_keys(const ConfigReader& workload, DataOptions& options) {
  options.path = workload.require<std::string>("path", "IDX file of images, plain or gzip");
  options.labels_path = workload.require<std::string>("labels_path", "IDX file of their labels");
  options.validation_path =
      workload.get<std::string>("validation_path", "", "images to validate on; empty: split off path");
  options.validation_labels_path = workload.get<std::string>("validation_labels_path", "", "labels of validation_path");
  if (options.validation_path.empty() != options.validation_labels_path.empty())
    workload.problem("validation_labels_path", "goes together with validation_path: set both or none");
  options.classes = workload.get<std::int64_t>("classes", 10, "classes; every label must be below it", {1, 1e6});
  read_limits(workload, options, 0, 0);
  read_fraction(workload, options);
}

DatasetPair open_idx(const DataOptions& options, const TensorSpec& model_input, std::uint64_t) {
  IdxSet validation;
  if (!options.validation_path.empty())
    validation = read_idx_set(options.validation_path, options.validation_labels_path, options.classes);
  return make_pair(options, model_input.shape, read_idx_set(options.path, options.labels_path, options.classes),
                   options.path, std::move(validation),
                   options.validation_path.empty() ? options.path : options.validation_path);
}

}  // namespace

DatasetDefinition fashion_mnist_dataset() {
  return {"fashion-mnist",
          "60,000 + 10,000 grey images of 10 kinds of clothing",
          str("package ", kFashionMnistPackage),
          SampleKind::images,
          read_fashion_mnist_keys,
          open_fashion_mnist};
}

DatasetDefinition idx_dataset() {
  return {"idx", "images and labels in IDX files", "path", SampleKind::images, read_idx_keys, open_idx};
}

}  // namespace pdl
