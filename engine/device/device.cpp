#include "engine/device/device.h"

#include <utility>

#include "engine/device/cpu_device.h"
#if PDL_WITH_CUDA
#include "engine/device/cuda_device.h"
#endif

namespace pdl {
namespace {

/// "parameters 1.00 MiB, gradients 1.00 MiB (2.00 MiB in all)", kinds that hold nothing left out.
std::string describe_held(const MemoryByKind& held) {
  std::string text;
  for (int kind = 0; kind < kMemoryKinds; ++kind) {
    const std::int64_t bytes = held[static_cast<MemoryKind>(kind)];
    if (bytes == 0) continue;
    text += str(text.empty() ? "" : ", ", kMemoryKindNames[static_cast<std::size_t>(kind)], " ", format_bytes(bytes));
  }
  return text.empty() ? "nothing" : str(text, " (", format_bytes(held.total()), " in all)");
}

}  // namespace

std::unique_ptr<Recording> Stream::record_work(const std::function<void()>&) {
  PDL_CHECK(false, "this stream does not record");
  return nullptr;
}

void Stream::replay(const Recording&) { PDL_CHECK(false, "this stream does not record"); }

Buffer::~Buffer() {
  if (device_ != nullptr) device_->release(data_, bytes_, kind_);
}

Tensor Buffer::tensor(DType dtype, Shape shape, std::int64_t offset_bytes) const {
  const std::int64_t bytes = shape.elements() * size_of(dtype);
  PDL_CHECK(offset_bytes >= 0 && offset_bytes + bytes <= bytes_, "a tensor ", shape.to_string(), " of ", name_of(dtype),
            " at byte ", offset_bytes, " of a buffer of ", bytes_, " bytes");
  PDL_CHECK(offset_bytes % size_of(dtype) == 0, "byte ", offset_bytes, " is no place for ", name_of(dtype));
  return Tensor(static_cast<char*>(data_) + offset_bytes, dtype, shape);
}

void Buffer::swap(Buffer& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(kind_, other.kind_);
}

HostBuffer::~HostBuffer() {
  if (device_ != nullptr) device_->raw_free_host(data_);
}

void HostBuffer::swap(HostBuffer& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
}

HostBuffer Device::allocate_host(std::int64_t bytes) {
  void* const data = raw_allocate_host(bytes);
  if (data == nullptr) {
    throw Error(str("out of memory: the system refused ", format_bytes(bytes), " of host memory"),
                ExitCode::out_of_memory);
  }
  return HostBuffer(*this, data, bytes);
}

Buffer Device::allocate(std::int64_t bytes, MemoryKind kind) {
  const std::string_view name = kMemoryKindNames[static_cast<std::size_t>(kind)];
  PDL_CHECK(bytes >= 0, "allocation of ", bytes, " bytes for ", name);
  PDL_CHECK(!sealed_, "allocation of ", format_bytes(bytes), " for ", name,
            " after the arena was sealed: memory is taken in the first step or before");
  const auto refuse = [&](const std::string& why) {
    throw Error(str("out of memory: ", format_bytes(bytes), " more for ", name, " ", why, "; held are ",
                    describe_held(memory_.current())),
                ExitCode::out_of_memory);
  };
  const std::int64_t room = memory_limit_bytes_ - memory_.current().total();
  if (memory_limit_bytes_ > 0 && bytes > room) {
    refuse(str("exceed the limit of ", format_bytes(memory_limit_bytes_), " of this ", info().kind, " device"));
  }
  void* data = raw_allocate(bytes);
  if (data == nullptr) refuse(str("refused by the system on this ", info().kind, " device"));
  memory_.add(kind, bytes);
  return Buffer(*this, data, bytes, kind);
}

void Device::release(void* data, std::int64_t bytes, MemoryKind kind) noexcept {
  raw_free(data, bytes);
  memory_.add(kind, -bytes);
}

int device_count(const std::string& kind) {
  if (kind == "cpu") return 1;
#if PDL_WITH_CUDA
  if (kind == "cuda") return cuda_device_count();
#endif
  return 0;
}

std::unique_ptr<Device> make_device(const DeviceOptions& options) {
  if (options.kind == "cpu") return make_cpu_device(options);
  if (options.kind == "cuda") {
#if PDL_WITH_CUDA
    return make_cuda_device(options);
#else
    throw ConfigError("device \"cuda\" cannot be used: this build has no CUDA backend; use \"cpu\"",
                      ExitCode::unsupported);
#endif
  }
  throw ConfigError(str("device \"", options.kind, "\" is unknown: there are \"cpu\" and \"cuda\""),
                    ExitCode::unsupported);
}

}  // namespace pdl
