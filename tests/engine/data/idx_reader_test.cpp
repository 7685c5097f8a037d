#include "engine/data/idx_reader.h"

#include <numeric>

#include "engine/data/input_file.h"
#include "tests/engine/data/data_files.h"

using namespace pdl;
using namespace pdl::testing;

namespace {

std::string counting_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  std::iota(bytes.begin(), bytes.end(), static_cast<char>(1));
  return bytes;
}

const std::string kImages = idx_images(3, 4, 5, counting_bytes(60));
const std::string kLabels = idx_labels(3, std::string("\x00\x09\x04", 3));

}  // namespace

TEST_CASE("IDX: images and labels, plain and gzip, whatever the name") {
  const DataFiles files;
  for (const bool compressed : {false, true}) {
    const auto write = [&](const std::string& name, const std::string& bytes) {
      return compressed ? files.write_gzip(name, bytes) : files.write(name, bytes);
    };
    const IdxSet set = read_idx_set(write("images", kImages), write("labels.gz", kLabels), 10);
    CHECK(set.images.count == 3);
    CHECK(set.images.height == 4);
    CHECK(set.images.width == 5);
    CHECK(set.images.channels == 1);
    CHECK(std::string(set.images.pixels.begin(), set.images.pixels.end()) == counting_bytes(60));
    CHECK(set.labels == std::vector<std::uint8_t>{0, 9, 4});
  }
}

TEST_CASE("IDX: four dimensions are images with channels") {
  const DataFiles files;
  const std::string header = big_endian(0x804) + big_endian(2) + big_endian(2) + big_endian(2) + big_endian(3);
  const IdxImages images = read_idx_images(files.write("colour", header + counting_bytes(24)));
  CHECK(images.channels == 3);
  CHECK(images.bytes_per_image() == 12);
}

TEST_CASE("IDX: a file cut anywhere is refused, with path and offset") {
  const DataFiles files;
  const auto refused = [&](const std::string& whole, auto read) {
    for (std::size_t length = 0; length < whole.size(); ++length) {
      const std::string path = files.write("cut", whole.substr(0, length));
      const std::string message = failure([&] { read(path); });
      INFO(length << ": " << message);
      CHECK_THAT(message, StartsWith(path + ": offset "));
      CHECK_THAT(message, ContainsSubstring("expected ") && ContainsSubstring(", got "));
    }
  };
  const auto images = [](const std::string& path) { read_idx_images(path); };
  const auto labels = [](const std::string& path) { read_idx_labels(path, 10); };
  refused(kImages, images);
  refused(kLabels, labels);
  files.write_gzip("whole", kImages);
  refused(files.read("whole"), images);
  files.write_gzip("whole", kLabels);
  refused(files.read("whole"), labels);
}

TEST_CASE("IDX: a byte more is refused") {
  const DataFiles files;
  for (const bool compressed : {false, true}) {
    const std::string longer = kImages + "x";
    const std::string path = compressed ? files.write_gzip("longer", longer) : files.write("longer", longer);
    CHECK_THAT(failure([&] { read_idx_images(path); }),
               ContainsSubstring("offset 76: expected the end of the file, got more bytes"));
  }
}

TEST_CASE("IDX: a flipped byte of the header is refused; of a gzip file, any that matters is") {
  const DataFiles files;
  for (std::size_t at = 0; at < 16; ++at) {
    std::string flipped = kImages;
    flipped[at] = static_cast<char>(~flipped[at]);
    INFO("byte " << at);
    failure([&] { read_idx_images(files.write("flipped", flipped)); });
  }
  files.write_gzip("whole", kImages);
  const std::string whole = files.read("whole");
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string flipped = whole;
    flipped[at] = static_cast<char>(~flipped[at]);
    const std::string path = files.write("flipped", flipped);
    try {
      const IdxImages images = read_idx_images(path);
      INFO("byte " << at);
      CHECK(std::string(images.pixels.begin(), images.pixels.end()) == counting_bytes(60));  // a time stamp, at most
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::data);
    }
  }
}

TEST_CASE("IDX: messages say what was taken for what") {
  const DataFiles files;
  const std::string images = files.write("images", kImages), labels = files.write("labels", kLabels);
  CHECK_THAT(failure([&] { read_idx_images(labels); }),
             ContainsSubstring("offset 0: expected magic number 0x00000803") &&
                 ContainsSubstring("got 0x00000801 (a file of labels)"));
  CHECK_THAT(failure([&] { read_idx_labels(images, 10); }), ContainsSubstring("got 0x00000803 (a file of images)"));
  CHECK_THAT(failure([&] { read_idx_images(files.write("swapped", little_endian(0x803) + kImages.substr(4))); }),
             ContainsSubstring("little-endian"));
  CHECK_THAT(failure([&] { read_idx_images(files.write("empty", "")); }), ContainsSubstring("the file is empty"));
  CHECK_THAT(failure([&] { read_idx_images(files.path("missing")); }), ContainsSubstring("No such file"));
  CHECK_THAT(failure([&] { read_idx_images(files.path("")); }), ContainsSubstring("not a regular file"));
}

TEST_CASE("IDX: zero images, and counts that no memory could hold, are refused before memory is taken") {
  const DataFiles files;
  CHECK_THAT(failure([&] { read_idx_images(files.write("none", idx_images(0, 4, 5, ""))); }),
             ContainsSubstring("offset 4") && ContainsSubstring("got 0"));
  CHECK_THAT(failure([&] { read_idx_labels(files.write("none", idx_labels(0, "")), 10); }), ContainsSubstring("got 0"));
  const std::string huge = idx_images(0xffffffff, 65536, 65536, counting_bytes(60));
  CHECK_THAT(failure([&] { read_idx_images(files.write("huge", huge)); }), ContainsSubstring("got 4294967295"));
  failure([&] { read_idx_images(files.write_gzip("huge.gz", huge)); });
  failure([&] { read_idx_labels(files.write_gzip("huge.gz", idx_labels(0xffffffff, "\1\2")), 10); });
  CHECK_THAT(failure([&] { read_idx_images(files.write("wide", idx_images(1, 1, 65537, counting_bytes(60)))); }),
             ContainsSubstring("offset 12: expected image width between 1 and 65536, got 65537"));
}

TEST_CASE("IDX: a label outside the classes is refused with its place") {
  const DataFiles files;
  const std::string path = files.write("labels", kLabels);
  CHECK(read_idx_labels(path, 10).size() == 3);
  CHECK_THAT(failure([&] { read_idx_labels(path, 9); }),
             ContainsSubstring("offset 9: expected a label below 9, got 9"));
}

TEST_CASE("IDX: as many labels as images") {
  const DataFiles files;
  const std::string images = files.write("images", kImages);
  const std::string labels = files.write("labels", idx_labels(2, "\1\2"));
  CHECK_THAT(failure([&] { read_idx_set(images, labels, 10); }),
             StartsWith(labels) && ContainsSubstring("expected 3 labels") && ContainsSubstring("got 2"));
}

TEST_CASE("read_whole_file gives back any bytes") {
  const DataFiles files;
  std::string bytes;
  for (std::uint64_t i = 0; i < 3000000; ++i) bytes += static_cast<char>(i * i >> 7);
  CHECK(read_whole_file(files.write("plain", bytes)) == bytes);
  CHECK(read_whole_file(files.write_gzip("compressed", bytes)) == bytes);
  CHECK(read_whole_file(files.write("empty", "")).empty());
}
