#pragma once
// Which elements dropout keeps: the one definition for every operation of this backend, written so that any other
// backend can compute the same bits.
//
//   key     = philox_key(seed, RandomUse::dropout)
//   counter = {element / 4, low 32 bits of the global sample id, site, low 32 bits of the update}
//   bits    = word (element % 4) of philox4x32(counter, key)
//   kept    iff to_unit(bits) >= rate; what is kept is multiplied by 1 / (1 - rate)
//
// `element` counts inside one sample of the unsharded tensor and is below 2^34. For attention it is (head * T + query)
// * T + key.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "engine/backend/backend.h"
#include "engine/base/random.h"

namespace pdl {

/// The mask of one DropoutKey, as a pure function of (global sample id, element).
class DropoutMask {
 public:
  explicit DropoutMask(const DropoutKey& key)
      : key_(philox_key(key.seed, RandomUse::dropout)), site_(key.site), rate_(key.rate) {
    PDL_CHECK(rate_ >= 0.0 && rate_ < 1.0, "dropout rate ", rate_);
    PDL_CHECK(rate_ == 0.0 || key.update != nullptr, "dropout without an update that the samples belong to");
    if (rate_ > 0.0) update_ = static_cast<std::uint32_t>(*key.update);
    // to_unit(bits) >= rate, solved for the bits; every step is exact in fp64.
    threshold_ = static_cast<std::uint32_t>(std::clamp(std::ceil(rate_ * 4294967296.0 - 0.5), 0.0, 4294967295.0));
  }

  /// False when nothing is dropped: then all scales are 1.
  bool active() const { return rate_ > 0.0; }

  bool keeps(std::int64_t sample_id, std::int64_t element) const {
    const auto words = philox4x32(
        {static_cast<std::uint32_t>(element / 4), static_cast<std::uint32_t>(sample_id), site_, update_}, key_);
    return words[static_cast<std::size_t>(element % 4)] >= threshold_;
  }

  /// scales[i] = 0 or 1 / (1 - rate) for element first + i, i < count.
  template <typename T>
  void fill(T* scales, std::int64_t sample_id, std::int64_t first, std::int64_t count) const {
    const T kept = static_cast<T>(1.0 / (1.0 - rate_));
    for (std::int64_t done = 0; done < count;) {
      const std::int64_t block = (first + done) / kBlock;
      const Words words = block_words(sample_id, block);
      const std::int64_t from = first + done - block * kBlock;
      const std::int64_t to = std::min<std::int64_t>(kBlock, from + count - done);
      for (std::int64_t i = from; i < to; ++i) {
        scales[done + i - from] = words[static_cast<std::size_t>(i)] >= threshold_ ? kept : T{0};
      }
      done += to - from;
    }
  }

 private:
  static constexpr std::int64_t kLanes = 32;          // counters at once
  static constexpr std::int64_t kBlock = 4 * kLanes;  // elements at once
  using Words = std::array<std::uint32_t, kBlock>;

  // The words of elements [block * kBlock, (block + 1) * kBlock): philox4x32 on kLanes counters side by side.
  Words block_words(std::int64_t sample_id, std::int64_t block) const {
    // 64-bit lanes that hold 32 bits: the widening products then need no shuffles.
    std::array<std::uint64_t, kLanes> a, b, c, d;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      a[lane] = static_cast<std::uint32_t>(block * kLanes + static_cast<std::int64_t>(lane));
      b[lane] = static_cast<std::uint32_t>(sample_id);
      c[lane] = site_;
      d[lane] = update_;
    }
    std::array<std::uint32_t, 2> key = key_;
    for (int round = 0; round < 10; ++round) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * a[lane];
        const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * c[lane];
        a[lane] = (product1 >> 32) ^ b[lane] ^ key[0];
        b[lane] = static_cast<std::uint32_t>(product1);
        c[lane] = (product0 >> 32) ^ d[lane] ^ key[1];
        d[lane] = static_cast<std::uint32_t>(product0);
      }
      key[0] += 0x9E3779B9u;
      key[1] += 0xBB67AE85u;
    }
    Words words;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      words[4 * lane] = static_cast<std::uint32_t>(a[lane]);
      words[4 * lane + 1] = static_cast<std::uint32_t>(b[lane]);
      words[4 * lane + 2] = static_cast<std::uint32_t>(c[lane]);
      words[4 * lane + 3] = static_cast<std::uint32_t>(d[lane]);
    }
    return words;
  }

  std::array<std::uint32_t, 2> key_;
  std::uint32_t site_, update_ = 0;
  std::uint32_t threshold_ = 0;
  double rate_;
};

}  // namespace pdl
