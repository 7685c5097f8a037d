#include "engine/record/json_lines.h"

#include <cmath>
#include <limits>

#include "engine/base/error.h"
#include "tests/engine/record/sample_records.h"
#include "tests/support/catch.h"

using namespace pdl;
using pdl::test::sample_epoch;
using pdl::test::sample_run;

TEST_CASE("an epoch record survives the way into a line and back") {
  const std::string line = to_json_line(sample_epoch(3));
  CHECK(line.find('\n') == std::string::npos);
  CHECK(to_json_line(epoch_from_json_line(line)) == line);
}

TEST_CASE("an epoch's line is spelled as documented") {
  const std::string line = to_json_line(sample_epoch(0));
  CHECK_THAT(line,
             StartsWith(R"({"schema_version":1,"epoch":0,"steps":100,"samples":3200,"tokens":409600,"epoch_s":12.5,)"
                        R"("train_s":{"min":10.0,"mean":10.125,"max":10.25},"eval_s":2.25,)"));
  CHECK_THAT(line, ContainsSubstring(
                       R"("step_ms":{"median":100.5,"p5":90.5,"p95":130.5,"p99":150.5,"min":88.5,"max":160.5})"));
  CHECK_THAT(line, ContainsSubstring(R"("val_metric":{"name":"perplexity","value":25.75})"));
  CHECK_THAT(line,
             ContainsSubstring(R"("memory_peak_bytes":{"parameters":{"min":1047552,"mean":1048064,"max":1048576})"));
  CHECK_THAT(
      line, ContainsSubstring(R"("total":{"min":20971520,"mean":23068672,"max":25165824}},"memory_predicted_bytes":)"));
  CHECK_THAT(line, ContainsSubstring(R"("total":29360135},"device_memory_used_bytes":33554432,"library_bytes":4194304,)"
                                     R"("data_store_bytes":{"min":1024,"mean":1536,"max":2048},"staleness":[)"
                                     R"({"stage":0,"updates":50,"samples_per_update":64.0,"updates_behind":[1,49],)"
                                     R"("versions":2,"weight_drift":0.125},)"));
  CHECK_THAT(line,
             ContainsSubstring(
                 R"("pipeline":{"idle_fraction":0.375,"useful_fraction":0.5,"closed_form_idle_fraction":0.25,)"
                 R"("simulated":{"idle_fraction":0.3125,"useful_fraction":0.5625,"train_s":9.5},"planned_s":8.75,)"
                 R"("ranks":[{"rank":0,"stage":0,"replica":0,"train_s":10.0,"forward_s":2.0,"backward_s":3.0,)"
                 R"("recompute_s":0.5,"wait_s":{"warm_up":0.5,"steady":1.0,"drain":2.0},)"
                 R"("comm_s":{"passes":0.125,"outside":0.25},"optimizer_s":0.375,"other_s":0.25,"passes":[{)"
                 R"("forward":{"count":4,"total_s":2.0},"recompute":{"count":2,"total_s":0.5},)"
                 R"("backward":{"count":4,"total_s":3.0}}]},{"rank":3,"stage":1,"replica":1,)"));
  CHECK_THAT(line, ContainsSubstring(
                       R"("dp.all_reduce":{"calls":200,"bytes":123456789012345,"busy_s":1.4375,"exposed_s":0.5})"));
  CHECK_THAT(line, EndsWith(R"(,"extrapolated":false})"));
}

TEST_CASE("what is not known is absent, and what older records lack is no mistake") {
  EpochRecord epoch = sample_epoch(0);
  CHECK_THAT(to_json_line(epoch), ContainsSubstring(R"("flops_per_s":1500000000000.0,"mfu":0.375,"mfu_palm":0.4,)"
                                                    R"("hfu":0.385,"of_gemm":0.5,"train_loss":)"));
  epoch.mfu.reset();
  epoch.mfu_palm.reset();
  epoch.hfu.reset();
  epoch.of_gemm.reset();
  epoch.comm_exposed_step_ms.reset();
  epoch.data_store_bytes.reset();
  epoch.staleness.clear();
  epoch.pipeline->planned_s.reset();
  epoch.pipeline->closed_form_idle_fraction.reset();
  CHECK(to_json_line(epoch_from_json_line(to_json_line(epoch))) == to_json_line(epoch));
  CHECK(to_json_line(epoch).find("planned_s") == std::string::npos);
  epoch.pipeline.reset();
  std::string line = to_json_line(epoch);
  CHECK_THAT(line, ContainsSubstring(R"("flops_per_s":1500000000000.0,"train_loss":)"));
  CHECK(line.find("comm_exposed_step_ms") == std::string::npos);
  CHECK(line.find("staleness") == std::string::npos);
  CHECK(line.find("pipeline") == std::string::npos);
  for (const std::string later : {R"("library_bytes":4194304,)", R"("loss_scale":32768.0,)", R"("skipped_steps":3,)",
                                  R"("samples_per_s_median":320.0,)"}) {
    REQUIRE_THAT(line, ContainsSubstring(later));
    line.erase(line.find(later), later.size());
  }
  const EpochRecord old_epoch = epoch_from_json_line(line);
  CHECK_FALSE(old_epoch.mfu.has_value());
  CHECK_FALSE(old_epoch.of_gemm.has_value());
  CHECK_FALSE(old_epoch.comm_exposed_step_ms.has_value());
  CHECK_FALSE(old_epoch.data_store_bytes.has_value());
  CHECK(old_epoch.library_bytes == 0);
  CHECK(old_epoch.loss_scale == 1.0);
  CHECK(old_epoch.skipped_steps == 0);
  CHECK(old_epoch.samples_per_s_median == 0.0);

  RunDocument document{sample_run(1), RunStatus::running, "", "", 0, {}};
  CHECK_THAT(to_json(document), ContainsSubstring("\"peak_flops_per_s\": 4000000000000.0,"));
  CHECK_THAT(to_json(document), ContainsSubstring("\"gemm_flops_per_s\": 3000000000000.0,"));
  document.run.peak_flops_per_s.reset();
  document.run.gemm_flops_per_s.reset();
  document.run.palm_formula.clear();
  document.run.ranks[1].gpu_start = document.run.ranks[1].gpu_end = {};
  std::string text = to_json(document);
  for (const char* absent : {"peak_flops_per_s", "gemm_flops_per_s", "palm_formula"}) {
    CHECK(text.find(absent) == std::string::npos);
  }
  CHECK(text.find("\"gpu\"") == std::string::npos);
  const std::string formula = "  \"flops_formula\": \"6 N T\",\n";
  text.erase(text.find(formula), formula.size());
  const std::string gpus = "    \"gpus\": 2,\n";
  text.erase(text.find(gpus), gpus.size());
  const RunDocument old_run = run_from_json(text);
  CHECK(old_run.run.flops_formula.empty());
  CHECK_FALSE(old_run.run.peak_flops_per_s.has_value());
  CHECK(old_run.run.gpus == 0);
  CHECK(old_run.run.ranks[1].gpu_end.empty());
}

TEST_CASE("what the driver said survives, and what it did not say stays unsaid") {
  const DeviceState state = {1755.0, 698.25, {}, "none", 2097152};
  const std::string text = to_json(state);
  CHECK(text == R"({"sm_clock_mhz":1755.0,"power_w":698.25,"throttle":"none","memory_used_bytes":2097152})");
  CHECK(to_json(device_state_from_json(text)) == text);
  CHECK(to_json(DeviceState()) == "{}");
  CHECK(device_state_from_json("{}").empty());
  CHECK_THROWS_WITH(device_state_from_json(R"({"throttle":4})"), ContainsSubstring("gpu.throttle"));
}

TEST_CASE("what is not a finite number is a word, and is read back") {
  EpochRecord record = sample_epoch(0);
  record.train_loss = std::numeric_limits<double>::quiet_NaN();
  record.val_loss = std::numeric_limits<double>::infinity();
  record.val_metric = -std::numeric_limits<double>::infinity();
  record.memory_peak_total_bytes.max = std::numeric_limits<double>::quiet_NaN();
  const std::string line = to_json_line(record);
  CHECK_THAT(line, ContainsSubstring(R"("train_loss":"nan","val_loss":"inf")"));
  CHECK_THAT(line, ContainsSubstring(R"("value":"-inf")"));
  const EpochRecord back = epoch_from_json_line(line);
  CHECK(std::isnan(back.train_loss));
  CHECK(back.val_loss == std::numeric_limits<double>::infinity());
  CHECK(back.val_metric == -std::numeric_limits<double>::infinity());
}

TEST_CASE("a broken line is refused with the name of the field") {
  const std::string line = to_json_line(sample_epoch(0));
  const auto with = [&line](const std::string& from, const std::string& to) {
    std::string changed = line;
    changed.replace(changed.find(from), from.size(), to);
    return changed;
  };
  CHECK_THROWS_WITH(epoch_from_json_line(with(R"("steps":100)", R"("steps":1.5)")), ContainsSubstring("\"steps\""));
  CHECK_THROWS_WITH(epoch_from_json_line(with(R"("p95":130.5,)", "")), ContainsSubstring("step_ms.p95"));
  CHECK_THROWS_WITH(epoch_from_json_line(with(R"("epoch_s":12.5)", R"("epoch_s":null)")), ContainsSubstring("epoch_s"));
  CHECK_THROWS_WITH(epoch_from_json_line(with(R"("schema_version":1)", R"("schema_version":99)")),
                    ContainsSubstring("99"));
  CHECK_THROWS_AS(epoch_from_json_line(line.substr(0, 200)), Error);
  CHECK_THROWS_AS(epoch_from_json_line("[]"), Error);
}

TEST_CASE("a run that is no result says so") {
  RunDocument document{sample_run(1), RunStatus::benchmark, "nothing was exchanged", "2026-02-03T05:05:06Z", 1, {}};
  CHECK_THAT(to_json(document), ContainsSubstring("\"status\": \"benchmark\","));
  CHECK(run_from_json(to_json(document)).status == RunStatus::benchmark);
}

TEST_CASE("run.json survives the way out and back") {
  RunDocument document{sample_run(3), RunStatus::interrupted, "stopped on request", "2026-02-03T05:05:06Z", 2, {}};
  document.resumes.push_back({"2026-02-03T04:30:00Z", 1, "running", "fedcba9876543210"});
  const std::string text = to_json(document);
  const RunDocument back = run_from_json(text);
  CHECK(to_json(back) == text);
  CHECK(back.status == RunStatus::interrupted);
  CHECK(back.run.command == document.run.command);
  REQUIRE(back.run.ranks.size() == 2);
  CHECK(back.run.ranks[0].gpu_end.empty());
  CHECK(back.run.ranks[1].gpu_end.throttle == "power cap, software thermal slowdown");
  CHECK(back.resumes.front().first_epoch == 1);
}

TEST_CASE("bytes that are no UTF-8 become valid JSON") {
  RunDocument document{sample_run(1), RunStatus::running, "", "", 0, {}};
  document.run.ranks[0].host = "n\xff\xfeode";
  document.run.command = "pdlbench run \xc3\x28.json";
  document.run.config_json = "{\"out\": \"\xff\"}";
  document.run.environment["OMP_PLACES"] = "\x80";
  const RunDocument back = run_from_json(to_json(document));
  CHECK(back.run.ranks[0].host == "n\xef\xbf\xbd\xef\xbf\xbdode");
  CHECK(back.run.config_json == "{\"out\":\"\xef\xbf\xbd\"}");
}

TEST_CASE("a configuration that does not parse is kept as text") {
  RunDocument document{sample_run(1), RunStatus::running, "", "", 0, {}};
  document.run.config_json = "{oops";
  CHECK_THAT(to_json(document), ContainsSubstring(R"("unparsed": "{oops")"));
}
