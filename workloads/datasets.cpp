#include "workloads/datasets.h"

#include <algorithm>

#include "workloads/dataset_definition.h"

namespace pdl {

#define PDL_DATASET(name) DatasetDefinition name##_dataset();
#include "workloads/datasets.def"
#undef PDL_DATASET

namespace {

constexpr std::int64_t kDefaultBpeVocabulary = 4096;

const std::vector<DatasetDefinition>& definitions() {
  static const std::vector<DatasetDefinition> all = {
#define PDL_DATASET(name) name##_dataset(),
#include "workloads/datasets.def"
#undef PDL_DATASET
  };
  return all;
}

const DatasetDefinition& definition_of(const std::string& name) {
  const auto& all = definitions();
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& set) { return set.name == name; });
  PDL_CHECK(found != all.end(), "data set ", name);
  return *found;
}

std::string kind_text(SampleKind kind) {
  return kind == SampleKind::images ? "images" : kind == SampleKind::text ? "text" : "images, text";
}

// Throws ConfigError unless the set holds what the model reads.
void check_fit(const DataOptions& options, const TensorSpec& model_input) {
  const SampleKind wanted = model_input.dtype == DType::int32 ? SampleKind::text : SampleKind::images;
  PDL_CHECK(model_input.shape.rank() == (wanted == SampleKind::text ? 1 : 3), model_input.shape.to_string());
  const SampleKind held = definition_of(options.data).kind;
  if (held == wanted || held == SampleKind::either) return;
  std::string fitting;
  for (const DatasetDefinition& definition : definitions())
    if (definition.kind == wanted || definition.kind == SampleKind::either)
      fitting += (fitting.empty() ? "" : ", ") + definition.name;
  throw ConfigError(
      {Problem{"/workload/data", str("\"", options.data, "\" holds ", kind_text(held), ", but the model reads ",
                                     kind_text(wanted), "; choose one of ", fitting)}});
}

// The size that a tokenizer's vocabulary has whatever the configuration says, or 0.
std::int64_t fixed_vocabulary(const std::string& tokenizer) {
  return tokenizer == "bytes" ? kByteValues : tokenizer == "gpt2" ? kGpt2Vocabulary : 0;
}

}  // namespace

DataOptions read_data_options(const ConfigReader& workload) {
  constexpr const char* kDoc = "data set: one of `pdlbench list datasets`";
  std::vector<std::string> names;
  for (const DatasetDefinition& definition : definitions()) names.push_back(definition.name);
  DataOptions options;
  options.data = workload.require_choice("data", names, kDoc);
  // Without a valid name nobody knows which of the other keys are right.
  if (!workload.has("data") || workload.get<std::string>("data", "", kDoc) != options.data) {
    workload.leave_unjudged();
    return options;
  }
  definition_of(options.data).read(workload, options);
  return options;
}

std::int64_t planned_classes(const DataOptions& options, const ModelOptions& model) {
  check_fit(options, model.sample_input);
  return model.sample_input.dtype == DType::int32 ? options.vocabulary_size : options.classes;
}

DatasetPair open_datasets(const DataOptions& options, const TensorSpec& model_input, std::uint64_t seed) {
  check_fit(options, model_input);
  return definition_of(options.data).open(options, model_input, seed);
}

std::vector<DatasetDoc> dataset_docs() {
  std::vector<DatasetDoc> docs;
  for (const DatasetDefinition& definition : definitions()) {
    const ConfigDocument empty = ConfigDocument::parse("{}", definition.name);
    DataOptions options;
    definition.read(empty.root(), options);
    docs.push_back(
        {definition.name, kind_text(definition.kind), definition.summary, definition.source, empty.root().docs()});
  }
  return docs;
}

void read_limits(const ConfigReader& workload, DataOptions& options, std::int64_t train, std::int64_t validation) {
  const double least = train == 0 ? 0 : 1;
  const char* meaning = train == 0 ? "at most so many samples; 0: all" : "so many samples are generated";
  options.train_samples =
      workload.get<std::int64_t>("train_samples", train, str("training: ", meaning), {.min = least});
  options.validation_samples =
      workload.get<std::int64_t>("validation_samples", validation, str("validation: ", meaning), {.min = least});
}

void read_fraction(const ConfigReader& workload, DataOptions& options) {
  options.validation_fraction =
      workload.get<double>("validation_fraction", 0.1, "every round(1/fraction)-th part validates", {0.001, 0.5});
}

void read_tokenizer(const ConfigReader& workload, DataOptions& options) {
  TokenizerOptions& tokenizer = options.tokenizer;
  tokenizer.name = workload.choice("tokenizer", "bytes", {"bytes", "bpe", "gpt2"}, "what the text is cut into");
  const std::int64_t fixed = fixed_vocabulary(tokenizer.name);
  tokenizer.vocabulary_size = workload.get<std::int64_t>(
      "vocabulary_size", fixed != 0 ? fixed : kDefaultBpeVocabulary,
      "tokens of the vocabulary: always 256 for bytes, 50257 for gpt2", {static_cast<double>(kByteValues), 65536});
  if (fixed != 0 && tokenizer.vocabulary_size != fixed) {
    workload.problem("vocabulary_size", str("must be ", fixed, " with the tokenizer ", tokenizer.name, ", got ",
                                            tokenizer.vocabulary_size));
    tokenizer.vocabulary_size = fixed;
  }
  options.vocabulary_size = tokenizer.vocabulary_size;
  tokenizer.merges =
      workload.get<std::string>("merges", "", "GPT-2's merges file, or for bpe one to use in place of training");
  if (tokenizer.name == "gpt2" && tokenizer.merges.empty())
    workload.problem("merges", "the tokenizer gpt2 needs the path of GPT-2's merges file (merges.txt or vocab.bpe)");
  if (tokenizer.name == "bytes" && !tokenizer.merges.empty())
    workload.problem("merges", "the tokenizer bytes has no merges; choose bpe or gpt2, or leave the key out");
}

DatasetInfo info_of(const DataOptions& options, const std::string& split, const std::string& source,
                    std::int64_t classes) {
  DatasetInfo info;
  info.name = options.data;
  info.split = split;
  info.source = source;
  info.classes = classes;
  return info;
}

}  // namespace pdl
