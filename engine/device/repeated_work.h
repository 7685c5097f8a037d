#pragma once
// Work that comes again and again with the same arguments, such as the passes over micro-batches: at first it is done
// as it comes, then recorded, and from then on replayed as a whole. On a device that cannot record it is always done.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "engine/device/device.h"

namespace pdl {

class RepeatedWork {
 public:
  /// Everything that tells one piece of work from another: addresses, sizes, scalars. What is read from device memory
  /// does not belong here.
  using Key = std::vector<std::int64_t>;

  /// `stream` outlives this.
  explicit RepeatedWork(Stream& stream) : stream_(stream) {}

  /// Does `work`, all of which is queued on the stream, or replays what it did under this key before. The first time it
  /// really runs, so that it can prepare what it needs (plans, scratch); it is recorded the second time. Returns what
  /// `work` returned.
  Tensor run(const Key& key, const std::function<Tensor()>& work);

  /// Keys that are remembered: further ones, as from batches that are never alike, are not recorded.
  static constexpr std::size_t kMostKeys = 128;

 private:
  struct Known {
    Tensor result;
    std::unique_ptr<Recording> recording;  ///< null for work that was done once
  };
  Stream& stream_;
  std::map<Key, Known> known_;
};

}  // namespace pdl
