#include "workloads/datasets.h"

#include <algorithm>

#include "tests/engine/data/data_files.h"
#include "workloads/dataset_definition.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

const TensorSpec kImages{DType::fp32, Shape{32, 32, 3}};
const TensorSpec kText{DType::int32, Shape{16}};

DataOptions read(const std::string& workload) {
  const ConfigDocument document = ConfigDocument::parse(workload, "test.json");
  DataOptions options = read_data_options(document.root());
  document.finish();
  return options;
}

std::string refused(const std::string& workload) {
  return failure([&] { read(workload); }, ExitCode::usage);
}

}  // namespace

TEST_CASE("data sets: all are listed with their keys") {
  std::vector<std::string> names;
  for (const DatasetDoc& doc : dataset_docs()) {
    names.push_back(doc.name);
    CHECK_FALSE(doc.summary.empty());
    CHECK_FALSE(doc.source.empty());
    CHECK(std::ranges::any_of(doc.keys, [](const KeyDoc& key) { return key.key == "train_samples"; }));
    for (const KeyDoc& key : doc.keys) CHECK_FALSE(key.doc.empty());
  }
  CHECK(names ==
        std::vector<std::string>{"fashion-mnist", "kjv", "text", "tokens", "idx", "synthetic", "synthetic-learnable"});
}

TEST_CASE("data options: defaults") {
  const DataOptions kjv = read(R"({"data": "kjv"})");
  CHECK(kjv.tokenizer.name == "bytes");
  CHECK(kjv.vocabulary_size == 256);
  CHECK(kjv.train_samples == 0);
  CHECK(validation_period(kjv) == 10);
  CHECK(read(R"({"data": "kjv", "tokenizer": "bpe"})").vocabulary_size == 4096);
  CHECK(read(R"({"data": "kjv", "tokenizer": "gpt2", "merges": "m"})").vocabulary_size == 50257);
  CHECK(read(R"({"data": "fashion-mnist"})").classes == 10);
  CHECK(read(R"({"data": "tokens", "path": "x", "format": "nanogpt"})").format == TokenFormat::nanogpt);
  const DataOptions synthetic = read(R"({"data": "synthetic"})");
  CHECK(synthetic.train_samples == 1024);
  CHECK(synthetic.validation_samples == 128);
}

TEST_CASE("data options: mistakes are told with what would be right") {
  CHECK_THAT(refused(R"({})"), ContainsSubstring("data"));
  CHECK_THAT(refused(R"({"data": "kvj", "some_key": 1})"),
             ContainsSubstring("did you mean \"kjv\"") && !ContainsSubstring("some_key"));
  CHECK_THAT(refused(R"({"data": "kjv", "classes": 10})"), ContainsSubstring("/classes"));
  CHECK_THAT(refused(R"({"data": "kjv", "vocabulary_size": 512})"),
             ContainsSubstring("must be 256 with the tokenizer bytes"));
  CHECK_THAT(refused(R"({"data": "kjv", "tokenizer": "gpt2"})"), ContainsSubstring("merges"));
  CHECK_THAT(refused(R"({"data": "kjv", "merges": "m"})"), ContainsSubstring("no merges"));
  CHECK_THAT(refused(R"({"data": "kjv", "tokenizer": "bpe", "vocabulary_size": 100})"), ContainsSubstring("256"));
  CHECK_THAT(refused(R"({"data": "kjv", "validation_fraction": 0.7})"), ContainsSubstring("0.5"));
  CHECK_THAT(refused(R"({"data": "text"})"), ContainsSubstring("path"));
  CHECK_THAT(refused(R"({"data": "idx", "path": "x"})"), ContainsSubstring("labels_path"));
  CHECK_THAT(refused(R"({"data": "idx", "path": "x", "labels_path": "y", "validation_path": "z"})"),
             ContainsSubstring("validation_labels_path"));
  CHECK_THAT(refused(R"({"data": "tokens", "path": "x", "format": "lmc"})"), ContainsSubstring("llmc"));
  CHECK_THAT(refused(R"({"data": "synthetic", "train_samples": 0})"), ContainsSubstring("at least 1"));
  CHECK_THAT(refused(R"({"data": "fashion-mnist", "classes": 9})"), ContainsSubstring("between 10"));
}

TEST_CASE("data sets: one that the model cannot read is refused, and others are named") {
  const DataOptions kjv = read(R"({"data": "kjv"})"), clothes = read(R"({"data": "fashion-mnist"})");
  CHECK_THAT(failure([&] { open_datasets(kjv, kImages, 1); }, ExitCode::usage),
             StartsWith("/workload/data") && ContainsSubstring("holds text, but the model reads images") &&
                 ContainsSubstring("fashion-mnist, idx, synthetic, synthetic-learnable"));
  CHECK_THAT(failure([&] { open_datasets(clothes, kText, 1); }, ExitCode::usage),
             ContainsSubstring("kjv, text, tokens, synthetic, synthetic-learnable"));
  ModelOptions model;
  model.sample_input = kImages;
  failure([&] { planned_classes(kjv, model); }, ExitCode::usage);
  CHECK(planned_classes(clothes, model) == 10);
  model.sample_input = kText;
  CHECK(planned_classes(kjv, model) == 256);
  CHECK(planned_classes(read(R"({"data": "synthetic", "vocabulary_size": 777})"), model) == 777);
}

TEST_CASE("a split takes every n-th part and leaves the others, each once") {
  for (const std::int64_t period : {2, 3, 10}) {
    for (std::int64_t total = 0; total <= 45; ++total) {
      const SplitRule train{period, false}, validation{period, true};
      std::vector<std::int64_t> parts;
      for (std::int64_t id = 0; id < train.size(total, 0); ++id) parts.push_back(train.part(id));
      CHECK(std::ranges::is_sorted(parts));
      for (std::int64_t id = 0; id < validation.size(total, 0); ++id) parts.push_back(validation.part(id));
      std::ranges::sort(parts);
      std::vector<std::int64_t> all(static_cast<std::size_t>(total));
      for (std::int64_t i = 0; i < total; ++i) all[static_cast<std::size_t>(i)] = i;
      CHECK(parts == all);
    }
  }
  CHECK(SplitRule{10, true}.part(0) == 9);
  CHECK(SplitRule{}.size(20, 7) == 7);
  CHECK(SplitRule{}.size(20, 70) == 20);
}
