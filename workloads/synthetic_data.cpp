// synthetic:            random images or tokens that depend on (seed, split, id) alone; for timing, nothing can be
// learnt. synthetic-learnable:  images around one fixed pattern per class; text of a Markov chain of known entropy.
// Both are cheap to make, so that a timing run is not bound by them: images take their normal numbers from one pool,
// each sample at an offset of its own.

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "engine/base/random.h"
#include "workloads/bilinear.h"
#include "workloads/dataset_definition.h"

namespace pdl {
namespace {

// Streams of RandomUse::synthetic: samples count from 0 and from kValidationIds, the rest has ids of its own.
constexpr std::uint64_t kValidationIds = std::uint64_t{1} << 40;
constexpr std::uint64_t kPoolId = std::uint64_t{1} << 50;
constexpr std::uint64_t kPatternIds = std::uint64_t{1} << 51;
constexpr std::uint64_t kChainIds = std::uint64_t{1} << 52;

/// Which numbers a split is made of.
struct Source {
  std::uint64_t seed = 0, first_id = 0;
  RandomStream of_sample(std::int64_t id) const {
    return {seed, RandomUse::synthetic, first_id + static_cast<std::uint64_t>(id)};
  }
};

/// Standard normal numbers, twice as many as a sample has elements.
class NormalPool {
 public:
  NormalPool(std::uint64_t seed, std::int64_t elements) : elements_(elements) {
    const RandomStream stream(seed, RandomUse::synthetic, kPoolId);
    values_.resize(static_cast<std::size_t>(2 * elements));
    for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = static_cast<float>(stream.normal(i));
  }
  /// `elements` numbers; which ones is decided by element `index` of `stream`.
  const float* draw(const RandomStream& stream, std::uint64_t index) const {
    return values_.data() + stream.below(index, static_cast<std::uint32_t>(elements_));
  }

 private:
  std::int64_t elements_;
  std::vector<float> values_;
};

/// A smooth pattern of unit variance for each class, drawn on a coarse grid.
class ClassPatterns {
 public:
  ClassPatterns(std::uint64_t seed, std::int64_t classes, const Shape& image)
      : enlarge_(kGrid, kGrid, image[0], image[1]), channels_(image[2]) {
    const auto values = static_cast<std::uint64_t>(kGrid * kGrid * channels_);
    for (std::int64_t label = 0; label < classes; ++label) {
      const RandomStream stream(seed, RandomUse::synthetic, kPatternIds + static_cast<std::uint64_t>(label));
      for (std::uint64_t i = 0; i < values; ++i) grids_.push_back(static_cast<float>(stream.normal(i)));
    }
  }
  void draw(std::int64_t label, float* image) const {
    enlarge_(grids_.data() + label * kGrid * kGrid * channels_, channels_, image, channels_, 0.0f, 1.0f);
  }

 private:
  static constexpr std::int64_t kGrid = 4;
  BilinearResize enlarge_;
  std::int64_t channels_;
  std::vector<float> grids_;  // [classes, grid, grid, C]
};

/// Noise of unit variance, on the pattern of the label if there are patterns.
class GeneratedImages final : public Dataset {
 public:
  GeneratedImages(DatasetInfo info, Source source, const Shape& shape, bool learnable)
      : info_(std::move(info)), source_(source), shape_(shape), noise_(source.seed, shape.elements()) {
    if (learnable) patterns_.emplace(source.seed, info_.classes, shape);
  }

  DatasetInfo info() const override { return info_; }
  std::int64_t size() const override { return info_.samples; }
  TensorSpec input_spec() const override { return {DType::fp32, shape_}; }
  TensorSpec target_spec() const override { return {DType::int32, Shape{1}}; }

  void read(std::int64_t id, Tensor input, Tensor target) const override {
    PDL_CHECK(id >= 0 && id < info_.samples, "sample ", id, " of ", info_.samples);
    const RandomStream stream = source_.of_sample(id);
    const auto label = static_cast<std::int32_t>(stream.below(0, static_cast<std::uint32_t>(info_.classes)));
    *target.data<std::int32_t>() = label;
    const float* noise = noise_.draw(stream, 1);
    auto* image = input.data<float>();
    if (!patterns_) {
      std::copy_n(noise, shape_.elements(), image);
      return;
    }
    patterns_->draw(label, image);
    for (std::int64_t i = 0; i < shape_.elements(); ++i) image[i] += noise[i];
  }

 private:
  DatasetInfo info_;
  Source source_;
  Shape shape_;
  NormalPool noise_;
  std::optional<ClassPatterns> patterns_;
};

constexpr std::int64_t kMostStates = 256;  // few enough that a short run sees each transition many times
constexpr std::int64_t kMostSuccessors = 4;

std::int64_t chain_states(std::int64_t vocabulary) { return std::min(vocabulary, kMostStates); }
std::int64_t chain_successors(std::int64_t vocabulary) { return std::min(chain_states(vocabulary), kMostSuccessors); }

/// After each token comes one of a few fixed ones, with probabilities 1/2, 1/4, 1/8, 1/8. The j-th successor is a
/// permutation of the tokens, so that over a long text every token is equally frequent.
class MarkovChain {
 public:
  MarkovChain(std::uint64_t seed, std::int64_t vocabulary)
      : states_(chain_states(vocabulary)), successors_(chain_successors(vocabulary)) {
    const std::vector<std::int64_t> place_of = random_permutation(states_, seed, kChainIds);
    const std::vector<std::int64_t> token_at = random_permutation(states_, seed, kChainIds + 1);
    const std::vector<std::int64_t> shifts = random_permutation(states_, seed, kChainIds + 2);
    for (const std::int64_t place : place_of) {
      for (std::int64_t j = 0; j < successors_; ++j) {
        // Shifts differ, and so do the successors of one token.
        const std::int64_t shifted = (place + shifts[static_cast<std::size_t>(j)]) % states_;
        next_.push_back(static_cast<std::int32_t>(token_at[static_cast<std::size_t>(shifted)]));
      }
    }
  }
  std::int32_t first(const RandomStream& stream) const {
    return static_cast<std::int32_t>(stream.below(0, static_cast<std::uint32_t>(states_)));
  }
  std::int32_t after(std::int32_t token, const RandomStream& stream, std::uint64_t position) const {
    const std::uint32_t eighth = stream.below(position, 8);
    const std::int64_t rank = eighth < 4 ? 0 : eighth < 6 ? 1 : eighth < 7 ? 2 : 3;
    return next_[static_cast<std::size_t>(token * successors_ + std::min(rank, successors_ - 1))];
  }

 private:
  std::int64_t states_, successors_;
  std::vector<std::int32_t> next_;  // [states, successors]
};

/// Tokens drawn each by itself, or from the chain if there is one.
class GeneratedTokens final : public Dataset {
 public:
  GeneratedTokens(DatasetInfo info, Source source, std::int64_t length, bool learnable)
      : info_(std::move(info)), source_(source), length_(length) {
    if (learnable) chain_.emplace(source.seed, info_.classes);
  }

  DatasetInfo info() const override { return info_; }
  std::int64_t size() const override { return info_.samples; }
  TensorSpec input_spec() const override { return {DType::int32, Shape{length_}}; }
  TensorSpec target_spec() const override { return input_spec(); }

  void read(std::int64_t id, Tensor input, Tensor target) const override {
    PDL_CHECK(id >= 0 && id < info_.samples, "sample ", id, " of ", info_.samples);
    const RandomStream stream = source_.of_sample(id);
    const auto vocabulary = static_cast<std::uint32_t>(info_.classes);
    const auto uniform = [&](std::uint64_t position) {
      return static_cast<std::int32_t>(stream.below(position, vocabulary));
    };
    auto* inputs = input.data<std::int32_t>();
    auto* targets = target.data<std::int32_t>();
    std::int32_t token = chain_ ? chain_->first(stream) : uniform(0);
    for (std::int64_t t = 0; t < length_; ++t) {
      const auto position = static_cast<std::uint64_t>(t) + 1;
      inputs[t] = token;
      token = chain_ ? chain_->after(token, stream, position) : uniform(position);
      targets[t] = token;
    }
  }

 private:
  DatasetInfo info_;
  Source source_;
  std::int64_t length_;
  std::optional<MarkovChain> chain_;
};

std::unique_ptr<Dataset> make_split(const DataOptions& options, const TensorSpec& model_input, std::uint64_t seed,
                                    bool validation, bool learnable) {
  const bool text = model_input.dtype == DType::int32;
  const std::int64_t classes = text ? options.vocabulary_size : options.classes;
  DatasetInfo info = info_of(options, validation ? "validation" : "train", "generated", classes);
  info.synthetic = true;
  info.samples = validation ? options.validation_samples : options.train_samples;
  PDL_CHECK(info.samples >= 1 && classes >= 1, info.samples, " samples of ", classes, " classes");
  info.identity =
      str("seed=", seed, " sample=", model_input.shape.to_string(), text ? " vocabulary=" : " classes=", classes);
  const Source source{seed, validation ? kValidationIds : 0};
  if (!text) {
    if (learnable) info.identity += " signal_to_noise=1";
    return std::make_unique<GeneratedImages>(std::move(info), source, model_input.shape, learnable);
  }
  const std::int64_t states = learnable ? chain_states(classes) : classes;
  info.unigram_perplexity = static_cast<double>(states);
  if (learnable)
    info.identity += str(" states=", states, " successors=", chain_successors(classes),
                         " entropy_nats=", learnable_text_entropy(classes));
  return std::make_unique<GeneratedTokens>(std::move(info), source, model_input.shape[0], learnable);
}

DatasetPair open_random(const DataOptions& options, const TensorSpec& model_input, std::uint64_t seed) {
  return {make_split(options, model_input, seed, false, false), make_split(options, model_input, seed, true, false)};
}

DatasetPair open_learnable(const DataOptions& options, const TensorSpec& model_input, std::uint64_t seed) {
  return {make_split(options, model_input, seed, false, true), make_split(options, model_input, seed, true, true)};
}

void read_keys(const ConfigReader& workload, DataOptions& options) {
  options.vocabulary_size = workload.get<std::int64_t>("vocabulary_size", 256, "of text", {1, 1e6});
  options.classes = workload.get<std::int64_t>("classes", 10, "of images", {1, 1e6});
  read_limits(workload, options, 1024, 128);
}

}  // namespace

double learnable_text_entropy(std::int64_t vocabulary_size) {
  switch (chain_successors(vocabulary_size)) {
    case 1:
      return 0.0;
    case 2:
      return std::log(2.0);  // 1/2, 1/2
    case 3:
      return 1.5 * std::log(2.0);  // 1/2, 1/4, 1/4
    default:
      return 1.75 * std::log(2.0);  // 1/2, 1/4, 1/8, 1/8
  }
}

DatasetDefinition synthetic_dataset() {
  return {"synthetic", "fixed random images or tokens, for timing", "generated", SampleKind::either, read_keys,
          open_random};
}

DatasetDefinition synthetic_learnable_dataset() {
  return {"synthetic-learnable",
          "images around a pattern per class; text of a Markov chain of known entropy",
          "generated",
          SampleKind::either,
          read_keys,
          open_learnable};
}

}  // namespace pdl
