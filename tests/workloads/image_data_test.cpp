#include <cmath>
#include <filesystem>
#include <numeric>

#include "tests/engine/data/data_files.h"
#include "workloads/bilinear.h"
#include "workloads/datasets.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

constexpr const char* kFashionMnist = "/usr/share/datasets/fashion-mnist";

TensorSpec images(std::int64_t height, std::int64_t width, std::int64_t channels) {
  return {DType::fp32, Shape{height, width, channels}};
}

std::vector<float> resized(const std::vector<float>& from, int from_height, int from_width, int height, int width) {
  std::vector<float> to(static_cast<std::size_t>(height * width));
  BilinearResize(from_height, from_width, height, width)(from.data(), 1, to.data(), 1, 0.0f, 1.0f);
  return to;
}

struct Sample {
  std::vector<float> pixels;
  std::int32_t label = -1;
};

Sample sample(const Dataset& set, std::int64_t id) {
  Sample read{std::vector<float>(static_cast<std::size_t>(set.input_spec().shape.elements())), -1};
  set.read(id, Tensor(read.pixels.data(), DType::fp32, set.input_spec().shape), Tensor(&read.label, DType::int32, {1}));
  return read;
}

DataOptions idx_options(const DataFiles& files, std::uint32_t count) {
  std::string pixels(4 * count, '\0'), labels(count, '\0');
  std::iota(pixels.begin(), pixels.end(), static_cast<char>(0));
  for (std::uint32_t i = 0; i < count; ++i) labels[i] = static_cast<char>(i % 3);
  DataOptions options;
  options.data = "idx";
  options.path = files.write("images", idx_images(count, 2, 2, pixels));
  options.labels_path = files.write("labels", idx_labels(count, labels));
  options.classes = 3;
  return options;
}

}  // namespace

TEST_CASE("bilinear: the same size changes nothing; twice the size by hand; a constant stays") {
  const std::vector<float> small = {0.0f, 4.0f, 8.0f, 12.0f};  // [2, 2]
  CHECK(resized(small, 2, 2, 2, 2) == small);
  CHECK(resized({0.0f, 4.0f}, 1, 2, 1, 4) == std::vector<float>{0.0f, 1.0f, 3.0f, 4.0f});
  CHECK(resized(small, 2, 2, 4, 4) == std::vector<float>{0, 1, 3, 4, 2, 3, 5, 6, 6, 7, 9, 10, 8, 9, 11, 12});
  CHECK(resized(small, 2, 2, 1, 1) == std::vector<float>{6.0f});
  CHECK(resized({0, 1, 2, 3, 4, 5}, 1, 6, 1, 3) == std::vector<float>{0.5f, 2.5f, 4.5f});
  for (const float value : resized(std::vector<float>(35, 3.0f), 5, 7, 11, 4)) CHECK(value == 3.0f);
}

TEST_CASE("bilinear: one channel goes to all, several keep apart, values are normalised") {
  const std::vector<std::uint8_t> grey = {10, 20};
  std::vector<float> to(6);
  BilinearResize(1, 2, 1, 2)(grey.data(), 1, to.data(), 3, 10.0f, 0.5f);
  CHECK(to == std::vector<float>{0, 0, 0, 5, 5, 5});
  const std::vector<std::uint8_t> colour = {1, 2, 3, 5, 6, 7};
  BilinearResize(1, 2, 1, 2)(colour.data(), 3, to.data(), 3, 0.0f, 1.0f);
  CHECK(to == std::vector<float>{1, 2, 3, 5, 6, 7});
}

TEST_CASE("idx: every 10th image validates; each set is normalised by the whole") {
  const DataFiles files;
  const DatasetPair pair = open_datasets(idx_options(files, 30), images(2, 2, 3), 1);
  CHECK(pair.train->size() == 27);
  CHECK(pair.validation->size() == 3);
  CHECK(pair.train->info().classes == 3);
  CHECK(pair.train->info().identity != pair.validation->info().identity);
  CHECK(sample(*pair.validation, 1).label == 19 % 3);
  CHECK(sample(*pair.train, 9).label == 10 % 3);
  double sum = 0.0, squares = 0.0;
  for (const Dataset* set : {pair.train.get(), pair.validation.get()}) {
    for (std::int64_t id = 0; id < set->size(); ++id) {
      for (const float value : sample(*set, id).pixels) {
        sum += value;
        squares += static_cast<double>(value) * value;
      }
    }
  }
  CHECK_THAT(sum / 360, WithinAbs(0.0, 1e-5));
  CHECK_THAT(squares / 360, WithinAbs(1.0, 1e-5));
}

TEST_CASE("idx: a second pair of files, limits, channels and labels") {
  const DataFiles files;
  DataOptions options = idx_options(files, 30);
  options.validation_path = options.path;
  options.validation_labels_path = options.labels_path;
  options.train_samples = 12;
  const DatasetPair pair = open_datasets(options, images(4, 4, 1), 1);
  CHECK(pair.train->size() == 12);
  CHECK(pair.validation->size() == 30);
  CHECK(pair.train->input_spec().shape == Shape({4, 4, 1}));

  options.classes = 2;
  CHECK_THAT(failure([&] { open_datasets(options, images(4, 4, 1), 1); }), ContainsSubstring("a label below 2, got 2"));
  options.classes = 3;
  options.path = options.validation_path =
      files.write("colour", big_endian(0x804) + big_endian(30) + big_endian(1) + big_endian(1) + big_endian(3) +
                                std::string(90, 'x'));
  CHECK(open_datasets(options, images(1, 1, 3), 1).train->size() == 12);
  CHECK_THAT(failure([&] { open_datasets(options, images(1, 1, 1), 1); }), ContainsSubstring("3 channels"));
}

TEST_CASE("fashion-mnist: a missing file names the package") {
  const DataFiles files;
  DataOptions options;
  options.data = "fashion-mnist";
  options.classes = 10;
  options.path = files.path("nowhere");
  CHECK_THAT(failure([&] { open_datasets(options, images(32, 32, 3), 1); }),
             ContainsSubstring("dataset-fashion-mnist") && ContainsSubstring("\"path\"") &&
                 ContainsSubstring("synthetic-learnable"));
}

TEST_CASE("fashion-mnist: sizes, shapes, mean and deviation") {
  if (!std::filesystem::exists(kFashionMnist)) {
    WARN("skipped: fashion-mnist is not installed (Debian package dataset-fashion-mnist)");
    return;
  }
  DataOptions options;
  options.data = "fashion-mnist";
  options.classes = 10;
  options.path = kFashionMnist;
  const DatasetPair raw = open_datasets(options, images(28, 28, 1), 1);
  REQUIRE(raw.train->size() == 60000);
  REQUIRE(raw.validation->size() == 10000);
  CHECK(raw.train->info().source == "package dataset-fashion-mnist");
  CHECK(raw.train->info().identity == "a4d4bfe8aac4c09e");
  // Black and white after normalising by mean 0.2860 and deviation 0.3530, and both moments of all pixels.
  double sum = 0.0, squares = 0.0;
  float least = 0.0f, most = 0.0f;
  std::vector<int> labels(10);
  for (std::int64_t id = 0; id < raw.train->size(); ++id) {
    const Sample read = sample(*raw.train, id);
    ++labels[static_cast<std::size_t>(read.label)];
    for (const float value : read.pixels) {
      sum += value;
      squares += static_cast<double>(value) * value;
      least = std::min(least, value);
      most = std::max(most, value);
    }
  }
  CHECK_THAT(least, WithinAbs(-0.2860 / 0.3530, 5e-4));
  CHECK_THAT(most, WithinAbs((1.0 - 0.2860) / 0.3530, 5e-4));
  CHECK_THAT(sum / (60000.0 * 784), WithinAbs(0.0, 1e-5));
  CHECK_THAT(squares / (60000.0 * 784), WithinAbs(1.0, 1e-4));
  CHECK(labels == std::vector<int>(10, 6000));
  CHECK(sample(*raw.train, 0).label == 9);

  options.train_samples = 100;
  const DatasetPair colour = open_datasets(options, images(32, 32, 3), 1);
  CHECK(colour.train->size() == 100);
  CHECK(colour.train->input_spec().shape == Shape({32, 32, 3}));
  const Sample read = sample(*colour.train, 0);
  for (std::size_t i = 0; i < read.pixels.size(); i += 3)
    CHECK_FALSE((read.pixels[i] != read.pixels[i + 1] || read.pixels[i] != read.pixels[i + 2]));
}
