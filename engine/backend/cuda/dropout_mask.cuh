#pragma once
// Which elements dropout keeps: the bits that engine/backend/cpu/dropout_mask.h defines, computed where they are needed
// and never stored.

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "engine/backend/backend.h"
#include "engine/base/error.h"
#include "engine/base/random.h"

namespace pdl::cuda {

/// The mask that engine/backend/cpu/dropout_mask.h defines, bit for bit.
struct DropoutMask {
  explicit DropoutMask(const DropoutKey& key)
      : sample_ids(key.sample_ids),
        site(key.site),
        update(key.update),
        local_width(key.local_width),
        full_width(key.full_width),
        first_column(key.first_column),
        rate(key.rate) {
    PDL_CHECK(key.rate >= 0.0 && key.rate < 1.0, "dropout rate ", key.rate);
    PDL_CHECK(key.rate == 0.0 || key.update != nullptr, "dropout without an update that the samples belong to");
    const auto words = philox_key(key.seed, RandomUse::dropout);
    key0 = words[0];
    key1 = words[1];
    threshold = static_cast<std::uint32_t>(std::clamp(std::ceil(key.rate * 4294967296.0 - 0.5), 0.0, 4294967295.0));
    kept = static_cast<float>(1.0 / (1.0 - key.rate));
  }

  bool active() const { return rate > 0.0; }

  /// The four random words of elements 4 * quad .. 4 * quad + 3 of a sample.
  __device__ uint4 words(std::int64_t sample_id, std::int64_t quad) const {
    std::uint32_t a = static_cast<std::uint32_t>(quad), b = static_cast<std::uint32_t>(sample_id), c = site,
                  d = static_cast<std::uint32_t>(__ldg(update));
    std::uint32_t k0 = key0, k1 = key1;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const std::uint32_t high0 = __umulhi(0xD2511F53u, a), low0 = 0xD2511F53u * a;
      const std::uint32_t high1 = __umulhi(0xCD9E8D57u, c), low1 = 0xCD9E8D57u * c;
      a = high1 ^ b ^ k0;
      b = low1;
      c = high0 ^ d ^ k1;
      d = low0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return make_uint4(a, b, c, d);
  }

  __device__ float scale_of(std::uint32_t word) const { return word >= threshold ? kept : 0.0f; }

  /// 0 or 1 / (1 - rate) for one element of the unsharded sample.
  __device__ float scale(std::int64_t sample_id, std::int64_t element) const {
    const uint4 four = words(sample_id, element / 4);
    const int place = static_cast<int>(element % 4);
    return scale_of(place < 2 ? (place == 0 ? four.x : four.y) : (place == 2 ? four.z : four.w));
  }

  /// The same for kWidth elements from `element` on, which is a multiple of 4 unless kWidth is 1.
  template <int kWidth>
  __device__ void scales(float (&to)[kWidth], std::int64_t sample_id, std::int64_t element) const {
    static_assert(kWidth == 1 || kWidth % 4 == 0);
    if constexpr (kWidth == 1) {
      to[0] = scale(sample_id, element);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        const uint4 four = words(sample_id, (element + i) / 4);
        to[i] = scale_of(four.x);
        to[i + 1] = scale_of(four.y);
        to[i + 2] = scale_of(four.z);
        to[i + 3] = scale_of(four.w);
      }
    }
  }

  /// Place in the unsharded sample of local element `local` of a sample.
  __device__ std::int64_t global_element(std::int64_t local) const {
    if (local_width == 0) return local;
    return local / local_width * full_width + first_column + local % local_width;
  }

  const std::int64_t *sample_ids, *update;
  std::uint32_t site, key0 = 0, key1 = 0, threshold = 0;
  std::int64_t local_width, full_width, first_column;
  double rate;
  float kept = 1.0f;
};

}  // namespace pdl::cuda
