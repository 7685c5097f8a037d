#pragma once
// The identity of data: 64-bit FNV-1a over its bytes (Fowler, Noll, Vo), so that two records show whether they saw the
// same samples. No protection against intent.

#include <cstddef>
#include <cstdint>
#include <string>

namespace pdl {

class ContentHash {
 public:
  void add(const void* data, std::size_t bytes) {
    const auto* byte = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < bytes; ++i) value_ = (value_ ^ byte[i]) * 0x100000001b3u;
  }
  std::uint64_t value() const { return value_; }
  /// 16 hex digits.
  std::string hex() const {
    std::string text(16, '0');
    for (int digit = 0; digit < 16; ++digit) text[15 - digit] = "0123456789abcdef"[(value_ >> (4 * digit)) & 15];
    return text;
  }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace pdl
