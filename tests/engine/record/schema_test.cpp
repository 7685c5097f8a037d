// What the writer writes against results/schema/: the two must not drift apart.

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/base/error.h"
#include "engine/record/durable_file.h"
#include "engine/record/json_lines.h"
#include "engine/record/run_writer.h"
#include "tests/engine/record/sample_records.h"
#include "tests/support/catch.h"

using namespace pdl;
using pdl::test::content_of;
using pdl::test::sample_epoch;
using pdl::test::sample_run;
using pdl::test::TemporaryDirectory;

namespace {

/// The project's root, from where this file was compiled.
std::string root() {
  const std::string file = __FILE__;
  const std::string here = "tests/engine/record/schema_test.cpp";
  return file.size() > here.size() ? file.substr(0, file.size() - here.size()) : "./";
}

/// Keys of the objects in `json`, with their paths; what stands behind an open set of names counts once, as "*".
void collect(const nlohmann::json& json, const std::string& path, std::set<std::string>& keys) {
  for (const auto& item : json.items()) {
    keys.insert(path + item.key());
    const bool open = item.key() == "comm" && path.empty();
    if (open) {
      collect(item.value().begin().value(), path + "comm.*.", keys);
    } else if (item.value().is_object()) {
      collect(item.value(), path + item.key() + ".", keys);
    }
  }
}

void collect_schema(const nlohmann::json& schema, const nlohmann::json& whole, const std::string& path,
                    std::set<std::string>& keys) {
  if (schema.contains("$ref")) {
    const std::string name = schema["$ref"].get<std::string>().substr(std::string("#/definitions/").size());
    collect_schema(whole["definitions"][name], whole, path, keys);
  }
  for (const auto& part : schema.value("allOf", nlohmann::json::array())) collect_schema(part, whole, path, keys);
  const nlohmann::json properties = schema.value("properties", nlohmann::json::object());
  for (const auto& item : properties.items()) {
    keys.insert(path + item.key());
    collect_schema(item.value(), whole, path + item.key() + ".", keys);
  }
  if (path == "comm.") collect_schema(schema["additionalProperties"], whole, "comm.*.", keys);
}

}  // namespace

TEST_CASE("an epoch's line has exactly the fields of its schema") {
  const auto schema = nlohmann::json::parse(read_file(root() + "results/schema/epoch.schema.json"));
  std::set<std::string> written, described;
  collect(nlohmann::json::parse(to_json_line(sample_epoch(0))), "", written);
  collect_schema(schema, schema, "", described);
  CHECK(written == described);
}

TEST_CASE("run.json has exactly the fields of its schema") {
  const auto schema = nlohmann::json::parse(read_file(root() + "results/schema/run.schema.json"));
  const auto written = nlohmann::json::parse(to_json({sample_run(1), RunStatus::running, "", "", 0, {}}));
  std::set<std::string> keys, described;
  for (const auto& item : written.items()) keys.insert(item.key());
  for (const auto& item : schema["properties"].items()) described.insert(item.key());
  CHECK(keys == described);
}

TEST_CASE("the script that checks records accepts what the writer writes") {
  if (std::system("python3 -c pass >/dev/null 2>&1") != 0) {
    WARN("no python3: not tested");
    return;
  }
  const TemporaryDirectory directory;
  {
    RunWriter writer(directory / "run", Existing::refuse);
    RunRecord run = sample_run(2);
    run.command = "not UTF-8: \xff";
    writer.begin(run);
    writer.epoch(sample_epoch(0));
    EpochRecord record = sample_epoch(1);
    record.train_loss = std::numeric_limits<double>::quiet_NaN();
    writer.epoch(record);
    writer.finish(RunStatus::success, "");
  }
  const std::string command = str("python3 -B '", root(), "scripts/check_records.py' '", directory / "run", "'");
  CHECK(std::system((command + " >/dev/null").c_str()) == 0);
}
