#include "parallel/comm/rank_order.h"

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/catch.h"

using namespace pdl;

namespace {

template <typename T>
std::vector<T> reduced(const std::vector<std::vector<T>>& contributions, DType dtype, ReduceOp op) {
  std::vector<const void*> pointers;
  for (const auto& contribution : contributions) pointers.push_back(contribution.data());
  std::vector<T> out(contributions.front().size());
  reduce_in_rank_order(out.data(), pointers, static_cast<std::int64_t>(out.size()), dtype, op);
  return out;
}

}  // namespace

TEST_CASE("sums are formed in rank order") {
  // In fp32 only this order gives 1: 1e8 + 1 is 1e8.
  CHECK(reduced<float>({{1e8f}, {-1e8f}, {1.0f}}, DType::fp32, ReduceOp::sum) == std::vector<float>{1.0f});
  CHECK(reduced<float>({{1e8f}, {1.0f}, {-1e8f}}, DType::fp32, ReduceOp::sum) == std::vector<float>{0.0f});
  CHECK(reduced<double>({{0.25, 1}, {0.5, 2}}, DType::fp64, ReduceOp::sum) == std::vector<double>{0.75, 3});
}

TEST_CASE("integers, maxima and minima") {
  CHECK(reduced<std::int64_t>({{1ll << 60}, {3}}, DType::int64, ReduceOp::sum) ==
        std::vector<std::int64_t>{(1ll << 60) + 3});
  CHECK(reduced<std::int32_t>({{-4, 9}, {5, -7}}, DType::int32, ReduceOp::max) == std::vector<std::int32_t>{5, 9});
  CHECK(reduced<std::uint8_t>({{200, 3}, {100, 4}}, DType::uint8, ReduceOp::min) == std::vector<std::uint8_t>{100, 3});
}

TEST_CASE("a NaN of any rank stays") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min}) {
    CHECK(std::isnan(reduced<float>({{nan}, {1.0f}}, DType::fp32, op)[0]));
    CHECK(std::isnan(reduced<float>({{1.0f}, {nan}}, DType::fp32, op)[0]));
  }
}

TEST_CASE("the result may replace a contribution, over many blocks") {
  const std::size_t count = 5000;
  std::vector<float> first(count), second(count);
  for (std::size_t i = 0; i < count; ++i) {
    first[i] = static_cast<float>(i);
    second[i] = 0.5f;
  }
  reduce_in_rank_order(second.data(), {first.data(), second.data()}, static_cast<std::int64_t>(count), DType::fp32,
                       ReduceOp::sum);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < count; ++i) wrong += second[i] != static_cast<float>(i) + 0.5f;
  CHECK(wrong == 0);
}

TEST_CASE("16-bit floats survive the way to fp32 and back") {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float wide = fp16_to_fp32(half), brain = bf16_to_fp32(half);
    if (std::isnan(wide) ? !std::isnan(fp16_to_fp32(fp32_to_fp16(wide))) : fp32_to_fp16(wide) != half)
      FAIL("fp16 " << bits);
    if (std::isnan(brain) ? !std::isnan(bf16_to_fp32(fp32_to_bf16(brain))) : fp32_to_bf16(brain) != half)
      FAIL("bf16 " << bits);
  }
  CHECK(fp16_to_fp32(0x3c00) == 1.0f);
  CHECK(fp16_to_fp32(0x7bff) == 65504.0f);
  CHECK(fp16_to_fp32(0x0001) == 0x1p-24f);
}

TEST_CASE("16-bit floats round to the nearest, ties to even") {
  CHECK(fp32_to_fp16(1.0f + 0x1p-11f) == 0x3c00);
  CHECK(fp32_to_fp16(1.0f + 3 * 0x1p-11f) == 0x3c02);
  CHECK(fp32_to_fp16(1.0f + 0x1p-11f + 0x1p-20f) == 0x3c01);
  CHECK(fp32_to_fp16(2.0f - 0x1p-12f) == 0x4000);
  CHECK(fp32_to_fp16(65519.0f) == 0x7bff);
  CHECK(fp32_to_fp16(65520.0f) == 0x7c00);
  CHECK(fp32_to_fp16(-std::numeric_limits<float>::infinity()) == 0xfc00);
  CHECK(fp32_to_fp16(0x1p-25f) == 0);
  CHECK(fp32_to_fp16(0x1.8p-25f) == 1);
  CHECK(fp32_to_bf16(1.0f + 0x1p-8f) == 0x3f80);
  CHECK(fp32_to_bf16(1.0f + 3 * 0x1p-8f) == 0x3f82);
  CHECK(fp32_to_bf16(std::numeric_limits<float>::max()) == 0x7f80);
}

TEST_CASE("16-bit sums are formed in fp32 and rounded once") {
  // 256 + 1 is 256 in bf16, but 256 + 1 + 1 in fp32 rounds to 258.
  CHECK(reduced<std::uint16_t>({{0x4380}, {0x3f80}, {0x3f80}}, DType::bf16, ReduceOp::sum) ==
        std::vector<std::uint16_t>{0x4381});
  CHECK(reduced<std::uint16_t>({{0x6800}, {0x3c00}, {0x3c00}}, DType::fp16, ReduceOp::sum) ==
        std::vector<std::uint16_t>{0x6801});
}
