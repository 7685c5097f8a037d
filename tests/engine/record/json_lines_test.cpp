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
  CHECK_THAT(line, ContainsSubstring(R"("total":29360135},"device_memory_used_bytes":33554432)"));
  CHECK_THAT(
      line, ContainsSubstring(R"("dp.all_reduce":{"calls":200,"bytes":123456789012345,"busy_s":1.5,"exposed_s":0.5})"));
  CHECK_THAT(line, EndsWith(R"(,"extrapolated":false})"));
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

TEST_CASE("run.json survives the way out and back") {
  RunDocument document{sample_run(3), RunStatus::interrupted, "stopped on request", "2026-02-03T05:05:06Z", 2, {}};
  document.resumes.push_back({"2026-02-03T04:30:00Z", 1, "running", "fedcba9876543210"});
  const std::string text = to_json(document);
  const RunDocument back = run_from_json(text);
  CHECK(to_json(back) == text);
  CHECK(back.status == RunStatus::interrupted);
  CHECK(back.run.command == document.run.command);
  CHECK(back.run.ranks.size() == 2);
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
