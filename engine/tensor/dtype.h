#pragma once
// Element types. fp64 is the oracle on CPU; bf16 and fp16 exist for backends that compute in them.

#include <cstdint>
#include <string_view>

namespace pdl {

enum class DType : std::uint8_t { fp64, fp32, bf16, fp16, int64, int32, uint8 };

constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::fp64:
    case DType::int64:
      return 8;
    case DType::fp32:
    case DType::int32:
      return 4;
    case DType::bf16:
    case DType::fp16:
      return 2;
    case DType::uint8:
      return 1;
  }
  return 0;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::fp64:
      return "fp64";
    case DType::fp32:
      return "fp32";
    case DType::bf16:
      return "bf16";
    case DType::fp16:
      return "fp16";
    case DType::int64:
      return "int64";
    case DType::int32:
      return "int32";
    case DType::uint8:
      return "uint8";
  }
  return "?";
}

/// True for bf16 and fp16: too few digits to add up in.
constexpr bool is_half(DType dtype) { return dtype == DType::bf16 || dtype == DType::fp16; }

/// Type of everything that adds up beside values of `dtype`: statistics, losses, gradients of weights, master weights,
/// moments. fp32 at least.
constexpr DType wide_dtype(DType dtype) { return dtype == DType::fp64 ? DType::fp64 : DType::fp32; }

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::fp64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::fp32;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::int64;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::int32;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::uint8;
};

}  // namespace pdl
