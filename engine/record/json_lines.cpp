#include "engine/record/json_lines.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "engine/base/error.h"
#include "engine/record/json_fields.h"
#include "engine/record/pipeline_json.h"

namespace pdl {
namespace {

// ---- writing ----------------------------------------------------------------------------------------------------

/// null for what is absent; drop_absent takes it out again.
Json optional_number(const std::optional<double>& value) { return value ? number(*value) : Json(); }

void drop_absent(Json& object) {
  for (auto field = object.begin(); field != object.end();) {
    if (field->is_null()) {
      field = object.erase(field);
    } else {
      ++field;
    }
  }
}

/// Byte counts are whole numbers even as means over ranks.
Json bytes(double value) {
  if (!std::isfinite(value)) return number(value);
  return static_cast<std::int64_t>(std::llround(value));
}

Json seconds(const Spread& spread) {
  return {{"min", number(spread.min)}, {"mean", number(spread.mean)}, {"max", number(spread.max)}};
}

Json bytes(const Spread& spread) {
  return {{"min", bytes(spread.min)}, {"mean", bytes(spread.mean)}, {"max", bytes(spread.max)}};
}

Json memory_peak(const EpochRecord& record) {
  Json json = Json::object();
  for (int kind = 0; kind < kMemoryKinds; ++kind) {
    json[std::string(kMemoryKindNames[kind])] = bytes(record.memory_peak_bytes[kind]);
  }
  json["total"] = bytes(record.memory_peak_total_bytes);
  return json;
}

Json memory_predicted(const MemoryByKind& memory) {
  Json json = Json::object();
  for (int kind = 0; kind < kMemoryKinds; ++kind) json[std::string(kMemoryKindNames[kind])] = memory.bytes[kind];
  json["total"] = memory.total();
  return json;
}

Json comm(const std::map<std::string, CommRecord>& operations) {
  Json json = Json::object();
  for (const auto& [operation, record] : operations) {
    json[operation] = {{"calls", record.calls},
                       {"bytes", record.bytes},
                       {"busy_s", number(record.busy_s)},
                       {"exposed_s", number(record.exposed_s)}};
  }
  return json;
}

std::string dumped(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

/// JSON inside JSON. What does not parse is kept as text rather than lost: a record is no place to fail.
Json embedded(const std::string& text) {
  if (text.empty()) return Json::object();
  Json json = Json::parse(text, nullptr, false);
  if (!json.is_discarded()) return json;
  const std::string valid_utf8 = Json::parse(dumped(Json(text), -1)).get<std::string>();
  json = Json::parse(valid_utf8, nullptr, false);
  return json.is_discarded() ? Json::object({{"unparsed", valid_utf8}}) : json;
}

Json device_state(const DeviceState& state) {
  Json json = {{"sm_clock_mhz", optional_number(state.sm_clock_mhz)},
               {"power_w", optional_number(state.power_w)},
               {"temperature_c", optional_number(state.temperature_c)},
               {"throttle", state.throttle ? Json(*state.throttle) : Json()},
               {"memory_used_bytes", state.memory_used_bytes ? Json(*state.memory_used_bytes) : Json()}};
  drop_absent(json);
  return json;
}

Json rank_list(const std::vector<RankRecord>& ranks) {
  Json json = Json::array();
  for (const RankRecord& rank : ranks) {
    json.push_back({{"rank", rank.rank},
                    {"local_rank", rank.local_rank},
                    {"host", rank.host},
                    {"device", rank.device},
                    {"device_uuid", rank.device_uuid},
                    {"threads", rank.threads}});
    Json gpu = Json::object();
    if (!rank.gpu_start.empty()) gpu["start"] = device_state(rank.gpu_start);
    if (!rank.gpu_end.empty()) gpu["end"] = device_state(rank.gpu_end);
    if (!gpu.empty()) json.back()["gpu"] = gpu;
  }
  return json;
}

Json resume_list(const std::vector<ResumeRecord>& resumes) {
  Json json = Json::array();
  for (const ResumeRecord& resume : resumes) {
    json.push_back({{"start_utc", resume.start_utc},
                    {"first_epoch", resume.first_epoch},
                    {"previous_status", resume.previous_status},
                    {"previous_config_hash", resume.previous_config_hash}});
  }
  return json;
}

/// null for engines whose weights are never stale.
Json staleness(const std::vector<StalenessRecord>& stages) {
  Json json;
  for (const StalenessRecord& stage : stages) {
    json.push_back({{"stage", stage.stage},
                    {"updates", stage.updates},
                    {"samples_per_update", number(stage.samples_per_update)},
                    {"updates_behind", stage.updates_behind},
                    {"versions", stage.versions},
                    {"weight_drift", number(stage.weight_drift)}});
  }
  return json;
}

Json host_list(const std::vector<RankRecord>& ranks) {
  std::set<std::string> hosts;
  for (const RankRecord& rank : ranks) hosts.insert(rank.host);
  return Json(hosts);
}

// ---- reading ----------------------------------------------------------------------------------------------------

Json parsed(const std::string& text) {
  try {
    return Json::parse(text);
  } catch (const Json::parse_error& error) {
    throw Error(str("no JSON: ", error.what()), ExitCode::data);
  }
}

void read_memory(const Fields& fields, EpochRecord& record) {
  const Fields peak = fields.section("memory_peak_bytes");
  const Fields predicted = fields.section("memory_predicted_bytes");
  for (int kind = 0; kind < kMemoryKinds; ++kind) {
    const std::string name(kMemoryKindNames[kind]);
    record.memory_peak_bytes[kind] = peak.spread(name);
    record.memory_predicted_bytes.bytes[kind] = predicted.integer(name);
  }
  record.memory_peak_total_bytes = peak.spread("total");
  record.device_memory_used_bytes = fields.integer("device_memory_used_bytes");
  if (fields.has("library_bytes")) record.library_bytes = fields.integer("library_bytes");
  if (fields.has("data_store_bytes")) record.data_store_bytes = fields.spread("data_store_bytes");
}

void read_staleness(const Fields& fields, EpochRecord& record) {
  if (!fields.has("staleness")) return;
  for (const Json& item : fields.list("staleness")) {
    const Fields stage(item, "staleness[]");
    StalenessRecord& one = record.staleness.emplace_back();
    one.stage = stage.small_integer("stage");
    one.updates = stage.integer("updates");
    one.samples_per_update = stage.real("samples_per_update");
    for (const Json& count : stage.list("updates_behind")) {
      if (!count.is_number_integer()) wrong("staleness[].updates_behind", "holds something other than counts");
      one.updates_behind.push_back(count.get<std::int64_t>());
    }
    one.versions = stage.small_integer("versions");
    one.weight_drift = stage.real("weight_drift");
  }
}

void read_comm(const Fields& fields, EpochRecord& record) {
  const Fields operations = fields.section("comm");
  for (const auto& item : fields.at("comm").items()) {
    const Fields one = operations.section(item.key());
    record.comm[item.key()] = {one.integer("calls"), one.integer("bytes"), one.real("busy_s"), one.real("exposed_s")};
  }
}

void read_times(const Fields& fields, EpochRecord& record) {
  record.epoch_s = fields.real("epoch_s");
  record.train_s = fields.spread("train_s");
  record.eval_s = fields.real("eval_s");
  record.data_s = fields.spread("data_s");
  record.forward_s = fields.spread("forward_s");
  record.backward_s = fields.spread("backward_s");
  record.comm_exposed_s = fields.spread("comm_exposed_s");
  record.optimizer_s = fields.spread("optimizer_s");
  record.bubble_fraction = fields.real("bubble_fraction");
  const Fields step = fields.section("step_ms");
  record.step_ms = {step.real("median"), step.real("p5"),  step.real("p95"),
                    step.real("p99"),    step.real("min"), step.real("max")};
  record.samples_per_s = fields.real("samples_per_s");
  record.tokens_per_s = fields.real("tokens_per_s");
  record.flops_per_s = fields.real("flops_per_s");
  if (fields.has("samples_per_s_median")) record.samples_per_s_median = fields.real("samples_per_s_median");
  if (fields.has("tokens_per_s_median")) record.tokens_per_s_median = fields.real("tokens_per_s_median");
  record.comm_exposed_step_ms = fields.optional_real("comm_exposed_step_ms");
  record.mfu = fields.optional_real("mfu");
  record.mfu_palm = fields.optional_real("mfu_palm");
  record.hfu = fields.optional_real("hfu");
  record.of_gemm = fields.optional_real("of_gemm");
  record.elapsed_s = fields.real("elapsed_s");
}

RunStatus status_named(const std::string& name) {
  for (const RunStatus status : {RunStatus::running, RunStatus::success, RunStatus::failed, RunStatus::diverged,
                                 RunStatus::interrupted, RunStatus::benchmark}) {
    if (name == name_of(status)) return status;
  }
  throw Error(str("unknown status \"", name, "\""), ExitCode::data);
}

void read_world(const Fields& world, RunRecord& run) {
  run.dp = world.small_integer("dp");
  run.tp = world.small_integer("tp");
  run.pp = world.small_integer("pp");
  run.ranks_per_device = world.small_integer("ranks_per_device");
  if (world.has("gpus")) run.gpus = world.small_integer("gpus");
  run.comm = world.text("comm");
  run.launcher = world.text("launcher");
}

DeviceState read_device_state(const Fields& fields) {
  DeviceState state;
  state.sm_clock_mhz = fields.optional_real("sm_clock_mhz");
  state.power_w = fields.optional_real("power_w");
  state.temperature_c = fields.optional_real("temperature_c");
  if (fields.has("throttle")) state.throttle = fields.text("throttle");
  if (fields.has("memory_used_bytes")) state.memory_used_bytes = fields.integer("memory_used_bytes");
  return state;
}

void read_ranks(const Fields& fields, RunRecord& run) {
  for (const Json& json : fields.list("ranks")) {
    const Fields rank(json, "ranks[]");
    RankRecord& read = run.ranks.emplace_back();
    read.rank = rank.small_integer("rank");
    read.local_rank = rank.small_integer("local_rank");
    read.host = rank.text("host");
    read.device = rank.text("device");
    read.device_uuid = rank.text("device_uuid");
    read.threads = rank.small_integer("threads");
    if (!rank.has("gpu")) continue;
    const Fields gpu = rank.section("gpu");
    if (gpu.has("start")) read.gpu_start = read_device_state(gpu.section("start"));
    if (gpu.has("end")) read.gpu_end = read_device_state(gpu.section("end"));
  }
}

void read_resumes(const Fields& fields, RunDocument& document) {
  for (const Json& json : fields.list("resumes")) {
    const Fields resume(json, "resumes[]");
    document.resumes.push_back({resume.text("start_utc"), resume.integer("first_epoch"), resume.text("previous_status"),
                                resume.text("previous_config_hash")});
  }
}

}  // namespace

std::string to_json_line(const EpochRecord& record) {
  const StepPercentiles& step = record.step_ms;
  Json json = {
      {"schema_version", kSchemaVersion},
      {"epoch", record.epoch},
      {"steps", record.steps},
      {"samples", record.samples},
      {"tokens", record.tokens},
      {"epoch_s", number(record.epoch_s)},
      {"train_s", seconds(record.train_s)},
      {"eval_s", number(record.eval_s)},
      {"data_s", seconds(record.data_s)},
      {"forward_s", seconds(record.forward_s)},
      {"backward_s", seconds(record.backward_s)},
      {"comm_exposed_s", seconds(record.comm_exposed_s)},
      {"optimizer_s", seconds(record.optimizer_s)},
      {"bubble_fraction", number(record.bubble_fraction)},
      {"step_ms",
       {{"median", number(step.median)},
        {"p5", number(step.p5)},
        {"p95", number(step.p95)},
        {"p99", number(step.p99)},
        {"min", number(step.min)},
        {"max", number(step.max)}}},
      {"comm_exposed_step_ms", optional_number(record.comm_exposed_step_ms)},
      {"samples_per_s", number(record.samples_per_s)},
      {"tokens_per_s", number(record.tokens_per_s)},
      {"samples_per_s_median", number(record.samples_per_s_median)},
      {"tokens_per_s_median", number(record.tokens_per_s_median)},
      {"flops_per_s", number(record.flops_per_s)},
      {"mfu", optional_number(record.mfu)},
      {"mfu_palm", optional_number(record.mfu_palm)},
      {"hfu", optional_number(record.hfu)},
      {"of_gemm", optional_number(record.of_gemm)},
      {"train_loss", number(record.train_loss)},
      {"val_loss", number(record.val_loss)},
      {"val_metric", {{"name", record.val_metric_name}, {"value", number(record.val_metric)}}},
      {"lr", number(record.lr)},
      {"loss_scale", number(record.loss_scale)},
      {"skipped_steps", record.skipped_steps},
      {"elapsed_s", number(record.elapsed_s)},
      {"memory_peak_bytes", memory_peak(record)},
      {"memory_predicted_bytes", memory_predicted(record.memory_predicted_bytes)},
      {"device_memory_used_bytes", record.device_memory_used_bytes},
      {"library_bytes", record.library_bytes},
      {"data_store_bytes", record.data_store_bytes ? bytes(*record.data_store_bytes) : Json()},
      {"staleness", staleness(record.staleness)},
      {"pipeline", record.pipeline ? pipeline_json(*record.pipeline) : Json()},
      {"comm", comm(record.comm)},
      {"extrapolated", record.extrapolated},
  };
  drop_absent(json);
  return dumped(json, -1);
}

EpochRecord epoch_from_json_line(const std::string& line) {
  const Json json = parsed(line);
  const Fields fields(json, "");
  fields.require_our_version();
  EpochRecord record;
  record.epoch = fields.integer("epoch");
  record.steps = fields.integer("steps");
  record.samples = fields.integer("samples");
  record.tokens = fields.integer("tokens");
  read_times(fields, record);
  record.train_loss = fields.real("train_loss");
  record.val_loss = fields.real("val_loss");
  record.val_metric_name = fields.section("val_metric").text("name");
  record.val_metric = fields.section("val_metric").real("value");
  record.lr = fields.real("lr");
  if (fields.has("loss_scale")) record.loss_scale = fields.real("loss_scale");
  if (fields.has("skipped_steps")) record.skipped_steps = fields.integer("skipped_steps");
  read_memory(fields, record);
  read_staleness(fields, record);
  if (fields.has("pipeline")) record.pipeline = read_pipeline(fields.section("pipeline"));
  read_comm(fields, record);
  record.extrapolated = fields.flag("extrapolated");
  return record;
}

std::string to_json(const RunDocument& document) {
  const RunRecord& run = document.run;
  Json json = {
      {"schema_version", kSchemaVersion},
      {"status", std::string(name_of(document.status))},
      {"reason", document.reason},
      {"name", run.name},
      {"engine", run.engine},
      {"model", run.model},
      {"backend", run.backend},
      {"dtype", run.dtype},
      {"flops_formula", run.flops_formula},
      {"palm_formula", run.palm_formula.empty() ? Json() : Json(run.palm_formula)},
      {"peak_flops_per_s", optional_number(run.peak_flops_per_s)},
      {"gemm_flops_per_s", optional_number(run.gemm_flops_per_s)},
      {"start_utc", run.start_utc},
      {"end_utc", document.end_utc},
      {"epochs_planned", run.epochs_planned},
      {"epochs_recorded", document.epochs_recorded},
      {"world",
       {{"ranks", run.ranks.size()},
        {"dp", run.dp},
        {"tp", run.tp},
        {"pp", run.pp},
        {"ranks_per_device", run.ranks_per_device},
        {"gpus", run.gpus},
        {"comm", run.comm},
        {"launcher", run.launcher}}},
      {"synthetic_data", run.synthetic_data},
      {"data", run.data},
      {"command", run.command},
      {"config_hash", run.config_hash},
      {"config", embedded(run.config_json)},
      {"engine_description", embedded(run.engine_description_json)},
      {"versions", run.versions},
      {"environment", run.environment},
      {"hosts", host_list(run.ranks)},
      {"ranks", rank_list(run.ranks)},
      {"resumes", resume_list(document.resumes)},
  };
  drop_absent(json);
  return dumped(json, 2) + "\n";
}

RunDocument run_from_json(const std::string& text) {
  const Json json = parsed(text);
  const Fields fields(json, "");
  fields.require_our_version();
  RunDocument document;
  document.status = status_named(fields.text("status"));
  document.reason = fields.text("reason");
  document.end_utc = fields.text("end_utc");
  document.epochs_recorded = fields.integer("epochs_recorded");
  read_resumes(fields, document);
  RunRecord& run = document.run;
  run.name = fields.text("name");
  run.engine = fields.text("engine");
  run.model = fields.text("model");
  run.backend = fields.text("backend");
  run.dtype = fields.text("dtype");
  if (fields.has("flops_formula")) run.flops_formula = fields.text("flops_formula");
  if (fields.has("palm_formula")) run.palm_formula = fields.text("palm_formula");
  run.peak_flops_per_s = fields.optional_real("peak_flops_per_s");
  run.gemm_flops_per_s = fields.optional_real("gemm_flops_per_s");
  run.start_utc = fields.text("start_utc");
  run.epochs_planned = fields.integer("epochs_planned");
  read_world(fields.section("world"), run);
  run.synthetic_data = fields.flag("synthetic_data");
  run.data = fields.texts("data");
  run.command = fields.text("command");
  run.config_hash = fields.text("config_hash");
  run.config_json = dumped(fields.at("config"), -1);
  run.engine_description_json = dumped(fields.at("engine_description"), -1);
  run.versions = fields.texts("versions");
  run.environment = fields.texts("environment");
  read_ranks(fields, run);
  return document;
}

std::string to_json(const DeviceState& state) { return dumped(device_state(state), -1); }

DeviceState device_state_from_json(const std::string& text) {
  const Json json = parsed(text);
  return read_device_state(Fields(json, "gpu"));
}

std::string json_text(const std::string& text) { return dumped(Json(text), -1); }

std::string json_number(double value) { return dumped(number(value), -1); }

}  // namespace pdl
