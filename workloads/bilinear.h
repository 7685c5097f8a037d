#pragma once
// Bilinear resizing of one image, from any number type to fp32. Pixel centres lie at half-integers, as in PyTorch's
// interpolate with align_corners false; beyond the edge the edge's value holds.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pdl {

class BilinearResize {
 public:
  BilinearResize(std::int64_t from_height, std::int64_t from_width, std::int64_t height, std::int64_t width)
      : rows_(taps(from_height, height)), columns_(taps(from_width, width)), from_width_(from_width) {}

  /// `from` [from_height, from_width, from_channels] to `to` [height, width, channels], each value v as (v - mean) *
  /// scale. One channel is written to all `channels`; otherwise from_channels == channels.
  template <typename Value>
  void operator()(const Value* from, std::int64_t from_channels, float* to, std::int64_t channels, float mean,
                  float scale) const {
    const std::int64_t row_values = from_width_ * from_channels;
    for (const Tap& y : rows_) {
      const Value* upper = from + y.first * row_values;
      const Value* lower = from + y.second * row_values;
      for (const Tap& x : columns_) {
        const std::int64_t left = x.first * from_channels, right = x.second * from_channels;
        float value = 0.0f;
        for (std::int64_t c = 0; c < channels; ++c) {
          if (c < from_channels) {
            const float top = mix(upper[left + c], upper[right + c], x.weight);
            const float bottom = mix(lower[left + c], lower[right + c], x.weight);
            value = (mix(top, bottom, y.weight) - mean) * scale;
          }
          *to++ = value;
        }
      }
    }
  }

 private:
  // The two pixels that an output pixel lies between, and how near it is to the second.
  struct Tap {
    std::int64_t first, second;
    float weight;
  };

  template <typename Value>
  static float mix(Value first, Value second, float weight) {
    const auto start = static_cast<float>(first);
    return start + (static_cast<float>(second) - start) * weight;
  }

  static std::vector<Tap> taps(std::int64_t from, std::int64_t to) {
    std::vector<Tap> all;
    for (std::int64_t i = 0; i < to; ++i) {
      const double centre = (static_cast<double>(i) + 0.5) * static_cast<double>(from) / static_cast<double>(to) - 0.5;
      const double position = centre < 0.0 ? 0.0 : centre;
      std::int64_t first = static_cast<std::int64_t>(position);
      if (first > from - 1) first = from - 1;
      const std::int64_t second = first + 1 < from ? first + 1 : first;
      all.push_back({first, second, static_cast<float>(position - static_cast<double>(first))});
    }
    return all;
  }

  std::vector<Tap> rows_, columns_;
  std::int64_t from_width_;
};

}  // namespace pdl
