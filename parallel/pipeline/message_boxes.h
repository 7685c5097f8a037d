#pragma once
// The two ends of a pipeline's messages on a rank: an inbox that posts receives ahead, an outbox that sends from
// buffers of its own. Both take all their memory once and use it in turn, from the first buffer on in every run.

#include <memory>
#include <vector>

#include "engine/backend/backend.h"
#include "parallel/comm/communicator.h"

namespace pdl {

/// A message that will come.
struct Expected {
  int peer = 0, tag = 0;
  int pool = 0;  ///< of the buffers that it may lie in
  TensorSpec spec;
};

class Inbox {
 public:
  struct Pool {
    int count = 0;
    std::int64_t bytes = 0;  ///< of each
  };
  /// Takes the buffers of each pool. Up to `ahead` messages are posted beyond those that were taken.
  void allocate(Device& device, const std::vector<Pool>& pools, MemoryKind kind, std::size_t ahead = 2);
  static std::int64_t bytes_of(const std::vector<Pool>& pools);

  /// What will come, in the order of sending. All of the run before has been taken.
  void expect(std::vector<Expected> messages);
  /// Only the first `count` of them will come; none beyond is posted yet.
  void expect_only(std::size_t count);
  /// Posts what may be posted: by default one message ahead of the one that is taken next, where its buffer is free.
  void post(Communicator& from, Stream& stream);
  /// The next message; waits for it.
  Tensor take(Communicator& from, Stream& stream);
  /// All work on a tensor that was taken is queued: its buffer is free again.
  void release(const Tensor& taken);

 private:
  struct Place {
    Buffer buffer;
    bool is_free = true;
  };
  Place& place_for(const Expected& message) {
    std::vector<Place>& pool = pools_[static_cast<std::size_t>(message.pool)];
    return pool[turns_[static_cast<std::size_t>(message.pool)] % pool.size()];
  }
  struct Posted {
    Work work;
    Tensor tensor;
  };

  std::vector<std::vector<Place>> pools_;
  std::vector<std::size_t> turns_;  ///< by pool: messages posted in this run
  std::vector<Expected> messages_;
  std::vector<Posted> posted_;  ///< the first of messages_
  std::size_t taken_ = 0, ahead_ = 2;
};

class Outbox {
 public:
  void allocate(Device& device, int buffers, std::int64_t bytes);
  /// Copies the tensor and sends the copy. Waits when all buffers are still under way.
  void send(const Tensor& tensor, int peer, int tag, Communicator& to, Backend& backend, Stream& stream);
  /// Waits until everything has been received, and starts again from the first buffer.
  void drain(Stream& stream);

 private:
  struct Place {
    Buffer buffer;
    Work work;
  };
  std::vector<Place> places_;
  std::size_t turn_ = 0;
};

}  // namespace pdl
