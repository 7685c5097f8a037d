// Embeddings of the CUDA backend against the CPU's in fp64.

#include "tests/support/catch.h"
#include "tests/support/device_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

struct Case {
  std::int64_t b, t, width, vocabulary;
  std::int64_t drawn;   // tokens are below this: few make rows repeat, more than the vocabulary fall outside
  std::int64_t offset;  // elements that tables and their gradients start behind a multiple of 64 bytes
};
// One element, odd widths, one token for all, a short table, tokens of other shards, and GPT-2's vocabulary.
const Case kCases[] = {{1, 1, 1, 1, 1, 0},          {3, 5, 7, 11, 11, 1},   {2, 9, 64, 11, 4, 3},
                       {4, 33, 768, 100, 100, 0},   {8, 64, 100, 50, 1, 1}, {2, 128, 96, 300, 900, 0},
                       {3, 70, 48, 50304, 50257, 0}};

Twin tokens_of(const Case& of) {
  const RandomStream stream(21, RandomUse::synthetic, 1);
  Values tokens;
  for (std::int64_t i = 0; i < of.b * of.t; ++i) {
    tokens.push_back(stream.below(static_cast<std::uint64_t>(i), static_cast<std::uint32_t>(of.drawn)));
  }
  return Twin(DType::int32, {of.b, of.t}, tokens);
}

// Tables have one position more than is used. The shard of the vocabulary starts behind a third of the tokens.
struct Embedding {
  Embedding(DType dtype, const Case& of_in)
      : of(of_in),
        first_token(of.drawn > of.vocabulary && of.vocabulary > 100 ? of.drawn / 3 : 0),
        tokens(tokens_of(of)),
        wte(random_twin(dtype, {of.vocabulary, of.width}, 2, -1.0, 1.0, of.offset)),
        wpe(random_twin(dtype, {of.t + 1, of.width}, 3, -1.0, 1.0, of.offset)),
        dy(random_twin(dtype, {of.b, of.t, of.width}, 4)),
        y(dtype, {of.b, of.t, of.width}),
        dwte(DType::fp32, {of.vocabulary, of.width}, of.offset),
        dwpe(DType::fp32, {of.t + 1, of.width}, of.offset) {}

  Case of;
  std::int64_t first_token;
  Twin tokens, wte, wpe, dy, y, dwte, dwpe;
};

Values ids_of(std::int64_t samples) {
  Values ids;
  for (std::int64_t i = 0; i < samples; ++i) ids.push_back(static_cast<double>((i * 31 + 70) % 101));
  return ids;
}

std::string text(DType dtype, const Case& of) {
  return str(name_of(dtype), ", B ", of.b, ", T ", of.t, ", C ", of.width, ", V ", of.vocabulary, ", tokens below ",
             of.drawn, ", offset ", of.offset);
}

}  // namespace

TEST_CASE("cuda: embedding forward, with or without positions, other shards' tokens included") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : kCases) {
      INFO(text(dtype, of));
      Embedding embedding(dtype, of);
      const Twin none;
      for (const Twin* positions : {static_cast<const Twin*>(&embedding.wpe), &none}) {
        agree(dtype, {{embedding.y, positions == &none ? "tokens alone" : "y", kRounded}}, [&](const Side& on) {
          on->embedding_forward(embedding.y[on], embedding.tokens[on], embedding.wte[on], (*positions)[on],
                                embedding.first_token, DropoutKey());
        });
      }
    }
  }
}

TEST_CASE("cuda: an embedding's dropout is the CPU's, in a shard of columns too") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : kCases) {
      for (const bool shard : {false, true}) {
        INFO(text(dtype, of) << (shard ? ", shard" : ""));
        Embedding embedding(dtype, of);
        TwinKey key(0.3, ids_of(of.b));
        if (shard) {
          key.key.local_width = of.width;
          key.key.full_width = 3 * of.width + 2;
          key.key.first_column = of.width + 1;
        }
        agree(dtype, {{embedding.y, "y", kRounded}}, [&](const Side& on) {
          on->embedding_forward(embedding.y[on], embedding.tokens[on], embedding.wte[on], embedding.wpe[on],
                                embedding.first_token, key[on]);
        });
        CHECK(embedding.y.same_zeros());
      }
    }
  }
}

TEST_CASE("cuda: embedding gradients, each table with its own accumulate flag") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Case& of : kCases) {
      Embedding embedding(dtype, of);
      Twin &dwte = embedding.dwte, &dwpe = embedding.dwpe;
      const auto backward = [&](bool accumulate_wte, bool accumulate_wpe) {
        INFO(text(dtype, of) << ", accumulate " << accumulate_wte << accumulate_wpe);
        agree(dtype, {{dwte, "dwte", kWide}, {dwpe, "dwpe", kWide}}, [&](const Side& on) {
          on->embedding_backward(dwte[on], dwpe[on], embedding.dy[on], embedding.tokens[on], embedding.first_token,
                                 accumulate_wte, accumulate_wpe);
        });
      };
      backward(false, false);
      dwte.set(random_values(dwte.elements(), 5));
      backward(true, false);
      dwpe.set(random_values(dwpe.elements(), 6));
      backward(true, true);
      if (of.vocabulary < 1000) backward(false, true);
    }
  }
}

TEST_CASE("cuda: either embedding gradient may be left out, and micro-batches add up") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    const Case of = {4, 40, 150, 60, 50, 1};
    INFO(text(dtype, of));
    Embedding embedding(dtype, of);
    Twin &dwte = embedding.dwte, &dwpe = embedding.dwpe;
    agree(dtype, {{dwte, "dwte", kWide}}, [&](const Side& on) {
      on->embedding_backward(dwte[on], Tensor(), embedding.dy[on], embedding.tokens[on], 0, false, false);
    });
    agree(dtype, {{dwpe, "dwpe", kWide}}, [&](const Side& on) {
      on->embedding_backward(Tensor(), dwpe[on], embedding.dy[on], embedding.tokens[on], 0, false, false);
    });
    agree(dtype, {{dwte, "dwte", kWide}, {dwpe, "dwpe", kWide}}, [&](const Side& on) {
      for (std::int64_t sample = 0; sample < of.b; ++sample) {
        on->embedding_backward(dwte[on], dwpe[on], embedding.dy[on].rows(sample, 1),
                               embedding.tokens[on].rows(sample, 1), 0, sample > 0, sample > 0);
      }
    });
  }
}

TEST_CASE("cuda: tokens of no shard at all leave their table alone") {
  if (gpu() == nullptr) return;
  Embedding embedding(DType::bf16, {2, 9, 64, 11, 4, 1});
  Twin& dwte = embedding.dwte;
  for (const std::int64_t first_token : {50, 2000000000}) {
    INFO("first token " << first_token);
    agree(DType::bf16, {{embedding.y, "y", kExact}}, [&](const Side& on) {
      on->embedding_forward(embedding.y[on], embedding.tokens[on], embedding.wte[on], Tensor(), first_token,
                            DropoutKey());
    });
    agree(DType::bf16, {{dwte, "dwte", kExact}}, [&](const Side& on) {
      on->embedding_backward(dwte[on], Tensor(), embedding.dy[on], embedding.tokens[on], first_token, false, false);
    });
  }
}

TEST_CASE("cuda: embeddings refuse tensors that do not fit each other") {
  if (gpu() == nullptr) return;
  const Embedding embedding(DType::bf16, {3, 5, 4, 11, 11, 0});
  const Side on = {gpu()->deterministic.get(), true};
  const Twin short_wpe(DType::bf16, {4, 4}), wide(DType::bf16, {11, 5}), longer(DType::bf16, {3, 6, 4}),
      doubles(DType::fp64, {3, 5, 4});
  const TwinKey two(0.5, ids_of(2));
  const auto forward = [&](const Twin& y, const Twin& wte, const Twin& wpe, const DropoutKey& key) {
    on->embedding_forward(y[on], embedding.tokens[on], wte[on], wpe[on], 0, key);
  };
  CHECK_THROWS_AS(forward(embedding.y, embedding.wte, short_wpe, DropoutKey()), Error);
  CHECK_THROWS_AS(forward(embedding.y, wide, Twin(), DropoutKey()), Error);
  CHECK_THROWS_AS(forward(longer, embedding.wte, Twin(), DropoutKey()), Error);
  CHECK_THROWS_AS(forward(doubles, embedding.wte, Twin(), DropoutKey()), Error);
  CHECK_THROWS_AS(forward(embedding.y, embedding.wte, Twin(), two[on]), Error);
  CHECK_THROWS_AS(on->embedding_backward(wide[on], Tensor(), embedding.dy[on], embedding.tokens[on], 0, false, false),
                  Error);
  gpu()->wait();
}
