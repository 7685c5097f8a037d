#include "engine/data/idx_reader.h"

#include <algorithm>
#include <array>
#include <iomanip>
#include <sstream>
#include <string_view>

#include "engine/base/error.h"
#include "engine/data/input_file.h"

namespace pdl {
namespace {

constexpr std::int64_t kLargestExtent = 1 << 16;  // of an image's height, width or channels

std::uint32_t big_endian(const std::uint8_t* bytes) {
  return (std::uint32_t{bytes[0]} << 24) | (std::uint32_t{bytes[1]} << 16) | (std::uint32_t{bytes[2]} << 8) | bytes[3];
}

std::string hex(std::uint32_t word) {
  std::ostringstream out;
  out << "0x" << std::hex << std::setw(8) << std::setfill('0') << word;
  return out.str();
}

std::uint32_t byte_swapped(std::uint32_t word) {
  return (word >> 24) | ((word >> 8) & 0xff00u) | ((word << 8) & 0xff0000u) | (word << 24);
}

bool is_images(std::uint32_t magic) { return magic == kIdxGreyImagesMagic || magic == kIdxImagesMagic; }

// What a wrong magic number may mean, as an addition to the message.
std::string guess(std::uint32_t magic, bool want_images) {
  if (is_images(magic)) return " (a file of images)";
  if (magic == kIdxLabelsMagic) return " (a file of labels)";
  const std::uint32_t swapped = byte_swapped(magic);
  if (want_images ? is_images(swapped) : swapped == kIdxLabelsMagic) return " (written in little-endian order)";
  return "";
}

std::uint32_t read_word(InputFile& file, std::string_view what) {
  std::array<std::uint8_t, 4> bytes{};
  file.read_exactly(bytes.data(), 4, what);
  return big_endian(bytes.data());
}

std::int64_t read_extent(InputFile& file, std::string_view what, std::int64_t most) {
  const std::int64_t start = file.offset();
  const std::int64_t extent = read_word(file, what);
  if (extent < 1 || extent > most) file.fail(start, str(what, " between 1 and ", most), str(extent));
  return extent;
}

// The elements after the header, which must be exactly as many as it promises.
std::vector<std::uint8_t> read_elements(InputFile& file, std::int64_t count, std::string_view what) {
  const std::int64_t start = file.offset();
  // A damaged header may promise terabytes: compare with what the file can hold before asking for memory.
  if (count > file.most_bytes() - start)
    file.fail(start, str(count, " bytes of ", what),
              file.compressed() ? "a file too small for them"
                                : str(file.most_bytes() - start, " bytes (the file is truncated)"));
  std::vector<std::uint8_t> elements(static_cast<std::size_t>(count));
  file.read_exactly(elements.data(), count, what);
  file.expect_end();
  return elements;
}

}  // namespace

IdxImages read_idx_images(const std::string& path) {
  InputFile file(path);
  const std::uint32_t magic = read_word(file, "magic number");
  if (!is_images(magic))
    file.fail(0, str("magic number ", hex(kIdxGreyImagesMagic), " or ", hex(kIdxImagesMagic), " of IDX images"),
              hex(magic) + guess(magic, true));
  IdxImages images;
  images.count = read_extent(file, "number of images", 0xffffffff);
  images.height = read_extent(file, "image height", kLargestExtent);
  images.width = read_extent(file, "image width", kLargestExtent);
  if (magic == kIdxImagesMagic) images.channels = read_extent(file, "number of channels", 4);
  // 2^32 images of 2^34 bytes would overflow the product; no file can hold that many anyway.
  if (images.count > file.most_bytes() / images.bytes_per_image())
    file.fail(4,
              str("at most ", file.most_bytes() / images.bytes_per_image(), " images of ", images.bytes_per_image(),
                  " bytes, which is what the file can hold"),
              str(images.count, " (the file is truncated or its header damaged)"));
  images.pixels = read_elements(file, images.count * images.bytes_per_image(), "pixels");
  return images;
}

std::vector<std::uint8_t> read_idx_labels(const std::string& path, std::int64_t classes) {
  InputFile file(path);
  const std::uint32_t magic = read_word(file, "magic number");
  if (magic != kIdxLabelsMagic)
    file.fail(0, str("magic number ", hex(kIdxLabelsMagic), " of IDX labels"), hex(magic) + guess(magic, false));
  const std::int64_t count = read_extent(file, "number of labels", 0xffffffff);
  const std::int64_t start = file.offset();
  std::vector<std::uint8_t> labels = read_elements(file, count, "labels");
  const auto wrong = std::find_if(labels.begin(), labels.end(), [&](std::uint8_t label) { return label >= classes; });
  if (wrong != labels.end())
    file.fail(start + (wrong - labels.begin()), str("a label below ", classes), str(static_cast<int>(*wrong)));
  return labels;
}

IdxSet read_idx_set(const std::string& images_path, const std::string& labels_path, std::int64_t classes) {
  IdxSet set{read_idx_images(images_path), read_idx_labels(labels_path, classes)};
  const auto labels = static_cast<std::int64_t>(set.labels.size());
  if (labels != set.images.count)
    throw Error(str(labels_path, ": offset 4: expected ", set.images.count, " labels, one for each image of ",
                    images_path, ", got ", labels),
                ExitCode::data);
  return set;
}

}  // namespace pdl
