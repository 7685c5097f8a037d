#pragma once
// IDX, the format of MNIST and its successors: a big-endian magic number 0x0000 TT DD (element type, number of
// dimensions), DD extents as uint32, then the elements. Read here: bytes (TT = 08) with DD = 1 (labels), 3 (grey images
// [N, H, W]) or 4 (images [N, H, W, C]), plain or gzip.
//
// Every size is checked against the file before memory is taken. All errors are Error(data) with path, offset,
// expected, got.

#include <cstdint>
#include <string>
#include <vector>

namespace pdl {

inline constexpr std::uint32_t kIdxLabelsMagic = 0x00000801;
inline constexpr std::uint32_t kIdxGreyImagesMagic = 0x00000803;
inline constexpr std::uint32_t kIdxImagesMagic = 0x00000804;

/// Bytes [N, H, W, C].
struct IdxImages {
  std::int64_t count = 0, height = 0, width = 0, channels = 1;
  std::vector<std::uint8_t> pixels;
  std::int64_t bytes_per_image() const { return height * width * channels; }
};

/// Images with the label of each.
struct IdxSet {
  IdxImages images;
  std::vector<std::uint8_t> labels;
};

/// At least one image.
IdxImages read_idx_images(const std::string& path);
/// At least one label, each below `classes`.
std::vector<std::uint8_t> read_idx_labels(const std::string& path, std::int64_t classes);
/// Both, as many labels as images.
IdxSet read_idx_set(const std::string& images_path, const std::string& labels_path, std::int64_t classes);

}  // namespace pdl
