#pragma once
// Counter-based random numbers (Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11).
//
// A number is a pure function of what it is for (seed, update, sample, layer, element), never of who computes it or
// when. So no engine, shard, micro-batch split, replay or thread count can change a dropout mask, an initial weight or
// the order of the samples.

#include <array>
#include <cstdint>
#include <vector>

namespace pdl {

/// What a stream of random numbers is for: keeps the streams of one seed apart.
enum class RandomUse : std::uint32_t { init = 1, dropout = 2, shuffle = 3, synthetic = 4 };

/// Ten rounds of Philox on one 128-bit counter. The same function, lane by lane, on CPU and GPU.
inline std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

/// The Philox key of a seed and a use: the use is folded into the high word.
inline std::array<std::uint32_t, 2> philox_key(std::uint64_t seed, RandomUse use) {
  return {static_cast<std::uint32_t>(seed),
          static_cast<std::uint32_t>(seed >> 32) ^ (static_cast<std::uint32_t>(use) * 0x85EBCA6Bu)};
}

/// 32 random bits to a double in the open interval (0, 1), symmetric about 1/2.
inline double to_unit(std::uint32_t bits) { return (bits + 0.5) * (1.0 / 4294967296.0); }

/// The stream of numbers of one (seed, use, id): element `i` at random access.
class RandomStream {
 public:
  RandomStream(std::uint64_t seed, RandomUse use, std::uint64_t id) : key_(philox_key(seed, use)), id_(id) {}

  /// 32 uniform bits for element `index`.
  std::uint32_t bits(std::uint64_t index) const { return block(index)[index & 3]; }
  /// Uniform in (0, 1).
  double uniform(std::uint64_t index) const { return to_unit(bits(index)); }
  /// Standard normal (Box-Muller on elements 2 floor(i/2) and 2 floor(i/2) + 1).
  double normal(std::uint64_t index) const;
  /// Uniform integer in [0, bound), bound < 2^32, without modulo bias beyond 2^-32.
  std::uint32_t below(std::uint64_t index, std::uint32_t bound) const {
    return static_cast<std::uint32_t>((std::uint64_t{bits(index)} * bound) >> 32);
  }

 private:
  // The four elements of which `index` is one: they share a counter.
  std::array<std::uint32_t, 4> block(std::uint64_t index) const {
    return philox4x32({static_cast<std::uint32_t>(index >> 2), static_cast<std::uint32_t>(index >> 34),
                       static_cast<std::uint32_t>(id_), static_cast<std::uint32_t>(id_ >> 32)},
                      key_);
  }

  std::array<std::uint32_t, 2> key_;
  std::uint64_t id_;
};

/// A permutation of 0..count-1 (Fisher-Yates) that depends on (seed, id) alone. `count` is below 2^32.
std::vector<std::int64_t> random_permutation(std::int64_t count, std::uint64_t seed, std::uint64_t id);

}  // namespace pdl
