// Which numbers of ranks can divide a model, and what they send: the published models against formulas worked out by
// hand.

#include "parallel/shard/tensor_parallel.h"
#include "tests/support/catch.h"
#include "workloads/models.h"

using namespace pdl;

namespace {

ModelDescription model_of(const std::string& workload, std::int64_t outputs) {
  const ConfigDocument document = ConfigDocument::parse("{" + workload + "}", "test.json");
  const ModelOptions options = read_model_options(document.root());
  document.finish();
  ModelDescription model = make_model(options, outputs);
  model.name = options.name;
  return model;
}

ModelDescription gpt2_medium() { return model_of(R"("model": "gpt2-medium", "sequence_length": 1024)", 50257); }
ModelDescription vgg16() { return model_of(R"("model": "vgg16")", 1000); }

std::int64_t bytes_of(const CommCounts& counts) {
  std::int64_t bytes = 0;
  for (const auto& [name, count] : counts) bytes += count.bytes;
  return bytes;
}

}  // namespace

TEST_CASE("published models divide over the numbers of ranks that their heads and channels allow") {
  const auto legal = [](const ModelDescription& model, SpreadOver spread) {
    std::vector<int> numbers;
    for (int parts = 1; parts <= 130; ++parts) {
      if (obstacle_to_tensor_parallel(model, spread, parts).empty()) numbers.push_back(parts);
    }
    return numbers;
  };
  CHECK(legal(gpt2_medium(), SpreadOver::none) == std::vector<int>{1, 2, 4, 8, 16});
  CHECK(legal(gpt2_medium(), SpreadOver::sequence) == std::vector<int>{1, 2, 4, 8, 16});
  CHECK(legal(vgg16(), SpreadOver::none) == std::vector<int>{1, 2, 4, 8, 16, 32, 64});
  CHECK(legal(vgg16(), SpreadOver::samples) == std::vector<int>{1, 2, 4, 8, 16, 32, 64, 128});
}

TEST_CASE("an impossible number of ranks is told with its reason and the nearest that can") {
  const auto told = [](const ModelDescription& model, SpreadOver spread, int parts) {
    return obstacle_to_tensor_parallel(model, spread, parts);
  };
  CHECK(told(gpt2_medium(), SpreadOver::none, 3) == "it does not divide the 16 heads of h.0.attn; nearest: 2 or 4");
  CHECK(told(gpt2_medium(), SpreadOver::none, 32) == "it does not divide the 16 heads of h.0.attn; nearest: 16");
  CHECK(told(vgg16(), SpreadOver::none, 3) ==
        "it does not divide the 64 output channels of features.0; nearest: 2 or 4");
  const ModelDescription odd = model_of(R"("model": "gpt2-tiny", "heads": 4, "sequence_length": 34)", 5);
  CHECK(told(odd, SpreadOver::none, 4) == "");
  CHECK(told(odd, SpreadOver::sequence, 4) == "it does not divide the 34 tokens of a sequence; nearest: 2");
  const ModelDescription few = model_of(R"("model": "gpt2-tiny", "heads": 8)", 5);
  CHECK(told(few, SpreadOver::none, 8) == "it is more than the vocabulary of 5; nearest: 4");
  CHECK(told(vgg16(), SpreadOver::sequence, 2) == "vgg16 has no sequences");
  CHECK(told(gpt2_medium(), SpreadOver::samples, 2) == "gpt2-medium has no convolutions");
  CHECK(told(model_of(R"("model": "vgg11", "classifier_width": 0)", 10), SpreadOver::samples, 2) ==
        "vgg11 has no pair of layers to divide; nearest: 1");
}

TEST_CASE("a GPT-2 block sends 8 (t-1)/t s b h elements, with spread sequences a quarter more") {
  const ModelDescription model = gpt2_medium();
  constexpr std::int64_t kSamples = 4, kMiB = 1 << 20;
  for (const int t : {2, 4, 8}) {
    const std::int64_t unit = (t - 1) * (kSamples * 1024 * 1024 * 2) / t;  // bf16
    const TensorTraffic plain = tensor_traffic(model, SpreadOver::none, t, 1, 2, kSamples, DType::bf16);
    CHECK(plain.forward.at("all_reduce").calls == 2);
    CHECK(bytes_of(plain.forward) == 4 * unit);
    CHECK(bytes_of(plain.backward) == 4 * unit);
    const TensorTraffic spread = tensor_traffic(model, SpreadOver::sequence, t, 1, 2, kSamples, DType::bf16);
    CHECK(bytes_of(spread.forward) == 4 * unit);
    CHECK(bytes_of(spread.backward) == 6 * unit);
  }
  // All 24 blocks of one sample.
  const TensorTraffic blocks = tensor_traffic(model, SpreadOver::none, 4, 1, 25, 1, DType::bf16);
  CHECK(bytes_of(blocks.forward) + bytes_of(blocks.backward) == 288 * kMiB);
  // Embedding; head and loss: one sum each, and four numbers of each prediction from each of the others.
  const TensorTraffic embedding = tensor_traffic(model, SpreadOver::none, 4, 0, 1, 1, DType::bf16);
  CHECK(bytes_of(embedding.forward) == 2 * 3 * 1024 * 1024 * 2 / 4);
  CHECK(embedding.backward.empty());
  const TensorTraffic head = tensor_traffic(model, SpreadOver::none, 4, 26, 28, 1, DType::bf16);
  CHECK(bytes_of(head.backward) == 2 * 3 * 1024 * 1024 * 2 / 4);
  CHECK(bytes_of(head.forward) == 3 * 1024 * 4 * 4);
  CHECK(tensor_traffic(model, SpreadOver::none, 1, 0, 28, 1, DType::bf16).forward.empty());
}

TEST_CASE("VGG-16 in pairs adds up 6.5 million elements of a sample forward and 2.6 million backward") {
  const TensorTraffic traffic = tensor_traffic(vgg16(), SpreadOver::none, 2, 0, 100, 1, DType::fp32);
  CHECK(bytes_of(traffic.forward) == 4 * std::int64_t{6527976});  // 2 (t-1)/t = 1
  CHECK(bytes_of(traffic.backward) == 4 * std::int64_t{2613248});
  // The classifier alone: gather 25088 inputs of each sample, twice, and add up what it made of them.
  const TensorTraffic classifier = tensor_traffic(vgg16(), SpreadOver::samples, 2, 0, 100, 8, DType::fp32);
  CHECK(bytes_of(classifier.forward) == 4 * std::int64_t{8} * (25088 + 4096));
  CHECK(bytes_of(classifier.backward) == 4 * std::int64_t{8} * (2 * 25088 + 4096));
}

TEST_CASE("a rank keeps its share of parameters and activations, known without any other rank") {
  const ModelDescription model =
      model_of(R"("model": "gpt2-medium", "sequence_length": 1024, "make_vocab_size_divisible_by": 64)", 50257);
  constexpr std::int64_t kWidth = 1024, kLayers = 24, kTokens = 1024, kHeads = 16, kRows = 50304, kSize = 2;  // bf16
  for (const int t : {1, 2, 4, 8}) {
    for (const SpreadOver spread : {SpreadOver::none, SpreadOver::sequence}) {
      INFO(t << " ranks, spread " << static_cast<int>(spread));
      const TensorGroup group = {.rank = t - 1, .size = t};
      const LayerList layers = model.build(TensorParallelFactory(group, spread));
      const std::vector<LayerInfo> infos = describe_layers(layers, model.sample_input, DType::bf16);
      std::int64_t parameters = 0;
      for (const LayerInfo& info : infos) parameters += info.parameters;
      const std::int64_t matrices = kRows * kWidth + kLayers * (12 * kWidth * kWidth + 7 * kWidth);
      CHECK(parameters == matrices / t + 6 * kWidth * kLayers + kTokens * kWidth + 2 * kWidth);
      // Of a block: two norms, residual sum and output, of all tokens or some; 12 widths and the attention's statistics
      // divided; four statistics of each token. There are no masks to keep.
      const std::int64_t tokens = spread == SpreadOver::none ? kTokens : kTokens / t;
      CHECK(infos[1].saved_bytes == 4 * tokens * kWidth * kSize + 12 * kTokens * kWidth * kSize / t + 4 * tokens * 4 +
                                        kTokens * kHeads / t * 4);
      CHECK(infos[1].output == Shape{1, tokens, kWidth});
    }
  }
}

TEST_CASE("layers that send are not recorded, nor are blocks that hold such") {
  const ModelDescription model = gpt2_medium();
  for (const int parts : {1, 2}) {
    const TensorGroup group{.rank = 0, .size = parts};
    for (const SpreadOver spread : {SpreadOver::none, SpreadOver::sequence}) {
      if (parts == 1 && spread != SpreadOver::none) continue;
      const LayerList layers = model.build(TensorParallelFactory(group, spread));
      for (const auto& layer : layers) {
        INFO(layer->name() << " over " << parts);
        CHECK(layer->repeatable() == (parts == 1 || layer->name() == "ln_f"));
      }
    }
  }
}
