// tokens: files of token ids, as `pdlbench data prepare`, llm.c and nanoGPT write them. Without files to validate on,
// every 10th window validates.

#include <utility>

#include "workloads/token_windows.h"

namespace pdl {
namespace {

void read_keys(const ConfigReader& workload, DataOptions& options) {
  options.path = workload.require<std::string>("path", "token file, or a pattern with * for several");
  options.validation_path =
      workload.get<std::string>("validation_path", "", "token files to validate on; empty: split off path");
  const std::string format =
      workload.choice("format", "llmc", {"llmc", "nanogpt"}, "llmc: with header; nanogpt: bare tokens");
  options.format = format == "nanogpt" ? TokenFormat::nanogpt : TokenFormat::llmc;
  options.vocabulary_size =
      workload.get<std::int64_t>("vocabulary_size", kGpt2Vocabulary, "every token must be below it", {1, 65536});
  read_limits(workload, options, 0, 0);
  read_fraction(workload, options);
}

TokenSequences map_files(const std::string& pattern, const DataOptions& options) {
  auto files = std::make_shared<std::vector<TokenFile>>();
  for (const std::string& path : matching_files(pattern))
    files->emplace_back(path, options.format, options.vocabulary_size);
  TokenSequences tokens;
  for (const TokenFile& file : *files) tokens.sequences.push_back(file.tokens());
  tokens.owner = std::move(files);
  return tokens;
}

DatasetPair open(const DataOptions& options, const TensorSpec& model_input, std::uint64_t) {
  const bool splits = options.validation_path.empty();
  const std::int64_t period = splits ? validation_period(options) : 0;
  const std::int64_t length = model_input.shape[0];
  const std::string& validation_path = splits ? options.path : options.validation_path;
  const TokenSequences tokens = map_files(options.path, options);
  const TokenSequences validation_tokens = splits ? tokens : map_files(validation_path, options);
  return pair_of(
      std::make_unique<TokenWindows>(info_of(options, "train", options.path, options.vocabulary_size), tokens, length,
                                     SplitRule{period, false}, options.train_samples),
      std::make_unique<TokenWindows>(info_of(options, "validation", validation_path, options.vocabulary_size),
                                     validation_tokens, length, SplitRule{period, true}, options.validation_samples));
}

}  // namespace

DatasetDefinition tokens_dataset() {
  return {"tokens", "16-bit token files of llm.c or nanoGPT", "path", SampleKind::text, read_keys, open};
}

}  // namespace pdl
