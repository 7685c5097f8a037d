// gpu_op_times: how long single operations of the CUDA backend take on the GPU of this machine, at the shapes of
// GPT2-medium and VGG-16, and what share of the hardware they reach. A step's time hides which kernel slipped; two of
// these tables, compared by scripts/bench/compare_ops.py, tell.
//
//   gpu_op_times [--json FILE] [--only PREFIX]
//
// The table goes to stderr, the same as JSON to stdout or FILE. Each row is short, so clocks are higher than in a long
// run that heats the GPU: compare shares of the square product, which is always measured, as well as times.

#include <nlohmann/json.hpp>

#include <cstdio>
#include <fstream>
#include <iostream>

#include "tests/op_times/bench.h"

using namespace pdl;
using namespace pdl::op_times;
using Json = nlohmann::ordered_json;

namespace {

struct Arguments {
  std::string json, only;
};

constexpr const char* kUsage =
    "usage: gpu_op_times [--json FILE] [--only PREFIX]\n"
    "  --json FILE    write the measurements there instead of to stdout\n"
    "  --only PREFIX  measure only what begins so: gemm.t16384, gemm.t4096.fc1, attention, conv.n256, pass.vgg, "
    "update\n";

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--help" || option == "-h") {
      std::cout << kUsage;
      std::exit(0);
    }
    std::string* const value = option == "--json" ? &arguments.json : option == "--only" ? &arguments.only : nullptr;
    if (value == nullptr || ++i == argc) throw ConfigError(str("\"", option, "\" cannot be understood\n", kUsage));
    *value = argv[i];
  }
  return arguments;
}

Json to_json(const DeviceState& state) {
  Json json = Json::object();
  if (state.sm_clock_mhz) json["sm_clock_mhz"] = *state.sm_clock_mhz;
  if (state.power_w) json["power_w"] = *state.power_w;
  if (state.temperature_c) json["temperature_c"] = *state.temperature_c;
  if (state.throttle) json["throttle"] = *state.throttle;
  return json;
}

double share_of_peak(const Row& row) { return row.rate() / (row.counts_flops() ? kPeakTflops : kStreamTbPerS); }

Json to_json(const Row& row, double square_tflops) {
  Json json = {{"name", row.name},
               {"shape", row.shape},
               {"us", row.us},
               {"us_min", row.us_min},
               {"us_max", row.us_max},
               {row.counts_flops() ? "tflops" : "tb_per_s", row.rate()},
               {"of_peak", share_of_peak(row)}};
  if (row.counts_flops()) json["of_square"] = row.rate() / square_tflops;
  return json;
}

void print(const std::vector<Row>& rows, double square_tflops) {
  std::fprintf(stderr, "%-40s %10s %10s %10s %18s %8s %9s\n", "operation", "us", "min", "max", "rate", "of peak",
               "of square");
  for (const Row& row : rows) {
    std::fprintf(stderr, "%-40s %10.1f %10.1f %10.1f %10.2f %-7s %7.1f%%", row.name.c_str(), row.us, row.us_min,
                 row.us_max, row.rate(), row.counts_flops() ? "TFLOP/s" : "TB/s", 100.0 * share_of_peak(row));
    if (row.counts_flops()) std::fprintf(stderr, " %8.1f%%", 100.0 * row.rate() / square_tflops);
    std::fprintf(stderr, "   %s\n", row.shape.c_str());
  }
}

void run(const Arguments& arguments) {
  const std::unique_ptr<Device> device = make_device({.kind = "cuda"});
  CudaBackend backend(*device, {});
  const DeviceState before = device->state();

  Bench square(*device, backend, "gemm.square");
  measure_square_products(square);
  std::vector<Row> rows = square.rows();
  const double square_tflops = rows.front().rate();  // of the forward pass
  Bench bench(*device, backend, arguments.only);
  measure_gpt2_products(bench);
  measure_attention(bench);
  measure_convolutions(bench);
  measure_gpt2_passes(bench);
  measure_vgg_passes(bench);
  measure_updates(bench);
  rows.insert(rows.end(), bench.rows().begin(), bench.rows().end());

  const std::string products = backend.product_table();
  print(rows, square_tflops);
  std::fprintf(stderr, "\nwhat cuBLASLt was asked for: products that were only timed have no uses\n%s",
               products.c_str());
  Json json = {{"gpu", device->info().name},      {"libraries", backend.library()},
               {"peak_tflops", kPeakTflops},      {"stream_tb_per_s", kStreamTbPerS},
               {"state_before", to_json(before)}, {"state_after", to_json(device->state())},
               {"rows", Json::array()},           {"products", Json::array()}};
  for (const Row& row : rows) json["rows"].push_back(to_json(row, square_tflops));
  std::istringstream lines(products);
  for (std::string line; std::getline(lines, line);) json["products"].push_back(line);
  if (arguments.json.empty()) {
    std::cout << json.dump(2) << "\n";
    return;
  }
  std::ofstream file(arguments.json);
  file << json.dump(2) << "\n";
  file.close();
  if (!file) throw Error(str("cannot write ", arguments.json));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
    return 0;
  } catch (const Error& error) {
    std::cerr << "error: " << error.what() << "\n";
    return static_cast<int>(error.code());
  }
}
