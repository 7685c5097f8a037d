#include "parallel/pipeline/message_boxes.h"

#include <algorithm>
#include <utility>

namespace pdl {

void Inbox::allocate(Device& device, const std::vector<Pool>& pools, MemoryKind kind, std::size_t ahead) {
  ahead_ = ahead;
  for (const Pool& pool : pools) {
    std::vector<Place>& places = pools_.emplace_back();
    for (int i = 0; i < pool.count; ++i) places.push_back({.buffer = device.allocate(pool.bytes, kind)});
  }
  turns_.assign(pools.size(), 0);
}

std::int64_t Inbox::bytes_of(const std::vector<Pool>& pools) {
  std::int64_t bytes = 0;
  for (const Pool& pool : pools) bytes += pool.count * pool.bytes;
  return bytes;
}

void Inbox::expect(std::vector<Expected> messages) {
  PDL_CHECK(taken_ == messages_.size(), messages_.size() - taken_, " messages were not taken");
  messages_ = std::move(messages);
  posted_.clear();
  taken_ = 0;
  turns_.assign(turns_.size(), 0);
}

void Inbox::expect_only(std::size_t count) {
  PDL_CHECK(posted_.size() <= count, posted_.size(), " messages are expected already, of ", count, " that will come");
  messages_.resize(std::min(count, messages_.size()));
}

void Inbox::post(Communicator& from, Stream& stream) {
  while (posted_.size() < messages_.size() && posted_.size() < taken_ + ahead_) {
    const Expected& message = messages_[posted_.size()];
    Place& place = place_for(message);
    if (!place.is_free) return;
    place.is_free = false;
    ++turns_[static_cast<std::size_t>(message.pool)];
    const Tensor tensor = place.buffer.tensor(message.spec.dtype, message.spec.shape);
    posted_.push_back({from.recv(tensor, message.peer, message.tag, stream), tensor});
  }
}

Tensor Inbox::take(Communicator& from, Stream& stream) {
  post(from, stream);
  PDL_CHECK(taken_ < posted_.size(), "no buffer is free for the message that is wanted");
  Posted& posted = posted_[taken_++];
  posted.work.wait(stream);
  return posted.tensor;
}

void Inbox::release(const Tensor& taken) {
  for (std::vector<Place>& pool : pools_) {
    for (Place& place : pool) {
      if (place.buffer.raw() == taken.raw()) place.is_free = true;
    }
  }
}

void Outbox::allocate(Device& device, int buffers, std::int64_t bytes) {
  for (int i = 0; i < buffers; ++i) {
    places_.push_back({.buffer = device.allocate(bytes, MemoryKind::communication), .work = {}});
  }
}

void Outbox::send(const Tensor& tensor, int peer, int tag, Communicator& to, Backend& backend, Stream& stream) {
  Place& place = places_[turn_++ % places_.size()];
  place.work.wait(stream);
  const Tensor copy = place.buffer.tensor(tensor.dtype(), tensor.shape());
  backend.copy(copy, tensor);
  place.work = to.send(copy, peer, tag, stream);
}

void Outbox::drain(Stream& stream) {
  for (std::size_t i = 0; i < places_.size(); ++i) places_[turn_++ % places_.size()].work.wait(stream);
  turn_ = 0;
}

}  // namespace pdl
