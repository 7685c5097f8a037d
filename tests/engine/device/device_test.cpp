#include "engine/device/device.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/catch.h"

using namespace pdl;

namespace {

std::unique_ptr<Device> cpu(std::int64_t limit = 0) {
  return make_device({.kind = "cpu", .threads = 1, .memory_limit_bytes = limit});
}

}  // namespace

TEST_CASE("memory comes zeroed and aligned, is counted as asked for, and goes back") {
  const auto device = cpu();
  for (const std::int64_t bytes : {0, 1, 63, 4096, 9 << 20}) {
    const Buffer buffer = device->allocate(bytes, MemoryKind::activations);
    REQUIRE(buffer.raw() != nullptr);
    CHECK(reinterpret_cast<std::uintptr_t>(buffer.raw()) % 64 == 0);
    const auto* data = static_cast<const unsigned char*>(buffer.raw());
    std::int64_t nonzero = 0;
    for (std::int64_t i = 0; i < bytes; ++i) nonzero += data[i] != 0;
    CHECK(nonzero == 0);
    CHECK(device->memory().current()[MemoryKind::activations] == bytes);
  }
  CHECK(device->memory().current().total() == 0);
  CHECK(device->memory().peak()[MemoryKind::activations] == 9 << 20);
}

TEST_CASE("a buffer moves, and gives back once") {
  const auto device = cpu();
  Buffer first = device->allocate(64, MemoryKind::gradients);
  void* data = first.raw();
  Buffer second = std::move(first);
  CHECK(second.raw() == data);
  CHECK(device->memory().current().total() == 64);
  second = device->allocate(128, MemoryKind::gradients);
  CHECK(device->memory().current().total() == 128);
  second = Buffer();
  CHECK(device->memory().current().total() == 0);
}

TEST_CASE("a tensor must lie inside its buffer") {
  const auto device = cpu();
  const Buffer buffer = device->allocate(64, MemoryKind::workspace);
  const Tensor tensor = buffer.tensor(DType::fp32, Shape{2, 4}, 32);
  CHECK(static_cast<char*>(tensor.raw()) == static_cast<char*>(buffer.raw()) + 32);
  CHECK_THROWS_AS(buffer.tensor(DType::fp32, Shape{2, 4}, 36), Error);
  CHECK_THROWS_AS(buffer.tensor(DType::fp32, Shape{1}, 2), Error);
  CHECK_THROWS_AS(buffer.tensor(DType::fp32, Shape{1}, -4), Error);
}

TEST_CASE("beyond the limit: code 5 and what is held, by kind") {
  const auto device = cpu(1 << 20);
  CHECK(device->memory_limit_bytes() == 1 << 20);
  const Buffer parameters = device->allocate(512 << 10, MemoryKind::parameters);
  const Buffer gradients = device->allocate(256 << 10, MemoryKind::gradients);
  try {
    device->allocate((256 << 10) + 1, MemoryKind::activations);
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::out_of_memory);
    CHECK_THAT(error.what(), ContainsSubstring("256 KiB more for activations"));
    CHECK_THAT(error.what(), ContainsSubstring("limit of 1.00 MiB"));
    CHECK_THAT(error.what(), ContainsSubstring("parameters 512 KiB, gradients 256 KiB (768 KiB in all)"));
  }
  const Buffer rest = device->allocate(256 << 10, MemoryKind::activations);
  CHECK(device->memory().current().total() == 1 << 20);
}

TEST_CASE("what no machine has is out of memory too") {
  const auto device = cpu(INT64_MAX);
  try {
    device->allocate(INT64_MAX - 8, MemoryKind::activations);
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::out_of_memory);
  }
  CHECK(device->memory().current().total() == 0);
}

TEST_CASE("a sealed arena gives nothing") {
  const auto device = cpu();
  device->seal();
  CHECK_THROWS_WITH(device->allocate(8, MemoryKind::workspace), ContainsSubstring("sealed"));
  device->unseal();
  CHECK(device->allocate(8, MemoryKind::workspace).bytes() == 8);
}

TEST_CASE("copies, streams and events of the CPU") {
  const auto device = cpu();
  Stream& stream = device->compute_stream();
  std::vector<int> from = {1, 2, 3}, to(3);
  device->copy(to.data(), from.data(), 12, stream);
  CHECK(to == from);
  device->copy(to.data() + 1, to.data(), 8, stream);
  CHECK(to == std::vector<int>{1, 1, 2});
  device->copy(nullptr, nullptr, 0, stream);
  const auto other = device->make_stream(true);
  const auto event = stream.make_event();
  stream.record(*event);
  other->wait(*event);
  other->synchronize();
}

TEST_CASE("devices that this build lacks are refused") {
  for (const std::string kind : {"cuda", "tpu"}) {
    try {
      make_device({.kind = kind});
      // A build with CUDA on a machine with a GPU may well succeed.
      CHECK(kind == "cuda");
    } catch (const ConfigError& error) {
      CHECK(error.code() == ExitCode::unsupported);
      CHECK_THAT(error.what(), ContainsSubstring(kind));
    }
  }
}
