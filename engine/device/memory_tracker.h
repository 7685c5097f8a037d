#pragma once
// Bytes by what they are for. The same kinds name the predicted bytes (`Engine::predict`) and the measured ones, so
// that the two stand in one table.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace pdl {

enum class MemoryKind : int {
  parameters,
  weight_versions,
  gradients,
  optimizer,
  activations,
  communication,
  workspace
};
inline constexpr int kMemoryKinds = 7;
inline constexpr std::array<std::string_view, kMemoryKinds> kMemoryKindNames = {
    "parameters", "weight_versions", "gradients", "optimizer", "activations", "communication", "workspace"};

/// One number of bytes per kind.
struct MemoryByKind {
  std::array<std::int64_t, kMemoryKinds> bytes{};

  std::int64_t& operator[](MemoryKind kind) { return bytes[static_cast<int>(kind)]; }
  std::int64_t operator[](MemoryKind kind) const { return bytes[static_cast<int>(kind)]; }
  std::int64_t total() const {
    std::int64_t sum = 0;
    for (std::int64_t value : bytes) sum += value;
    return sum;
  }
  MemoryByKind& operator+=(const MemoryByKind& more) {
    for (std::size_t kind = 0; kind < bytes.size(); ++kind) bytes[kind] += more.bytes[kind];
    return *this;
  }
};

/// Current and peak bytes of one device, by kind and in total. The peak of the total is a moment of its own, never the
/// sum of the kinds' peaks.
class MemoryTracker {
 public:
  void add(MemoryKind kind, std::int64_t bytes);  ///< negative when memory is given back
  void reset_peak();                              ///< the peaks become what is held now
  const MemoryByKind& current() const { return current_; }
  const MemoryByKind& peak() const { return peak_; }
  std::int64_t peak_total() const { return peak_total_; }
  /// What each kind held when the total was at its peak.
  const MemoryByKind& at_peak() const { return at_peak_; }

 private:
  MemoryByKind current_, peak_, at_peak_;
  std::int64_t peak_total_ = 0;
};

/// "1.25 GiB", "64.0 MiB", "512 B".
std::string format_bytes(std::int64_t bytes);

}  // namespace pdl
