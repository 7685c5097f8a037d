// Embeddings against loops over tokens and elements.

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/op_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

const Shape kTokens = {3, 5};  // [B, T]
constexpr std::int64_t kVocabulary = 11, kPositions = 8, kSamples = 3;

OwnedTensor random_tokens(const Shape& shape, std::int64_t vocabulary, std::uint64_t seed) {
  const RandomStream stream(seed, RandomUse::synthetic, 1);
  OwnedTensor tokens(DType::int32, shape);
  for (std::int64_t i = 0; i < tokens.elements(); ++i) {
    tokens.put(i, stream.below(static_cast<std::uint64_t>(i), static_cast<std::uint32_t>(vocabulary)));
  }
  return tokens;
}

// Row token - first_token of wte (zeros outside) plus row t of wpe when there is one.
Values naive_embedding(const OwnedTensor& tokens, const OwnedTensor& wte, const OwnedTensor* wpe,
                       std::int64_t first_token) {
  const std::int64_t width = wte.tensor().shape()[1], rows = wte.tensor().shape()[0], t = tokens.tensor().shape()[1];
  Values y;
  for (std::int64_t m = 0; m < tokens.elements(); ++m) {
    const std::int64_t row = static_cast<std::int64_t>(tokens.get(m)) - first_token;
    for (std::int64_t c = 0; c < width; ++c) {
      y.push_back((row >= 0 && row < rows ? wte.get(row * width + c) : 0.0) +
                  (wpe == nullptr ? 0.0 : wpe->get(m % t * width + c)));
    }
  }
  return y;
}

struct Gradients {
  Values wte, wpe;
};

Gradients naive_gradients(const OwnedTensor& tokens, const OwnedTensor& dy, std::int64_t vocabulary,
                          std::int64_t positions) {
  const std::int64_t width = dy.tensor().shape()[2], t = tokens.tensor().shape()[1];
  Gradients gradients{Values(static_cast<std::size_t>(vocabulary * width)),
                      Values(static_cast<std::size_t>(positions * width))};
  for (std::int64_t m = 0; m < tokens.elements(); ++m) {
    for (std::int64_t c = 0; c < width; ++c) {
      gradients.wte[static_cast<std::size_t>(static_cast<std::int64_t>(tokens.get(m)) * width + c)] +=
          dy.get(m * width + c);
      gradients.wpe[static_cast<std::size_t>(m % t * width + c)] += dy.get(m * width + c);
    }
  }
  return gradients;
}

DropoutKey dropout_key(const std::vector<std::int64_t>& ids, double rate) {
  static const std::int64_t update = 4;
  DropoutKey key;
  key.rate = rate;
  key.seed = 99;
  key.site = 3;
  key.update = &update;
  key.sample_ids = ids.data();
  key.samples = static_cast<std::int64_t>(ids.size());
  return key;
}

}  // namespace

TEST_CASE("an embedding is the token's row plus the position's row") {
  const CpuUnderTest cpu;
  const OwnedTensor tokens = random_tokens(kTokens, kVocabulary, 1);
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const std::int64_t width : {1, 7, 64, 515}) {
      CAPTURE(name_of(dtype), width);
      const OwnedTensor wte = random_tensor(dtype, {kVocabulary, width}, 2),
                        wpe = random_tensor(dtype, {kPositions, width}, 3);
      OwnedTensor y(dtype, {3, 5, width});
      const double tolerance = dtype == DType::fp64 ? 1e-15 : 1e-7;
      cpu.backend->embedding_forward(y, tokens, wte, wpe, 0, DropoutKey());
      CHECK(worst_error(y.values(), naive_embedding(tokens, wte, &wpe, 0)) < tolerance);
      y.poison();
      cpu.backend->embedding_forward(y, tokens, wte, Tensor(), 0, DropoutKey());
      CHECK(worst_error(y.values(), naive_embedding(tokens, wte, nullptr, 0)) < tolerance);
      CHECK(y.guards_intact());
    }
  }
}

TEST_CASE("vocabulary shards give zeros for other shards' tokens, and add up to the whole") {
  const CpuUnderTest cpu;
  const OwnedTensor tokens = random_tokens(kTokens, kVocabulary, 4),
                    wte = random_tensor(DType::fp64, {kVocabulary, 6}, 5);
  const OwnedTensor wpe = random_tensor(DType::fp64, {kPositions, 6}, 6);
  OwnedTensor whole(DType::fp64, {3, 5, 6}), first(DType::fp64, {3, 5, 6}), second(DType::fp64, {3, 5, 6});
  const Tensor& table = wte;
  cpu.backend->embedding_forward(whole, tokens, wte, wpe, 0, DropoutKey());
  cpu.backend->embedding_forward(first, tokens, table.rows(0, 4), wpe, 0, DropoutKey());
  cpu.backend->embedding_forward(second, tokens, table.rows(4, 7), Tensor(), 4, DropoutKey());
  cpu.backend->add(first, second, 1.0);
  CHECK(worst_error(first, whole) < 1e-15);

  const OwnedTensor dy = random_tensor(DType::fp64, {3, 5, 6}, 7);
  OwnedTensor dwte(DType::fp64, {kVocabulary, 6}), dwpe(DType::fp64, {kPositions, 6});
  const Tensor& gradients = dwte;
  cpu.backend->embedding_backward(gradients.rows(0, 4), dwpe, dy, tokens, 0, false, false);
  cpu.backend->embedding_backward(gradients.rows(4, 7), Tensor(), dy, tokens, 4, false, false);
  const Gradients expected = naive_gradients(tokens, dy, kVocabulary, kPositions);
  CHECK(worst_error(dwte.values(), expected.wte) < 1e-15);
  CHECK(worst_error(dwpe.values(), expected.wpe) < 1e-15);
}

TEST_CASE("an embedding's dropout is dropout of the whole sample, in shards too") {
  const CpuUnderTest cpu;
  const std::vector<std::int64_t> ids = {70, 5, 6};
  const std::int64_t width = 1100;
  const OwnedTensor tokens = random_tokens(kTokens, kVocabulary, 8),
                    wte = random_tensor(DType::fp32, {kVocabulary, width}, 9);
  const OwnedTensor wpe = random_tensor(DType::fp32, {kPositions, width}, 10);
  OwnedTensor dense(DType::fp32, {kSamples, 5, width}), y(DType::fp32, {kSamples, 5, width});
  cpu.backend->embedding_forward(dense, tokens, wte, wpe, 0, DropoutKey());
  cpu.backend->dropout(dense, dense, dropout_key(ids, 0.3));
  cpu.backend->embedding_forward(y, tokens, wte, wpe, 0, dropout_key(ids, 0.3));
  CHECK((y.values() == dense.values()));

  const std::int64_t part = 333, first = 47;
  OwnedTensor wte_part(DType::fp32, {kVocabulary, part}), wpe_part(DType::fp32, {kPositions, part}),
      y_part(DType::fp32, {3, 5, part});
  const auto cut = [&](OwnedTensor& to, const OwnedTensor& from) {
    for (std::int64_t i = 0; i < to.elements(); ++i) to.put(i, from.get(i / part * width + first + i % part));
  };
  cut(wte_part, wte);
  cut(wpe_part, wpe);
  DropoutKey key = dropout_key(ids, 0.3);
  key.local_width = part;
  key.full_width = width;
  key.first_column = first;
  cpu.backend->embedding_forward(y_part, tokens, wte_part, wpe_part, 0, key);
  OwnedTensor expected(DType::fp32, {3, 5, part});
  cut(expected, y);
  CHECK(same_bits(y_part, expected));
}

TEST_CASE("embedding gradients go to the rows that the tokens chose; each table has its own accumulate flag") {
  const CpuUnderTest cpu;
  const OwnedTensor tokens = random_tokens(kTokens, 4, 11);  // few tokens: rows repeat
  for (const DType dtype : {DType::fp64, DType::fp32}) {
    for (const std::int64_t width : {1, 17, 70}) {
      for (const int flags : {0, 1, 2, 3}) {
        CAPTURE(name_of(dtype), width, flags);
        const OwnedTensor dy = random_tensor(dtype, {3, 5, width}, 12);
        OwnedTensor dwte(dtype, {kVocabulary, width}), dwpe(dtype, {kPositions, width});
        Gradients expected = naive_gradients(tokens, dy, kVocabulary, kPositions);
        const auto start = [](OwnedTensor& gradient, Values& sum, std::uint64_t seed) {
          gradient.set(random_tensor(gradient.tensor().dtype(), gradient.tensor().shape(), seed).values());
          for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += gradient.get(static_cast<std::int64_t>(i));
        };
        if ((flags & 1) != 0) start(dwte, expected.wte, 13);
        if ((flags & 2) != 0) start(dwpe, expected.wpe, 14);
        cpu.backend->embedding_backward(dwte, dwpe, dy, tokens, 0, (flags & 1) != 0, (flags & 2) != 0);
        CHECK((worst_error(dwte.values(), expected.wte) < (dtype == DType::fp64 ? 1e-15 : 3e-7)));
        CHECK((worst_error(dwpe.values(), expected.wpe) < (dtype == DType::fp64 ? 1e-15 : 3e-7)));
        CHECK((dwte.guards_intact() && dwpe.guards_intact()));
      }
    }
  }
}

TEST_CASE("embedding gradients are finite differences") {
  const CpuUnderTest cpu;
  const OwnedTensor tokens = random_tokens(kTokens, 6, 15), dy = random_tensor(DType::fp64, {3, 5, 9}, 16);
  OwnedTensor wte = random_tensor(DType::fp64, {kVocabulary, 9}, 17),
              wpe = random_tensor(DType::fp64, {kPositions, 9}, 18);
  OwnedTensor y(DType::fp64, {3, 5, 9}), dwte(DType::fp64, {kVocabulary, 9}), dwpe(DType::fp64, {kPositions, 9});
  cpu.backend->embedding_backward(dwte, dwpe, dy, tokens, 0, false, false);
  const auto loss = [&] {
    cpu.backend->embedding_forward(y, tokens, wte, wpe, 0, DropoutKey());
    return dot(dy.values(), y.values());
  };
  CHECK(gradient_error(wte, dwte.values(), loss) < 1e-7);
  CHECK(gradient_error(wpe, dwpe.values(), loss) < 1e-7);
}

TEST_CASE("either embedding gradient may be left out") {
  const CpuUnderTest cpu;
  const OwnedTensor tokens = random_tokens(kTokens, kVocabulary, 19), dy = random_tensor(DType::fp64, {3, 5, 4}, 20);
  const Gradients expected = naive_gradients(tokens, dy, kVocabulary, kPositions);
  OwnedTensor dwte(DType::fp64, {kVocabulary, 4}), dwpe(DType::fp64, {kPositions, 4});
  cpu.backend->embedding_backward(dwte, Tensor(), dy, tokens, 0, false, false);
  cpu.backend->embedding_backward(Tensor(), dwpe, dy, tokens, 0, false, false);
  CHECK(worst_error(dwte.values(), expected.wte) < 1e-15);
  CHECK(worst_error(dwpe.values(), expected.wpe) < 1e-15);
}

TEST_CASE("embedding gradients have the same bits whole or by micro-batches, with any number of threads") {
  const CpuUnderTest cpu;
  const std::int64_t b = 4, t = 40, width = 150, vocabulary = 60;
  const OwnedTensor tokens = random_tokens({b, t}, vocabulary, 21), dy = random_tensor(DType::fp32, {b, t, width}, 22);
  const Tensor &all_tokens = tokens, &all_dy = dy;
  const auto run = [&](int threads, std::int64_t micro_batch) {
    OwnedTensor dwte(DType::fp32, {vocabulary, width}), dwpe(DType::fp32, {t, width});
    with_threads(threads, [&] {
      for (std::int64_t first = 0; first < b; first += micro_batch) {
        cpu.backend->embedding_backward(dwte, dwpe, all_dy.rows(first, micro_batch),
                                        all_tokens.rows(first, micro_batch), 0, first > 0, first > 0);
      }
    });
    return std::vector<Values>{dwte.values(), dwpe.values()};
  };
  const auto one = run(1, b);
  CHECK((one == run(2, b)));
  CHECK((one == run(3, b)));
  CHECK((one == run(1, 1)));
  CHECK((one == run(2, 2)));
}

TEST_CASE("embeddings refuse shapes that do not belong together") {
  const CpuUnderTest cpu;
  const OwnedTensor tokens = random_tokens(kTokens, kVocabulary, 23),
                    wte = random_tensor(DType::fp32, {kVocabulary, 4}, 24);
  const OwnedTensor short_wpe = random_tensor(DType::fp32, {4, 4}, 25),
                    wide = random_tensor(DType::fp32, {kVocabulary, 5}, 26);
  OwnedTensor y(DType::fp32, {3, 5, 4}), other(DType::fp32, {3, 6, 4}), dwte64(DType::fp64, {kVocabulary, 4});
  CHECK_THROWS_AS(cpu.backend->embedding_forward(y, tokens, wte, short_wpe, 0, DropoutKey()), Error);
  CHECK_THROWS_AS(cpu.backend->embedding_forward(y, tokens, wide, Tensor(), 0, DropoutKey()), Error);
  CHECK_THROWS_AS(cpu.backend->embedding_forward(other, tokens, wte, Tensor(), 0, DropoutKey()), Error);
  CHECK_THROWS_AS(cpu.backend->embedding_backward(dwte64, Tensor(), y, tokens, 0, false, false), Error);
  const std::vector<std::int64_t> two = {1, 2};
  CHECK_THROWS_AS(cpu.backend->embedding_forward(y, tokens, wte, Tensor(), 0, dropout_key(two, 0.5)), Error);
}
