#pragma once
// Records with a different value in every field, so that a field that is swapped or forgotten shows, and a directory
// that goes away with the test.

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "engine/record/records.h"

namespace pdl::test {

/// Removed with all it holds when the test ends.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "pdlbench_record_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

inline void put_content(const std::string& path, const std::string& text, bool at_end = false) {
  std::ofstream(path, std::ios::binary | (at_end ? std::ios::app : std::ios::trunc)) << text;
}

inline EpochRecord sample_epoch(std::int64_t epoch) {
  const double shift = 0.001 * static_cast<double>(epoch);
  EpochRecord record;
  record.epoch = epoch;
  record.steps = 100;
  record.samples = 3200;
  record.tokens = 409600;
  record.epoch_s = 12.5 + shift;
  record.eval_s = 2.25;
  record.train_s = {10.0, 10.125, 10.25 + shift};
  record.data_s = {0.1, 0.2, 0.3};
  record.forward_s = {3.0, 3.1, 3.2};
  record.backward_s = {5.0, 5.1, 5.2};
  record.comm_exposed_s = {0.5, 0.75, 1.0};
  record.optimizer_s = {0.4, 0.41, 0.42};
  record.bubble_fraction = 0.0625;
  record.step_ms = {100.5, 90.5, 130.5, 150.5, 88.5, 160.5};
  record.comm_exposed_step_ms = 7.5;
  record.samples_per_s = 256.0;
  record.tokens_per_s = 32768.0;
  record.samples_per_s_median = 320.0;
  record.tokens_per_s_median = 40960.0;
  record.flops_per_s = 1.5e12;
  record.mfu = 0.375;
  record.mfu_palm = 0.4;
  record.hfu = 0.385;
  record.of_gemm = 0.5;
  record.train_loss = 3.5 - shift;
  record.val_loss = 3.25 - shift;
  record.val_metric_name = "perplexity";
  record.val_metric = 25.75;
  record.lr = 6e-4;
  record.loss_scale = 32768.0;
  record.skipped_steps = 3;
  record.elapsed_s = 13.0 * static_cast<double>(epoch + 1);
  for (int kind = 0; kind < kMemoryKinds; ++kind) {
    const double bytes = 1048576.0 * (kind + 1);
    record.memory_peak_bytes[static_cast<std::size_t>(kind)] = {bytes - 1024, bytes - 512, bytes};
    record.memory_predicted_bytes.bytes[static_cast<std::size_t>(kind)] = 1048576 * (kind + 1) + 1;
  }
  record.memory_peak_total_bytes = {20971520, 23068672, 25165824};
  record.device_memory_used_bytes = 33554432;
  record.library_bytes = 4194304;
  record.data_store_bytes = {1024, 1536, 2048};
  record.staleness = {{.stage = 0,
                       .updates = 50,
                       .samples_per_update = 64.0,
                       .updates_behind = {1, 49},
                       .versions = 2,
                       .weight_drift = 0.125},
                      {.stage = 1, .updates = 100, .samples_per_update = 32.0, .updates_behind = {100}}};
  record.pipeline =
      PipelineRecord{.idle_fraction = 0.375,
                     .useful_fraction = 0.5,
                     .closed_form_idle_fraction = 0.25,
                     .simulated_idle_fraction = 0.3125,
                     .simulated_useful_fraction = 0.5625,
                     .simulated_s = 9.5,
                     .planned_s = 8.75,
                     .ranks = {{.rank = 0,
                                .stage = 0,
                                .replica = 0,
                                .train_s = 10.0,
                                .forward_s = 2.0,
                                .backward_s = 3.0,
                                .recompute_s = 0.5,
                                .wait_s = {0.5, 1.0, 2.0},
                                .comm_passes_s = 0.125,
                                .comm_s = 0.25,
                                .optimizer_s = 0.375,
                                .other_s = 0.25,
                                .passes = {{.forward = {4, 2.0}, .recompute = {2, 0.5}, .backward = {4, 3.0}}}},
                               {.rank = 3,
                                .stage = 1,
                                .replica = 1,
                                .train_s = 10.25,
                                .other_s = 10.25,
                                .passes = {{.loss = {8, 0.0625}}}}}};
  record.comm["dp.all_reduce"] = {200, 123456789012345, 1.4375, 0.5};
  record.comm["world.broadcast"] = {1, 64, 0.0625, 0.03125};
  return record;
}

inline RunRecord sample_run(std::int64_t epochs_planned) {
  RunRecord run;
  run.name = "sample";
  run.engine = "zero";
  run.model = "gpt2-tiny";
  run.command = "pdlbench run configs/quick/sample.json --out results/my runs";
  run.start_utc = "2026-02-03T04:05:06Z";
  run.config_json = R"({"name": "sample", "training": {"epochs": 3, "lr": 0.001}})";
  run.config_hash = "0123456789abcdef";
  run.engine_description_json = R"({"stage": "2"})";
  run.versions = {{"pdlbench", "0.1"}, {"git_sha", "abc"}, {"git_dirty", "false"}};
  run.environment = {{"OMP_NUM_THREADS", "1"}};
  run.data = {{"name", "kjv"}, {"identity", "fnv:1"}};
  run.ranks = {{0, 0, "node1", "cpu", "", 1}, {1, 1, "node1", "cpu", "", 1}};
  run.ranks[1].gpu_start = {210.0, 75.5, 31.0, "idle", 1048576};
  run.ranks[1].gpu_end = {1755.0, 698.25, 66.0, "power cap, software thermal slowdown", 2097152};
  run.flops_formula = "6 N T";
  run.palm_formula = "6 N T + 12 L C T";
  run.peak_flops_per_s = 4e12;
  run.gemm_flops_per_s = 3e12;
  run.gpus = 2;
  run.epochs_planned = epochs_planned;
  run.dp = 2;
  run.comm = "mpi";
  run.launcher = "hydra";
  run.backend = "cpu";
  run.dtype = "fp32";
  return run;
}

}  // namespace pdl::test
