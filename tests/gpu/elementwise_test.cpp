// Activations and dropout of the CUDA backend against the CPU's in fp64. Which elements are dropped has to agree
// exactly.

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/device_testing.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

struct Size {
  std::int64_t samples, per_sample;
  std::int64_t offset;  // elements behind a multiple of 64 bytes
};
const Size kSizes[] = {{1, 1, 0}, {5, 1, 1}, {3, 7, 0}, {2, 2049, 0}, {4, 1024, 1}, {3, 4099, 3}, {7, 40000, 0}};
// Products and tanh of the GELU on top of one rounding.
constexpr Tolerance kGelu = {5e-6, 5e-6, 5e-3, 1e-3};
// Sums in fp32 of gradients that are not rounded yet.
constexpr Tolerance kGeluSums = {5e-6, 5e-6, 5e-6, 5e-6};

Shape shape_of(const Size& size) { return {size.samples, size.per_sample}; }

Twin random_of(DType dtype, const Size& size, std::uint64_t seed, double range = 1.0) {
  return random_twin(dtype, shape_of(size), seed, -range, range, size.offset);
}

Values ids_of(std::int64_t samples) {
  Values ids;
  for (std::int64_t i = 0; i < samples; ++i) ids.push_back(static_cast<double>((i * 7919 + 3) % 100003));
  return ids;
}

std::string text(DType dtype, const Size& size) {
  return str(name_of(dtype), ", ", size.samples, " x ", size.per_sample, ", offset ", size.offset);
}

}  // namespace

TEST_CASE("cuda: activations forward, in place or not") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Size& size : kSizes) {
      for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu_tanh}) {
        INFO(text(dtype, size) << ", activation " << static_cast<int>(activation));
        const Twin x = random_of(dtype, size, 2, 4.0);
        Twin y(dtype, shape_of(size), size.offset), in_place = random_of(dtype, size, 2, 4.0);
        const Tolerance tolerance = activation == Activation::gelu_tanh ? kGelu : kExact;
        agree(dtype, {{y, "y", tolerance}}, [&](const Side& on) { on->activation_forward(y[on], x[on], activation); });
        agree(dtype, {{in_place, "y in x", tolerance}},
              [&](const Side& on) { on->activation_forward(in_place[on], in_place[on], activation); });
      }
    }
  }
}

TEST_CASE("cuda: activations backward, in place or not") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Size& size : kSizes) {
      for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu_tanh}) {
        INFO(text(dtype, size) << ", activation " << static_cast<int>(activation));
        const Twin dy = random_of(dtype, size, 1), saved = random_of(dtype, size, 2, 4.0);
        Twin dx(dtype, shape_of(size), size.offset), in_place = random_of(dtype, size, 1);
        const Tolerance tolerance = activation == Activation::gelu_tanh ? kGelu : kExact;
        agree(dtype, {{dx, "dx", tolerance}},
              [&](const Side& on) { on->activation_backward(dx[on], dy[on], saved[on], activation); });
        agree(dtype, {{in_place, "dx in dy", tolerance}},
              [&](const Side& on) { on->activation_backward(in_place[on], in_place[on], saved[on], activation); });
      }
    }
  }
}

TEST_CASE("cuda: an activation's gradient is summed down its columns on the way, for the bias") {
  if (gpu() == nullptr) return;
  struct Rows {
    std::int64_t rows, columns, offset;
  };
  for (const DType dtype : kComputeTypes) {
    for (const Rows& of : {Rows{1, 1, 0}, Rows{3, 7, 0}, Rows{100, 8, 0}, Rows{1000, 33, 1}, Rows{513, 64, 3},
                           Rows{40, 4096, 0}, Rows{9001, 64, 0}, Rows{2049, 264, 0}}) {
      for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu_tanh}) {
        INFO(name_of(dtype) << ", " << of.rows << " x " << of.columns << ", offset " << of.offset << ", activation "
                            << static_cast<int>(activation));
        const Shape shape = {of.rows, of.columns};
        const Twin dy = random_twin(dtype, shape, 1, 0.25, 1.25, of.offset);
        const Twin saved = random_twin(dtype, shape, 2, -1.0, 3.0, of.offset);
        Twin dx(dtype, shape, of.offset), in_place = random_twin(dtype, shape, 1, 0.25, 1.25, of.offset);
        Twin dbias(DType::fp32, {of.columns}, of.offset);
        const bool gelu = activation == Activation::gelu_tanh;
        const Tolerance of_dx = gelu ? kGelu : kExact, of_sums = gelu ? kGeluSums : kWide;
        agree(dtype, {{dx, "dx", of_dx}, {dbias, "dbias", of_sums}}, [&](const Side& on) {
          on->activation_backward(dx[on], dbias[on], dy[on], saved[on], activation, false);
        });
        dbias.set(random_values(of.columns, 3));
        agree(dtype, {{in_place, "dx in dy", of_dx}, {dbias, "dbias +=", of_sums}}, [&](const Side& on) {
          on->activation_backward(in_place[on], dbias[on], in_place[on], saved[on], activation, true);
        });
      }
    }
  }
}

TEST_CASE("cuda: relu at zero, and gelu far out") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    INFO(name_of(dtype));
    const Twin dy(dtype, {8}, {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0});
    const Twin y(dtype, {8}, {0.0, -0.0, 1e-4, -1e-4, 3.0, 0.0, 2.0, 60000.0});
    const Twin pre_activation(dtype, {8}, {-40.0, 40.0, -6.0, 6.0, 0.0, -100.0, 100.0, -10.0});
    Twin dx(dtype, {8});
    agree(dtype, {{dx, "relu", kExact}},
          [&](const Side& on) { on->activation_backward(dx[on], dy[on], y[on], Activation::relu); });
    agree(dtype, {{dx, "gelu", kGelu}},
          [&](const Side& on) { on->activation_backward(dx[on], dy[on], pre_activation[on], Activation::gelu_tanh); });
    agree(dtype, {{dx, "gelu forward", kGelu}},
          [&](const Side& on) { on->activation_forward(dx[on], pre_activation[on], Activation::gelu_tanh); });
  }
}

TEST_CASE("cuda: dropout keeps what the CPU keeps, in place or not") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Size& size : kSizes) {
      for (const double rate : {0.0, 0.1, 0.5, 0.9}) {
        INFO(text(dtype, size) << ", rate " << rate);
        const TwinKey key(rate, ids_of(size.samples));
        const Twin x = random_of(dtype, size, 3);
        Twin y(dtype, shape_of(size), size.offset), in_place = random_of(dtype, size, 3);
        agree(dtype, {{y, "y", kRounded}}, [&](const Side& on) { on->dropout(y[on], x[on], key[on]); });
        CHECK(y.same_zeros());
        agree(dtype, {{in_place, "y in x", kRounded}},
              [&](const Side& on) { on->dropout(in_place[on], in_place[on], key[on]); });
        CHECK(in_place.same_zeros());
      }
    }
  }
}

TEST_CASE("cuda: dropout of a shard of columns is the CPU's") {
  if (gpu() == nullptr) return;
  struct Shard {
    std::int64_t rows, width, full_width, first_column;
  };
  for (const DType dtype : kComputeTypes) {
    for (const Shard& shard : {Shard{5, 64, 256, 64}, {3, 33, 99, 33}, {1, 1, 5, 4}, {40, 250, 1001, 751}}) {
      INFO(name_of(dtype) << ", columns " << shard.first_column << "+" << shard.width << " of " << shard.full_width);
      TwinKey key(0.25, ids_of(3));
      key.key.local_width = shard.width;
      key.key.full_width = shard.full_width;
      key.key.first_column = shard.first_column;
      const Twin x = random_twin(dtype, {3, shard.rows, shard.width}, 4), residual = random_twin(dtype, x.shape(), 5);
      Twin y(dtype, x.shape());
      agree(dtype, {{y, "y", kRounded}}, [&](const Side& on) { on->dropout(y[on], x[on], key[on]); });
      CHECK(y.same_zeros());
      agree(dtype, {{y, "residual + y", kRounded}},
            [&](const Side& on) { on->residual_add(y[on], residual[on], x[on], key[on]); });
    }
  }
}

TEST_CASE("cuda: dropout's key tells seeds, updates, sites and samples apart as the CPU does") {
  if (gpu() == nullptr) return;
  const Twin x(DType::bf16, {2, 1000}, Values(2000, 1.0));
  Twin y(DType::bf16, {2, 1000});
  for (const int changed : {0, 1, 2, 3}) {
    TwinKey key(0.5, changed == 3 ? Values{4294967297.0, 2147483648.0} : Values{1.0, 2.0});
    if (changed == 0) key.key.seed = 0xFFFFFFFF00000001ull;
    if (changed == 1) key.update = Twin(DType::int64, {1}, Values{4294967295.0});
    if (changed == 2) key.key.site = 12345678u;
    INFO("changed " << changed);
    agree(DType::bf16, {{y, "y", kExact}}, [&](const Side& on) { on->dropout(y[on], x[on], key[on]); });
  }
}

TEST_CASE("cuda: residual add, with dropout or not, in place of either") {
  if (gpu() == nullptr) return;
  for (const DType dtype : kComputeTypes) {
    for (const Size& size : kSizes) {
      for (const double rate : {0.0, 0.3}) {
        INFO(text(dtype, size) << ", rate " << rate);
        const TwinKey key = rate == 0.0 ? TwinKey() : TwinKey(rate, ids_of(size.samples));
        const Twin x = random_of(dtype, size, 6), residual = random_of(dtype, size, 7);
        Twin y(dtype, shape_of(size), size.offset), in_x = random_of(dtype, size, 6),
                                                    in_residual = random_of(dtype, size, 7);
        agree(dtype, {{y, "y", kRounded}},
              [&](const Side& on) { on->residual_add(y[on], residual[on], x[on], key[on]); });
        agree(dtype, {{in_x, "y in x", kRounded}},
              [&](const Side& on) { on->residual_add(in_x[on], residual[on], in_x[on], key[on]); });
        agree(dtype, {{in_residual, "y in residual", kRounded}},
              [&](const Side& on) { on->residual_add(in_residual[on], in_residual[on], x[on], key[on]); });
      }
    }
  }
}

TEST_CASE("cuda: element by element operations refuse tensors that do not fit each other") {
  if (gpu() == nullptr) return;
  const Side on = {gpu()->deterministic.get(), true};
  const Twin x = random_twin(DType::bf16, {2, 8}, 1), shorter(DType::bf16, {2, 7}), floats(DType::fp32, {2, 8}),
             doubles(DType::fp64, {2, 8});
  const TwinKey key(0.5, ids_of(2)), three(0.5, ids_of(3));
  for (const Twin* wrong : {&shorter, &floats}) {
    CHECK_THROWS_AS(on->activation_backward(x[on], (*wrong)[on], x[on], Activation::relu), Error);
    CHECK_THROWS_AS(on->activation_backward(x[on], x[on], (*wrong)[on], Activation::relu), Error);
    CHECK_THROWS_AS(on->dropout(x[on], (*wrong)[on], key[on]), Error);
    CHECK_THROWS_AS(on->residual_add(x[on], (*wrong)[on], x[on], key[on]), Error);
  }
  const Twin five(DType::fp32, {5}), half_wide(DType::bf16, {8});
  for (const Twin* dbias : {&five, &half_wide}) {
    CHECK_THROWS_AS(on->activation_backward(x[on], (*dbias)[on], x[on], x[on], Activation::relu, false), Error);
  }
  CHECK_THROWS_AS(on->dropout(x[on], x[on], three[on]), Error);
  CHECK_THROWS_AS(on->dropout(doubles[on], doubles[on], key[on]), Error);
  gpu()->wait();
}
