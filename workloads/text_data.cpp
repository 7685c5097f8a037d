// kjv:   the King James Bible; every 10th chapter validates.
// text:  any UTF-8 file; every 10th block of about 8 KiB validates, or a second file does.
// The tokenizer is trained, where it is, on the training part alone.

#include <utility>

#include "engine/data/text_source.h"
#include "workloads/token_windows.h"

namespace pdl {
namespace {

DatasetPair open_texts(const DataOptions& options, const TensorSpec& model_input, const TextSplit& text,
                       const std::string& train_source, const std::string& validation_source) {
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(options.tokenizer, text.train);
  const std::int64_t vocabulary = tokenizer->vocabulary_size();
  // A plan, which opens no file, must come to the same model.
  if (vocabulary != options.vocabulary_size)
    throw ConfigError(
        {Problem{"/workload/vocabulary_size", str("is ", options.vocabulary_size, ", but the merges file ",
                                                  options.tokenizer.merges, " makes a vocabulary of ", vocabulary)}});
  const auto windows = [&](const char* split, const std::string& source, const std::string& part, std::int64_t limit) {
    std::vector<Token> tokens;
    tokenizer->encode(part, tokens);
    return std::make_unique<TokenWindows>(info_of(options, split, source, vocabulary), sequence_of(std::move(tokens)),
                                          model_input.shape[0], SplitRule{}, limit);
  };
  return pair_of(windows("train", train_source, text.train, options.train_samples),
                 windows("validation", validation_source, text.validation, options.validation_samples));
}

void read_common_keys(const ConfigReader& workload, DataOptions& options) {
  read_tokenizer(workload, options);
  read_limits(workload, options, 0, 0);
  read_fraction(workload, options);
}

void read_kjv_keys(const ConfigReader& workload, DataOptions& options) {
  options.path =
      workload.get<std::string>("path", "", "file with the output of `bible -f gen1:1-rev22:21`; empty: run it");
  read_common_keys(workload, options);
}

DatasetPair open_kjv(const DataOptions& options, const TensorSpec& model_input, std::uint64_t) {
  const TextPieces kjv = read_kjv(options.path);
  const TextSplit text = split_every_nth(kjv.pieces, validation_period(options));
  return open_texts(options, model_input, text, kjv.source, kjv.source);
}

void read_text_keys(const ConfigReader& workload, DataOptions& options) {
  options.path = workload.require<std::string>("path", "UTF-8 text file, plain or gzip");
  options.validation_path =
      workload.get<std::string>("validation_path", "", "text to validate on; empty: split off path");
  read_common_keys(workload, options);
}

DatasetPair open_text(const DataOptions& options, const TensorSpec& model_input, std::uint64_t) {
  const bool splits = options.validation_path.empty();
  const TextPieces blocks = read_text_blocks(options.path);
  TextSplit text = split_every_nth(blocks.pieces, splits ? validation_period(options) : 0);
  if (!splits) text.validation = split_every_nth(read_text_blocks(options.validation_path).pieces, 0).train;
  return open_texts(options, model_input, text, options.path, splits ? options.path : options.validation_path);
}

}  // namespace

DatasetDefinition kjv_dataset() {
  return {"kjv",
          "King James Bible: 31,102 verses, 4.0 MB of text",
          str("package ", kKjvPackage),
          SampleKind::text,
          read_kjv_keys,
          open_kjv};
}

DatasetDefinition text_dataset() {
  return {"text", "a UTF-8 text file", "path", SampleKind::text, read_text_keys, open_text};
}

}  // namespace pdl
