#include "engine/device/memory_tracker.h"

#include "tests/support/catch.h"

using namespace pdl;

TEST_CASE("the peak of the total is a moment of its own") {
  MemoryTracker tracker;
  tracker.add(MemoryKind::activations, 100);
  tracker.add(MemoryKind::activations, -100);
  tracker.add(MemoryKind::gradients, 70);
  tracker.add(MemoryKind::workspace, 20);
  CHECK(tracker.current().total() == 90);
  CHECK(tracker.peak()[MemoryKind::activations] == 100);
  CHECK(tracker.peak()[MemoryKind::gradients] == 70);
  CHECK(tracker.peak_total() == 100);
  CHECK(tracker.at_peak()[MemoryKind::activations] == 100);
  CHECK(tracker.at_peak()[MemoryKind::gradients] == 0);

  tracker.reset_peak();
  CHECK(tracker.peak()[MemoryKind::activations] == 0);
  CHECK(tracker.peak_total() == 90);
  CHECK(tracker.at_peak()[MemoryKind::workspace] == 20);
  tracker.add(MemoryKind::workspace, 1);
  CHECK(tracker.peak_total() == 91);
}

TEST_CASE("bytes are written with three significant digits") {
  CHECK(format_bytes(0) == "0 B");
  CHECK(format_bytes(512) == "512 B");
  CHECK(format_bytes(1023) == "1023 B");
  CHECK(format_bytes(1024) == "1.00 KiB");
  CHECK(format_bytes(64ll << 20) == "64.0 MiB");
  CHECK(format_bytes(5ll << 28) == "1.25 GiB");
  CHECK(format_bytes(640ll << 10) == "640 KiB");
  CHECK(format_bytes((1ll << 20) - 1) == "1.00 MiB");
  CHECK(format_bytes(3000ll << 40) == "3000 TiB");
  CHECK(format_bytes(-2048) == "-2.00 KiB");
}
