#include <cmath>
#include <map>
#include <set>

#include "tests/support/catch.h"
#include "workloads/datasets.h"

using namespace pdl;

namespace {

DataOptions options_of(const std::string& data, std::int64_t samples) {
  DataOptions options;
  options.data = data;
  options.vocabulary_size = 512;
  options.classes = 5;
  options.train_samples = samples;
  options.validation_samples = 50;
  return options;
}

const TensorSpec kImages{DType::fp32, Shape{8, 8, 3}};
const TensorSpec kText{DType::int32, Shape{64}};

struct Image {
  std::vector<float> pixels = std::vector<float>(192);
  std::int32_t label = -1;
  bool operator==(const Image&) const = default;
};

Image image(const Dataset& set, std::int64_t id) {
  Image read;
  set.read(id, Tensor(read.pixels.data(), DType::fp32, kImages.shape), Tensor(&read.label, DType::int32, {1}));
  return read;
}

/// The 65 tokens of a sample.
std::vector<std::int32_t> text(const Dataset& set, std::int64_t id) {
  std::vector<std::int32_t> input(64), target(64);
  set.read(id, Tensor(input.data(), DType::int32, kText.shape), Tensor(target.data(), DType::int32, kText.shape));
  for (std::size_t t = 1; t < 64; ++t) CHECK_FALSE(input[t] != target[t - 1]);
  input.push_back(target.back());
  return input;
}

}  // namespace

TEST_CASE("generated sets: what they say of themselves") {
  for (const char* name : {"synthetic", "synthetic-learnable"}) {
    const DatasetPair pair = open_datasets(options_of(name, 200), kText, 7);
    const DatasetInfo info = pair.train->info();
    CHECK(info.name == name);
    CHECK(info.source == "generated");
    CHECK(info.synthetic);
    CHECK(info.samples == 200);
    CHECK(info.classes == 512);
    CHECK(pair.validation->info().split == "validation");
    CHECK(pair.validation->size() == 50);
    CHECK_THAT(info.identity, ContainsSubstring("seed=7"));
  }
  CHECK(open_datasets(options_of("synthetic", 9), kText, 7).train->info().unigram_perplexity == 512);
  const DatasetInfo learnable = open_datasets(options_of("synthetic-learnable", 9), kText, 7).validation->info();
  CHECK(learnable.unigram_perplexity == 256);
  CHECK_THAT(learnable.identity, ContainsSubstring("entropy_nats=1.213"));
  CHECK(open_datasets(options_of("synthetic", 9), kImages, 7).train->info().classes == 5);
}

TEST_CASE("generated sets: a sample follows from seed, split and id alone") {
  for (const char* name : {"synthetic", "synthetic-learnable"}) {
    const DatasetPair one = open_datasets(options_of(name, 200), kImages, 7);
    const DatasetPair same = open_datasets(options_of(name, 300), kImages, 7);
    const DatasetPair other = open_datasets(options_of(name, 200), kImages, 8);
    CHECK(image(*one.train, 150) == image(*same.train, 150));
    CHECK(image(*one.train, 3) == image(*one.train, 3));
    CHECK(image(*one.train, 3) != image(*one.train, 4));
    CHECK(image(*one.train, 3) != image(*one.validation, 3));
    CHECK(image(*one.train, 3) != image(*other.train, 3));
    CHECK_THROWS_AS(image(*one.train, 200), Error);
    const DatasetPair texts = open_datasets(options_of(name, 200), kText, 7);
    CHECK(text(*texts.train, 9) == text(*open_datasets(options_of(name, 10), kText, 7).train, 9));
    CHECK(text(*texts.train, 9) != text(*texts.train, 10));
    CHECK(text(*texts.train, 9) != text(*texts.validation, 9));
    CHECK_THROWS_AS(text(*texts.train, -1), Error);
  }
}

TEST_CASE("synthetic: normal pixels, labels and tokens of the whole range") {
  const DatasetPair pair = open_datasets(options_of("synthetic", 2000), kImages, 7);
  double sum = 0.0, squares = 0.0;
  std::vector<int> labels(5);
  for (std::int64_t id = 0; id < 2000; ++id) {
    const Image read = image(*pair.train, id);
    ++labels.at(static_cast<std::size_t>(read.label));
    for (const float value : read.pixels) {
      sum += value;
      squares += static_cast<double>(value) * value;
    }
  }
  // All come from one pool of 384 numbers, so the moments are those of 384 draws.
  CHECK_THAT(sum / (2000 * 192), WithinAbs(0.0, 0.2));
  CHECK_THAT(squares / (2000 * 192), WithinAbs(1.0, 0.3));
  for (const int count : labels) CHECK_THAT(count, WithinAbs(400, 80));
  const DatasetPair texts = open_datasets(options_of("synthetic", 500), kText, 7);
  std::set<std::int32_t> seen;
  for (std::int64_t id = 0; id < 500; ++id)
    for (const std::int32_t token : text(*texts.train, id)) seen.insert(token);
  CHECK(seen.size() == 512);
  CHECK(*seen.begin() == 0);
  CHECK(*seen.rbegin() == 511);
}

TEST_CASE("learnable images: the nearest class mean of the training images names nearly every validation image") {
  const DatasetPair pair = open_datasets(options_of("synthetic-learnable", 500), kImages, 7);
  std::vector<std::vector<double>> means(5, std::vector<double>(192));
  std::vector<int> counts(5);
  for (std::int64_t id = 0; id < 500; ++id) {
    const Image read = image(*pair.train, id);
    const auto label = static_cast<std::size_t>(read.label);
    ++counts[label];
    for (std::size_t i = 0; i < 192; ++i) means[label][i] += read.pixels[i];
  }
  for (std::size_t label = 0; label < 5; ++label)
    for (double& value : means[label]) value /= counts[label];
  int right = 0;
  for (std::int64_t id = 0; id < 50; ++id) {
    const Image read = image(*pair.validation, id);
    std::size_t nearest = 0;
    double least = 1e300;
    for (std::size_t label = 0; label < 5; ++label) {
      double distance = 0.0;
      for (std::size_t i = 0; i < 192; ++i) distance += std::pow(read.pixels[i] - means[label][i], 2);
      if (distance < least) {
        least = distance;
        nearest = label;
      }
    }
    right += nearest == static_cast<std::size_t>(read.label) ? 1 : 0;
  }
  CHECK(right >= 48);
}

TEST_CASE("learnable text: its transitions have the entropy it claims, and its tokens are equally frequent") {
  const DatasetPair pair = open_datasets(options_of("synthetic-learnable", 4000), kText, 7);
  std::map<std::pair<std::int32_t, std::int32_t>, double> transitions;
  std::map<std::int32_t, double> tokens;
  for (std::int64_t id = 0; id < 4000; ++id) {
    const std::vector<std::int32_t> read = text(*pair.train, id);
    for (std::size_t t = 0; t < 64; ++t) {
      ++transitions[{read[t], read[t + 1]}];
      ++tokens[read[t]];
    }
  }
  CHECK(tokens.size() == 256);
  CHECK(transitions.size() == 4 * 256);
  double entropy = 0.0;
  for (const auto& [pair_of, count] : transitions)
    entropy -= count / (4000.0 * 64) * std::log(count / tokens[pair_of.first]);
  CHECK_THAT(entropy, WithinAbs(learnable_text_entropy(512), 0.01));
  for (const auto& [token, count] : tokens) CHECK_THAT(count, WithinRel(1000.0, 0.2));
  // Validation text follows the same transitions.
  for (std::int64_t id = 0; id < 50; ++id) {
    const std::vector<std::int32_t> read = text(*pair.validation, id);
    for (std::size_t t = 0; t < 64; ++t) CHECK_FALSE(transitions.count({read[t], read[t + 1]}) == 0);
  }
}

TEST_CASE("learnable text: small vocabularies") {
  CHECK(learnable_text_entropy(1) == 0.0);
  CHECK_THAT(learnable_text_entropy(2), WithinRel(std::log(2.0), 1e-12));
  CHECK_THAT(learnable_text_entropy(3), WithinRel(1.0397, 1e-3));
  for (const std::int64_t vocabulary : {1, 2, 3, 5}) {
    DataOptions options = options_of("synthetic-learnable", 20);
    options.vocabulary_size = vocabulary;
    const DatasetPair pair = open_datasets(options, kText, 7);
    for (const std::int32_t token : text(*pair.train, 5)) CHECK_FALSE((token < 0 || token >= vocabulary));
  }
}
