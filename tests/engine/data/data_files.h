#pragma once
// What tests of data files share: a folder that goes away, bytes in both orders, and what an Error said.

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "engine/base/error.h"
#include "tests/support/catch.h"

namespace pdl::testing {

/// A temporary folder, removed with its files.
class DataFiles {
 public:
  DataFiles() {
    std::string pattern = (std::filesystem::temp_directory_path() / "pdl_data_XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~DataFiles() { std::filesystem::remove_all(folder_); }
  DataFiles(const DataFiles&) = delete;
  DataFiles& operator=(const DataFiles&) = delete;

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  std::string write_gzip(const std::string& name, const std::string& bytes) const {
    write(name + ".plain", bytes);
    const std::string command = "gzip -n -c '" + path(name + ".plain") + "' >'" + path(name) + "'";
    REQUIRE(std::system(command.c_str()) == 0);
    return path(name);
  }
  std::string read(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::string folder_;
};

inline std::string big_endian(std::uint32_t word) {
  return {static_cast<char>(word >> 24), static_cast<char>(word >> 16), static_cast<char>(word >> 8),
          static_cast<char>(word)};
}

inline std::string little_endian(std::uint32_t word) {
  const std::string big = big_endian(word);
  return {big.rbegin(), big.rend()};
}

/// An IDX file of grey images.
inline std::string idx_images(std::uint32_t count, std::uint32_t height, std::uint32_t width,
                              const std::string& pixels) {
  return big_endian(0x803) + big_endian(count) + big_endian(height) + big_endian(width) + pixels;
}

inline std::string idx_labels(std::uint32_t count, const std::string& labels) {
  return big_endian(0x801) + big_endian(count) + labels;
}

/// An llm.c token file.
inline std::string llmc_file(const std::vector<std::uint16_t>& tokens) {
  std::string bytes =
      little_endian(20240520) + little_endian(1) + little_endian(static_cast<std::uint32_t>(tokens.size()));
  bytes.resize(1024);
  bytes.append(reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size());
  return bytes;
}

/// The message of the Error(code) that `action` throws; the test fails when it throws none or another.
inline std::string failure(const std::function<void()>& action, ExitCode code = ExitCode::data) {
  try {
    action();
  } catch (const Error& error) {
    CHECK(error.code() == code);
    return error.what();
  }
  FAIL_CHECK("nothing was thrown");
  return "";
}

/// GPT-2's merges file as named by the environment, or "" after a word on why the test does nothing.
inline std::string gpt2_merges() {
  const char* path = std::getenv("PDLBENCH_GPT2_MERGES");
  if (path != nullptr && std::filesystem::exists(path)) return path;
  WARN("skipped: PDLBENCH_GPT2_MERGES does not name GPT-2's merges file");
  return "";
}

inline bool kjv_installed() {
  if (std::system("command -v bible >/dev/null 2>&1") == 0) return true;
  WARN("skipped: the program bible is not installed (Debian package bible-kjv)");
  return false;
}

}  // namespace pdl::testing
