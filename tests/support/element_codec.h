#pragma once
// Numbers to the bytes of any element type and back, on the host: bf16 and fp16 have no C++ type here. Values are
// rounded once, to nearest, ties to even.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "engine/base/error.h"
#include "engine/tensor/dtype.h"

namespace pdl::testing {

/// Layout of a 16-bit floating-point type: sign, exponent, mantissa.
struct HalfFormat {
  explicit HalfFormat(DType dtype) : mantissa(dtype == DType::bf16 ? 7 : 10), bias(dtype == DType::bf16 ? 127 : 15) {
    PDL_CHECK(is_half(dtype), name_of(dtype), " is no 16-bit type");
  }
  int mantissa;  ///< bits of it
  int bias;      ///< of the exponent, which is also the largest exponent of a finite number
  std::int64_t infinity() const { return (2 * static_cast<std::int64_t>(bias) + 1) << mantissa; }
};

inline std::uint16_t half_bits(double x, DType dtype) {
  const HalfFormat format(dtype);
  const std::int64_t sign = std::signbit(x) ? 0x8000 : 0;
  std::int64_t bits = format.infinity();
  if (std::isnan(x)) {
    bits |= std::int64_t{1} << (format.mantissa - 1);
  } else if (std::isfinite(x)) {
    // Numbers below the smallest normal one share its exponent. A mantissa that rounds up carries into the exponent,
    // from the largest finite number into infinity.
    const double magnitude = std::fabs(x);
    const int exponent = magnitude == 0.0 ? 1 - format.bias : std::max(std::ilogb(magnitude), 1 - format.bias);
    const auto units = static_cast<std::int64_t>(std::nearbyint(std::ldexp(magnitude, format.mantissa - exponent)));
    bits = std::min(bits, (static_cast<std::int64_t>(exponent + format.bias - 1) << format.mantissa) + units);
  }
  return static_cast<std::uint16_t>(sign | bits);
}

inline double half_value(std::uint16_t bits, DType dtype) {
  const HalfFormat format(dtype);
  const int exponent = (bits & 0x7FFF) >> format.mantissa, hidden = 1 << format.mantissa,
            fraction = bits & (hidden - 1);
  double magnitude = 0.0;
  if (exponent == 2 * format.bias + 1) {
    magnitude = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else {
    const int significand = exponent == 0 ? fraction : fraction + hidden;
    magnitude = std::ldexp(significand, std::max(exponent, 1) - format.bias - format.mantissa);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

template <typename T>
void store_as(std::byte* to, double value) {
  const T element = static_cast<T>(value);
  std::memcpy(to, &element, sizeof(T));
}
template <typename T>
double load_as(const std::byte* from) {
  T element;
  std::memcpy(&element, from, sizeof(T));
  return static_cast<double>(element);
}

/// Writes one element; `to` needs no alignment.
inline void store_element(std::byte* to, DType dtype, double value) {
  switch (dtype) {
    case DType::fp64:
      return store_as<double>(to, value);
    case DType::fp32:
      return store_as<float>(to, value);
    case DType::int64:
      return store_as<std::int64_t>(to, value);
    case DType::int32:
      return store_as<std::int32_t>(to, value);
    case DType::uint8:
      return store_as<std::uint8_t>(to, value);
    default: {
      const std::uint16_t bits = half_bits(value, dtype);
      std::memcpy(to, &bits, sizeof(bits));
    }
  }
}

inline double load_element(const std::byte* from, DType dtype) {
  switch (dtype) {
    case DType::fp64:
      return load_as<double>(from);
    case DType::fp32:
      return load_as<float>(from);
    case DType::int64:
      return load_as<std::int64_t>(from);
    case DType::int32:
      return load_as<std::int32_t>(from);
    case DType::uint8:
      return load_as<std::uint8_t>(from);
    default: {
      std::uint16_t bits = 0;
      std::memcpy(&bits, from, sizeof(bits));
      return half_value(bits, dtype);
    }
  }
}

/// The number that an element of this type holds after `value` was written to it.
inline double rounded_to(DType dtype, double value) {
  std::byte element[8];
  store_element(element, dtype, value);
  return load_element(element, dtype);
}

}  // namespace pdl::testing
