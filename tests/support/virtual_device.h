#pragma once
// A device of streams with a clock each and no work: for tests of what is measured on streams that lag behind the host.
// A test says how long something takes by moving a stream's clock; events carry times from one stream to another.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "engine/device/device.h"

namespace pdl::testing {

class VirtualEvent final : public Event {
 public:
  double at_s = 0.0;
};

class VirtualStream final : public Stream {
 public:
  std::unique_ptr<Event> make_event() override { return std::make_unique<VirtualEvent>(); }
  void record(Event& event) override { static_cast<VirtualEvent&>(event).at_s = now_s; }
  void wait(const Event& event) override { now_s = std::max(now_s, static_cast<const VirtualEvent&>(event).at_s); }
  void synchronize() override { ++synchronized; }

  double now_s = 0.0;
  int synchronized = 0;
};

/// Says how often and how early it was read.
class VirtualStopwatch final : public Stopwatch {
 public:
  struct Reads {
    int count = 0;
    std::int64_t fewest_marks_behind = kRemembered;
  };
  VirtualStopwatch(VirtualStream& stream, std::shared_ptr<Reads> reads) : stream_(stream), reads_(std::move(reads)) {}

  std::int64_t mark() override {
    times_s_.push_back(stream_.now_s);
    return static_cast<std::int64_t>(times_s_.size()) - 1;
  }
  double seconds(std::int64_t from, std::int64_t to) override {
    const auto marks = static_cast<std::int64_t>(times_s_.size());
    PDL_CHECK(from <= to && to < marks && from >= marks - kRemembered, "marks ", from, " to ", to, " of ", marks);
    ++reads_->count;
    reads_->fewest_marks_behind = std::min(reads_->fewest_marks_behind, marks - to);
    return times_s_[static_cast<std::size_t>(to)] - times_s_[static_cast<std::size_t>(from)];
  }
  void anchor() override { anchored_ = true; }
  /// The host's clock is ahead by 1000.
  double host_s(std::int64_t mark) override {
    PDL_CHECK(anchored_, "no anchor");
    return 1000.0 + times_s_.at(static_cast<std::size_t>(mark));
  }

 private:
  VirtualStream& stream_;
  std::shared_ptr<Reads> reads_;
  std::vector<double> times_s_;
  bool anchored_ = false;
};

class VirtualDevice final : public Device {
 public:
  VirtualDevice() : Device(0) {}
  DeviceInfo info() const override { return {.kind = "virtual", .name = "virtual", .uuid = "0"}; }
  VirtualStream& compute_stream() override { return compute_; }
  std::unique_ptr<Stream> make_stream(bool) override { return std::make_unique<VirtualStream>(); }
  using Device::make_stopwatch;
  std::unique_ptr<Stopwatch> make_stopwatch(Stream& stream) override {
    return std::make_unique<VirtualStopwatch>(static_cast<VirtualStream&>(stream), reads);
  }
  void copy(void* destination, const void* source, std::int64_t bytes, Stream&) override {
    std::memmove(destination, source, static_cast<std::size_t>(bytes));
  }
  std::int64_t used_bytes() const override { return 0; }

  /// Of all its stopwatches.
  std::shared_ptr<VirtualStopwatch::Reads> reads = std::make_shared<VirtualStopwatch::Reads>();

 protected:
  void* raw_allocate(std::int64_t bytes) override {
    return std::calloc(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)), 1);
  }
  void raw_free(void* data, std::int64_t) noexcept override { std::free(data); }
  void* raw_allocate_host(std::int64_t bytes) override { return raw_allocate(bytes); }
  void raw_free_host(void* data) noexcept override { std::free(data); }

 private:
  VirtualStream compute_;
};

}  // namespace pdl::testing
