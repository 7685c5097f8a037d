#include "parallel/comm/rank_order.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace pdl {
namespace {

// How each stored type is read into the type that is added in, and written back.
template <typename T>
struct Plain {
  using Stored = T;
  using Value = T;
  static Value read(Stored stored) { return stored; }
  static Stored write(Value value) { return value; }
};
struct Bf16 {
  using Stored = std::uint16_t;
  using Value = float;
  static Value read(Stored stored) { return bf16_to_fp32(stored); }
  static Stored write(Value value) { return fp32_to_bf16(value); }
};
struct Fp16 {
  using Stored = std::uint16_t;
  using Value = float;
  static Value read(Stored stored) { return fp16_to_fp32(stored); }
  static Stored write(Value value) { return fp32_to_fp16(value); }
};

template <ReduceOp op, typename T>
T combine(T a, T b) {
  if constexpr (op == ReduceOp::sum) return static_cast<T>(a + b);
  const bool b_is_nan = b != b;
  if constexpr (op == ReduceOp::max) return b > a || b_is_nan ? b : a;
  return b < a || b_is_nan ? b : a;
}

/// Block by block through a buffer of its own, because `out` may be one of the contributions.
template <typename Type, ReduceOp op>
void reduce_typed(void* out, const std::vector<const void*>& contributions, std::int64_t count) {
  using Stored = typename Type::Stored;
  constexpr std::int64_t kBlock = 1024;
  std::array<typename Type::Value, kBlock> sum;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const auto block = static_cast<std::size_t>(std::min(kBlock, count - begin));
    const auto* first = static_cast<const Stored*>(contributions.front()) + begin;
    for (std::size_t i = 0; i < block; ++i) sum[i] = Type::read(first[i]);
    for (std::size_t r = 1; r < contributions.size(); ++r) {
      const auto* next = static_cast<const Stored*>(contributions[r]) + begin;
      for (std::size_t i = 0; i < block; ++i) sum[i] = combine<op>(sum[i], Type::read(next[i]));
    }
    auto* result = static_cast<Stored*>(out) + begin;
    for (std::size_t i = 0; i < block; ++i) result[i] = Type::write(sum[i]);
  }
}

template <typename Type>
void reduce_with(ReduceOp op, void* out, const std::vector<const void*>& contributions, std::int64_t count) {
  switch (op) {
    case ReduceOp::sum:
      return reduce_typed<Type, ReduceOp::sum>(out, contributions, count);
    case ReduceOp::max:
      return reduce_typed<Type, ReduceOp::max>(out, contributions, count);
    case ReduceOp::min:
      return reduce_typed<Type, ReduceOp::min>(out, contributions, count);
  }
}

}  // namespace

void reduce_in_rank_order(void* out, const std::vector<const void*>& contributions, std::int64_t count, DType dtype,
                          ReduceOp op) {
  PDL_CHECK(!contributions.empty(), "a reduction of nothing");
  switch (dtype) {
    case DType::fp64:
      return reduce_with<Plain<double>>(op, out, contributions, count);
    case DType::fp32:
      return reduce_with<Plain<float>>(op, out, contributions, count);
    case DType::bf16:
      return reduce_with<Bf16>(op, out, contributions, count);
    case DType::fp16:
      return reduce_with<Fp16>(op, out, contributions, count);
    case DType::int64:
      return reduce_with<Plain<std::int64_t>>(op, out, contributions, count);
    case DType::int32:
      return reduce_with<Plain<std::int32_t>>(op, out, contributions, count);
    case DType::uint8:
      return reduce_with<Plain<std::uint8_t>>(op, out, contributions, count);
  }
}

float bf16_to_fp32(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

std::uint16_t fp32_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);  // without a payload it were infinity
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float fp16_to_fp32(std::uint16_t bits) {
  const float sign = bits >> 15 ? -1.0f : 1.0f;
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa ? std::bit_cast<float>(0x7fc00000u) : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
}

std::uint16_t fp32_to_fp16(float value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000u : 0u);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 65520.0f) return static_cast<std::uint16_t>(sign | 0x7c00u);  // halfway beyond the largest: infinity
  // The value in units of its last place: nearbyint rounds ties to even, and a carry runs into the exponent as it
  // should.
  const int exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);
  const auto units = static_cast<unsigned>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  const unsigned biased = magnitude < 0x1p-14f ? 0u : static_cast<unsigned>(exponent + 14) << 10;
  return static_cast<std::uint16_t>(sign | (biased + units));
}

}  // namespace pdl
