// GPT2-medium's passes that memory bounds, at 16 sequences of 1024 tokens, and the optimizers' updates. Bytes are what
// an operation has to read and write once.

#include <set>
#include <vector>

#include "engine/base/random.h"
#include "tests/op_times/bench.h"

namespace pdl::op_times {
namespace {

constexpr std::int64_t kSamples = 16, kLength = 1024, kRows = kSamples * kLength, kWidth = 1024, kHidden = 4 * kWidth;
constexpr std::int64_t kVocabulary = 50257, kPaddedVocabulary = 50304;
constexpr DType kType = DType::bf16, kWide = DType::fp32;

/// Integers in device memory.
template <typename T>
Buffer to_device(Device& device, const std::vector<T>& values) {
  Buffer buffer = device.allocate(static_cast<std::int64_t>(values.size() * sizeof(T)), MemoryKind::activations);
  device.copy(buffer.raw(), values.data(), buffer.bytes(), device.compute_stream());
  device.compute_stream().synchronize();
  return buffer;
}

std::vector<std::int32_t> random_tokens() {
  const RandomStream stream(2, RandomUse::synthetic, 0);
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < kRows; ++i) {
    tokens.push_back(static_cast<std::int32_t>(stream.below(static_cast<std::uint64_t>(i), kVocabulary)));
  }
  return tokens;
}

void time(Bench& bench, const std::string& pass, const Shape& shape, double bytes,
          const std::function<void(int)>& call) {
  bench.measure("pass.gpt2." + pass, shape.to_string(), {.bytes = bytes}, call);
}

void measure_norms(Bench& bench) {
  const Shape shape = {kRows, kWidth};
  const auto elements = static_cast<double>(shape.elements()), rows = static_cast<double>(kRows);
  const int copies = Bench::copies_of(4.0 * elements);
  const Copies x(bench, copies, kType, shape), y(bench, copies, kType, shape), residual(bench, copies, kType, shape);
  const Copies mean(bench, copies, kWide, {kRows}), rstd(bench, copies, kWide, {kRows});
  const Copies gamma(bench, 1, kType, {kWidth}), beta(bench, 1, kType, {kWidth});
  const Copies dgamma(bench, 1, kWide, {kWidth}), dbeta(bench, 1, kWide, {kWidth});
  Backend& on = bench.backend();
  const auto forward = [&](int i) { on.layernorm_forward(y[i], mean[i], rstd[i], x[i], gamma[i], beta[i]); };
  time(bench, "layernorm_forward", shape, 4.0 * elements + 8.0 * rows, forward);
  for (int i = 0; i < copies; ++i) forward(i);  // statistics for backward
  time(bench, "layernorm_backward+residual", shape, 8.0 * elements + 8.0 * rows, [&](int i) {
    on.layernorm_backward(residual[i], dgamma[i], dbeta[i], y[i], residual[i], x[i], gamma[i], mean[i], rstd[i], false);
  });
}

void measure_activations(Bench& bench) {
  const Shape shape = {kRows, kHidden};
  const auto elements = static_cast<double>(shape.elements());
  const int copies = Bench::copies_of(4.0 * elements);
  const Copies x(bench, copies, kType, shape), dx(bench, copies, kType, shape), dbias(bench, copies, kWide, {kHidden});
  Backend& on = bench.backend();
  time(bench, "gelu_forward", shape, 4.0 * elements,
       [&](int i) { on.activation_forward(dx[i], x[i], Activation::gelu_tanh); });
  time(bench, "gelu_backward", shape, 6.0 * elements,
       [&](int i) { on.activation_backward(dx[i], dx[i], x[i], Activation::gelu_tanh); });
  time(bench, "gelu_backward+dbias", shape, 6.0 * elements,
       [&](int i) { on.activation_backward(dx[i], dbias[i], dx[i], x[i], Activation::gelu_tanh, false); });
  time(bench, "bias_sums", shape, 2.0 * elements,
       [&](int i) { on.activation_backward(x[i], dbias[i], x[i], Tensor(), Activation::none, false); });
}

void measure_residual_sums(Bench& bench) {
  const Shape shape = {kSamples, kLength, kWidth};
  const auto elements = static_cast<double>(shape.elements());
  const int copies = Bench::copies_of(6.0 * elements);
  const Copies x(bench, copies, kType, shape), y(bench, copies, kType, shape), residual(bench, copies, kType, shape);
  std::vector<std::int64_t> ids(kSamples);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  const Buffer sample_ids = to_device(bench.device(), ids);
  const Buffer update = to_device(bench.device(), std::vector<std::int64_t>{1});
  DropoutKey key;
  key.rate = 0.1;
  key.update = static_cast<const std::int64_t*>(update.raw());
  key.sample_ids = static_cast<const std::int64_t*>(sample_ids.raw());
  key.samples = kSamples;
  Backend& on = bench.backend();
  time(bench, "residual_add", shape, 6.0 * elements,
       [&](int i) { on.residual_add(y[i], residual[i], x[i], DropoutKey()); });
  time(bench, "residual_add+dropout", shape, 6.0 * elements,
       [&](int i) { on.residual_add(y[i], residual[i], x[i], key); });
  time(bench, "dropout", shape, 4.0 * elements, [&](int i) { on.dropout(y[i], x[i], key); });
}

void measure_embedding(Bench& bench) {
  const std::vector<std::int32_t> ids = random_tokens();
  const Buffer id_memory = to_device(bench.device(), ids);
  const Tensor tokens = id_memory.tensor(DType::int32, {kSamples, kLength});
  const Shape shape = {kSamples, kLength, kWidth};
  const Copies y(bench, 4, kType, shape), wte(bench, 1, kType, {kPaddedVocabulary, kWidth});
  const Copies wpe(bench, 1, kType, {kLength, kWidth}), dwte(bench, 1, kWide, {kPaddedVocabulary, kWidth});
  const Copies dwpe(bench, 1, kWide, {kLength, kWidth});
  const auto elements = static_cast<double>(shape.elements()), positions = static_cast<double>(kLength * kWidth);
  const double touched = static_cast<double>(std::set<std::int32_t>(ids.begin(), ids.end()).size()) * kWidth;
  Backend& on = bench.backend();
  time(bench, "embedding_forward", shape, 2.0 * (elements + touched + positions),
       [&](int i) { on.embedding_forward(y[i], tokens, wte[i], wpe[i], 0, DropoutKey()); });
  // The head's part of the tied gradient is there already. Tokens and positions read dy once each.
  time(bench, "embedding_backward", shape, 4.0 * elements + 8.0 * touched + 4.0 * positions,
       [&](int i) { on.embedding_backward(dwte[i], dwpe[i], y[i], tokens, 0, true, false); });
}

void measure_loss(Bench& bench) {
  const Shape shape = {kRows, kPaddedVocabulary};
  const Buffer id_memory = to_device(bench.device(), random_tokens());
  const Tensor targets = id_memory.tensor(DType::int32, {kRows});
  const Copies logits(bench, 1, kType, shape), dlogits(bench, 1, kType, shape);
  const Copies row_loss(bench, 1, kWide, {kRows}), row_correct(bench, 1, kWide, {kRows});
  Backend& on = bench.backend();
  time(bench, "cross_entropy", shape, 4.0 * static_cast<double>(shape.elements()), [&](int i) {
    on.cross_entropy(dlogits[i], row_loss[i], row_correct[i], logits[i], targets, kVocabulary, 1.0 / kRows);
  });
}

}  // namespace

void measure_gpt2_passes(Bench& bench) {
  if (!bench.wants("pass.gpt2")) return;
  measure_norms(bench);
  measure_activations(bench);
  measure_residual_sums(bench);
  measure_embedding(bench);
  measure_loss(bench);
}

void measure_updates(Bench& bench) {
  if (!bench.wants("update")) return;
  constexpr std::int64_t kParameters = 354871296;  // GPT2-medium's, with the padded vocabulary
  const Shape shape = {kParameters};
  const Copies values(bench, 1, kWide, shape), grads(bench, 1, kWide, shape), rounded(bench, 1, kType, shape);
  const Copies first(bench, 1, kWide, shape), second(bench, 1, kWide, shape);
  const Buffer total = bench.device().allocate(size_of(DType::fp64), MemoryKind::workspace);
  const UpdateSegment all = {.offset = 0, .count = kParameters, .decay = true};
  const AdamScalars adam = {.lr = 1e-4,
                            .beta1 = 0.9,
                            .beta2 = 0.999,
                            .epsilon = 1e-8,
                            .weight_decay = 0.1,
                            .decoupled_decay = true,
                            .update = 10,
                            .grad_scale = 1.0};
  const SgdScalars sgd = {
      .lr = 1e-3, .momentum = 0.9, .weight_decay = 1e-4, .grad_scale = 1.0, .nesterov = false, .first_update = false};
  Backend& on = bench.backend();
  const auto time_update = [&](const char* name, double bytes, const std::function<void(int)>& call) {
    bench.measure(std::string("update.") + name, shape.to_string(), {.bytes = bytes * kParameters}, call);
  };
  on.fill(second[0], 0.25);  // of a square
  time_update("adamw", 30.0,
              [&](int i) { on.adam_update(values[i], rounded[i], grads[i], first[i], second[i], &all, 1, adam); });
  time_update("sgd", 22.0, [&](int i) { on.sgd_update(values[i], rounded[i], grads[i], first[i], &all, 1, sgd); });
  time_update("sum_of_squares", 4.0,
              [&](int i) { on.sum_of_squares(total.tensor(DType::fp64, {1}), grads[i], &all, 1); });
  time_update("round", 6.0, [&](int i) { on.copy(rounded[i], values[i]); });
  time_update("fill", 4.0, [&](int i) { on.fill(first[i], 0.0); });
}

}  // namespace pdl::op_times
