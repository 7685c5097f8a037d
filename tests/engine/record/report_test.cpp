#include "engine/record/report.h"

#include <cmath>
#include <filesystem>

#include "engine/base/error.h"
#include "engine/record/run_writer.h"
#include "tests/engine/record/sample_records.h"
#include "tests/support/catch.h"

using namespace pdl;
using pdl::test::put_content;
using pdl::test::sample_epoch;
using pdl::test::sample_run;
using pdl::test::TemporaryDirectory;

namespace {

void write_run(const std::string& directory, const RunRecord& run, std::int64_t epochs, RunStatus status) {
  RunWriter writer(directory, Existing::refuse);
  writer.begin(run);
  for (std::int64_t epoch = 0; epoch < epochs; ++epoch) {
    EpochRecord record = sample_epoch(epoch);
    if (!run.peak_flops_per_s) {
      for (std::optional<double>* share : {&record.mfu, &record.mfu_palm, &record.hfu, &record.of_gemm}) share->reset();
    }
    if (run.model.starts_with("vgg")) {
      record.tokens = 0;
      record.tokens_per_s = 0.0;
      record.val_metric_name = "accuracy";
      record.val_metric = 0.6125;
      record.extrapolated = true;
      record.pipeline.reset();
    }
    writer.epoch(record);
  }
  writer.finish(status, status == RunStatus::success ? "" : "loss is nan in epoch 1, step 7");
}

void write_three_runs(const std::string& directory) {
  write_run(directory + "/a", sample_run(2), 2, RunStatus::success);
  RunRecord vision = sample_run(1);
  vision.name = "vision, small";
  vision.engine = "ddp";
  vision.model = "vgg11";
  vision.synthetic_data = true;
  vision.peak_flops_per_s.reset();
  write_run(directory + "/b", vision, 1, RunStatus::success);
  RunRecord diverged = sample_run(3);
  diverged.name = "too fast";
  write_run(directory + "/c", diverged, 1, RunStatus::diverged);
}

}  // namespace

TEST_CASE("the table shows speed only for runs that succeeded") {
  const TemporaryDirectory directory;
  write_three_runs(directory.path());
  const Report report = make_report({directory.path()});
  CHECK(report.warnings.empty());
  const std::string expected =
      "run             engine  model      ranks  dtype  comm  epochs  status    step ms        speed    mfu   palm    "
      "hfu  "
      "of gemm  s/epoch  validation        peak memory  predicted  exposed comm\n"
      "--------------  ------  ---------  -----  -----  ----  ------  --------  -------  -----------  -----  -----  "
      "-----  "
      "-------  -------  ----------------  -----------  ---------  ------------\n"
      "sample          zero    gpt2-tiny      2  fp32   mpi      2/2  success     100.5  40960 tok/s  46.9%  50.0%  "
      "48.1%  "
      "  62.5%    12.50  perplexity 25.75     24.0 MiB   28.0 MiB         7.46%\n"
      "vision, small*  ddp     vgg11          2  fp32   mpi      1/1  success     100.5  320.0 smp/s      -      -     "
      " -  "
      "      -   12.50~  accuracy 0.6125      24.0 MiB   28.0 MiB         7.46%\n"
      "too fast        zero    gpt2-tiny      2  fp32   mpi      1/3  diverged        -            -      -      -     "
      " -  "
      "      -        -  perplexity 25.75     24.0 MiB   28.0 MiB             -\n"
      "too fast: loss is nan in epoch 1, step 7\n"
      "* synthetic data\n"
      "~ extrapolated from part of an epoch\n"
      "\n"
      "pipeline  forward  backward  recompute  warm-up  steady  drain   comm  update   idle  simulated idle  theory  "
      "train s  simulated s  planned s\n"
      "--------  -------  --------  ---------  -------  ------  -----  -----  ------  -----  --------------  ------  "
      "-------  -----------  ---------\n"
      "sample      9.88%     14.8%      2.47%    2.47%   4.94%  9.88%  1.85%   1.85%  37.5%           31.2%   25.0%    "
      "10.12        9.500      8.750\n";
  CHECK(format_report(report, ReportFormat::table) == expected);
}

TEST_CASE("the table has no columns for shares of what is known of no run's devices") {
  const TemporaryDirectory directory;
  RunRecord run = sample_run(1);
  run.peak_flops_per_s.reset();
  write_run(directory / "a", run, 1, RunStatus::success);
  const std::string table = format_report(make_report({directory.path()}), ReportFormat::table);
  for (const char* column : {"mfu", "palm", "hfu", "gemm"}) CHECK(table.find(column) == std::string::npos);
  CHECK_THAT(table, ContainsSubstring("speed  s/epoch  validation"));
  CHECK_THAT(table, ContainsSubstring("40960 tok/s    12.50  perplexity 25.75"));
}

TEST_CASE("csv has one line a run, units in its names and nothing where nothing was measured") {
  const TemporaryDirectory directory;
  write_three_runs(directory.path());
  const std::string csv = format_report(make_report({directory.path()}), ReportFormat::csv);
  const std::string root = directory.path();
  const std::string expected =
      "directory,run,engine,model,ranks,dtype,comm,ranks_per_device,data,synthetic_data,epochs,epochs_planned,status,"
      "reason,step_ms,samples_per_s,tokens_per_s,mfu,mfu_palm,hfu,of_gemm,epoch_s,extrapolated,val_metric_name,"
      "val_metric,memory_peak_bytes,memory_predicted_bytes,device_memory_used_bytes,library_bytes,comm_exposed_share,"
      "comm_overlap,pipeline_idle_fraction,pipeline_useful_fraction,pipeline_simulated_idle_fraction,"
      "pipeline_closed_form_idle_fraction,pipeline_simulated_s,pipeline_planned_s\n" +
      root +
      "/a,sample,zero,gpt2-tiny,2,fp32,mpi,1,kjv,false,2,2,success,,100.5,320.0,40960.0,0.46875,0.5,0.48125,0.625,12.5,"
      "false,perplexity,25.75," +
      "25165824.0,29360135.0,33554432.0,4194304.0,0.07462686567164178,0.5,0.375,0.5,0.3125,0.25,9.5,8.75\n" + root +
      "/b,\"vision, small\",ddp,vgg11,2,fp32,mpi,1,kjv,true,1,1,success,,100.5,320.0,,,,,,12.5,true,accuracy,0.6125,"
      "25165824.0,29360135.0,33554432.0,4194304.0,0.07462686567164178,0.5,,,,,,\n" +
      root +
      "/c,too fast,zero,gpt2-tiny,2,fp32,mpi,1,kjv,false,1,3,diverged,\"loss is nan in epoch 1, step 7\",,,,,,,,,false,"
      "perplexity,25.75,25165824.0,29360135.0,33554432.0,4194304.0,,,,,,,,\n";
  CHECK(csv == expected);
}

TEST_CASE("json carries the same rows and the warnings") {
  const TemporaryDirectory directory;
  write_three_runs(directory.path());
  put_content(directory / "a/epochs.jsonl", "{\"schema", true);
  const std::string json = format_report(make_report({directory.path()}), ReportFormat::json);
  CHECK_THAT(json, StartsWith("{\n  \"runs\": [\n    {\"directory\": \""));
  CHECK_THAT(json, ContainsSubstring(R"("step_ms": null)"));
  CHECK_THAT(json, ContainsSubstring(R"("status": "diverged")"));
  CHECK_THAT(json, ContainsSubstring("is not finished; it is dropped"));
  CHECK(format_report(Report(), ReportFormat::json) == "{\n  \"runs\": [],\n  \"warnings\": []\n}\n");
}

TEST_CASE("a success whose records are not sound is invalid, and yields no figures") {
  const TemporaryDirectory directory;
  write_run(directory / "short", sample_run(3), 2, RunStatus::success);
  write_run(directory / "cut", sample_run(2), 2, RunStatus::success);
  put_content(directory / "cut/epochs.jsonl", "{\"schema", true);
  RunRecord nameless = sample_run(1);
  nameless.config_hash = "";
  write_run(directory / "unhashed", nameless, 1, RunStatus::success);
  const Report report = make_report({directory / "short", directory / "cut", directory / "unhashed"});
  REQUIRE(report.rows.size() == 3);
  for (const ReportRow& row : report.rows) {
    CHECK(row.status == "invalid");
    CHECK_FALSE(row.step_ms.has_value());
    CHECK_FALSE(row.tokens_per_s.has_value());
    CHECK_FALSE(row.comm_exposed_share.has_value());
  }
  CHECK(report.rows[0].reason == "a success with 2 of 3 epochs");
  CHECK_THAT(report.rows[1].reason, ContainsSubstring("not finished"));
  CHECK_THAT(report.rows[2].reason, ContainsSubstring("config_hash"));
  CHECK(report.warnings.size() == 1);
}

TEST_CASE("the check sees epochs out of order and times that run backwards") {
  const TemporaryDirectory directory;
  write_run(directory / "run", sample_run(3), 3, RunStatus::success);
  StoredRun run = read_run(directory / "run");
  CHECK(check_run(run).empty());
  std::swap(run.epochs[1], run.epochs[2]);
  const std::vector<std::string> problems = check_run(run);
  REQUIRE(problems.size() == 3);
  CHECK(problems[0] == "line 2 of epochs.jsonl is epoch 2 instead of 1");
  CHECK(problems[2] == "elapsed_s runs backwards at epoch 1");
}

TEST_CASE("ranks that share an accelerator yield no figures of efficiency and overlap, and the table says so") {
  StoredRun run;
  run.document.run = sample_run(1);
  run.document.run.backend = "cuda";
  run.document.run.ranks_per_device = 2;
  run.document.status = RunStatus::success;
  run.document.end_utc = "2026-02-03T05:00:00Z";
  run.document.epochs_recorded = 1;
  run.epochs = {sample_epoch(0)};
  ReportRow row = summarize(run);
  CHECK(row.step_ms == 100.5);
  for (const auto& figure : {row.mfu, row.mfu_palm, row.hfu, row.of_gemm, row.comm_exposed_share, row.comm_overlap}) {
    CHECK_FALSE(figure.has_value());
  }
  Report report;
  report.rows = {row};
  const std::string table = format_report(report, ReportFormat::table);
  CHECK_THAT(table, ContainsSubstring("\nsample!  "));
  CHECK_THAT(table, ContainsSubstring("\n! ranks share a GPU: right, but no measure of speed"));
  CHECK(table.find("mfu") == std::string::npos);
  CHECK(table.find("warm-up") == std::string::npos);

  run.document.run.ranks_per_device = 1;
  row = summarize(run);
  for (const auto& figure : {row.mfu, row.mfu_palm, row.hfu, row.of_gemm, row.comm_exposed_share, row.comm_overlap}) {
    CHECK(figure.has_value());
  }
  CHECK(row.pipeline.has_value());
  report.rows = {row};
  CHECK(format_report(report, ReportFormat::table).find('!') == std::string::npos);
}

TEST_CASE("a benchmark is no result: it yields its reason and nothing else") {
  const TemporaryDirectory directory;
  write_run(directory / "silent", sample_run(1), 1, RunStatus::benchmark);
  const ReportRow row = make_report({directory / "silent"}).rows.at(0);
  CHECK(row.status == "benchmark");
  CHECK(row.reason == "loss is nan in epoch 1, step 7");
  for (const auto& figure : {row.step_ms, row.tokens_per_s, row.mfu, row.val_metric, row.comm_exposed_share}) {
    CHECK_FALSE(figure.has_value());
  }
}

TEST_CASE("records from before the median was kept show what they have") {
  StoredRun run;
  run.document.run = sample_run(1);
  run.document.status = RunStatus::success;
  run.document.end_utc = "2026-02-03T05:00:00Z";
  run.document.epochs_recorded = 1;
  EpochRecord old = sample_epoch(0);
  old.samples_per_s_median = old.tokens_per_s_median = 0.0;
  old.comm_exposed_step_ms.reset();
  run.epochs = {old};
  const ReportRow row = summarize(run);
  CHECK(row.samples_per_s == 256.0);
  CHECK(row.mfu == 0.375);
  CHECK(row.comm_exposed_share == Approx(0.75 / 10.125));
}

TEST_CASE("a run that is under way has no figures and a warning; one without records is an error") {
  const TemporaryDirectory directory;
  {
    RunWriter writer(directory / "run", Existing::refuse);
    writer.begin(sample_run(2));
    writer.epoch(sample_epoch(0));
  }
  const Report report = make_report({directory / "run"});
  CHECK(report.rows.at(0).status == "running");
  CHECK_FALSE(report.rows.at(0).step_ms.has_value());
  CHECK_THAT(report.warnings.at(0), ContainsSubstring("no result yet"));

  std::filesystem::create_directory(directory / "empty");
  CHECK_THROWS_WITH(make_report({directory / "empty"}), ContainsSubstring("holds no run.json"));
  CHECK_THROWS_WITH(make_report({directory / "absent"}), ContainsSubstring("No such file"));
  put_content(directory / "empty/run.json", "{");
  const Report broken = make_report({directory / "empty"});
  CHECK(broken.rows.empty());
  CHECK_THAT(broken.warnings.at(0), ContainsSubstring("empty/run.json"));
}

TEST_CASE("metrics that are not finite are shown as words") {
  ReportRow row;
  row.val_metric_name = "perplexity";
  row.val_metric = std::nan("");
  Report report;
  report.rows = {row};
  CHECK_THAT(format_report(report, ReportFormat::table), ContainsSubstring("perplexity nan"));
  CHECK_THAT(format_report(report, ReportFormat::csv), ContainsSubstring("perplexity,nan,"));
  CHECK_THAT(format_report(report, ReportFormat::json), ContainsSubstring(R"("val_metric": "nan")"));
}
