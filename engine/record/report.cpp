#include "engine/record/report.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <set>
#include <sstream>

#include "engine/base/error.h"
#include "engine/record/json_lines.h"

namespace pdl {
namespace {

using Cells = std::vector<std::string>;

// ---- summing up one run -----------------------------------------------------------------------------------------

std::optional<double> median_over(const std::vector<EpochRecord>& epochs, double (*value)(const EpochRecord&)) {
  std::vector<double> values;
  for (const EpochRecord& epoch : epochs) values.push_back(value(epoch));
  const double median = percentiles(values).median;
  if (values.empty() || !(median > 0.0)) return std::nullopt;
  return median;
}

bool ranks_share_an_accelerator(const RunRecord& run) { return run.backend != "cpu" && run.ranks_per_device > 1; }

/// `mean` at the speed of the median step.
double at_median(const EpochRecord& epoch, double mean) {
  const bool known = epoch.samples_per_s_median > 0.0 && epoch.samples_per_s > 0.0;
  return known ? mean * epoch.samples_per_s_median / epoch.samples_per_s : mean;
}

/// How well the devices were used: of no meaning when ranks take turns on one.
void add_efficiency(const std::vector<EpochRecord>& epochs, ReportRow& row) {
  using Epoch = const EpochRecord&;
  row.mfu = median_over(epochs, [](Epoch epoch) { return at_median(epoch, epoch.mfu.value_or(0.0)); });
  row.mfu_palm = median_over(epochs, [](Epoch epoch) { return at_median(epoch, epoch.mfu_palm.value_or(0.0)); });
  row.hfu = median_over(epochs, [](Epoch epoch) { return at_median(epoch, epoch.hfu.value_or(0.0)); });
  row.of_gemm = median_over(epochs, [](Epoch epoch) { return at_median(epoch, epoch.of_gemm.value_or(0.0)); });
  double train_s = 0.0, exposed_s = 0.0, busy_s = 0.0;
  std::vector<double> shares;
  for (const EpochRecord& epoch : epochs) {
    train_s += epoch.train_s.mean;
    exposed_s += epoch.comm_exposed_s.mean;
    for (const auto& [operation, comm] : epoch.comm) busy_s += comm.busy_s;
    if (epoch.comm_exposed_step_ms && epoch.step_ms.median > 0.0) {
      shares.push_back(*epoch.comm_exposed_step_ms / epoch.step_ms.median);
    }
  }
  if (!shares.empty()) {
    row.comm_exposed_share = percentiles(shares).median;
  } else if (train_s > 0.0) {
    row.comm_exposed_share = exposed_s / train_s;
  }
  if (busy_s > 0.0) row.comm_overlap = std::max(0.0, 1.0 - exposed_s / busy_s);
}

void add_speed(const StoredRun& run, ReportRow& row) {
  const std::vector<EpochRecord>& epochs = run.epochs;
  row.step_ms = median_over(epochs, [](const EpochRecord& epoch) { return epoch.step_ms.median; });
  row.samples_per_s =
      median_over(epochs, [](const EpochRecord& epoch) { return at_median(epoch, epoch.samples_per_s); });
  row.tokens_per_s = median_over(epochs, [](const EpochRecord& epoch) { return at_median(epoch, epoch.tokens_per_s); });
  row.epoch_s = median_over(epochs, [](const EpochRecord& epoch) { return epoch.epoch_s; });
  for (const EpochRecord& epoch : epochs) row.extrapolated = row.extrapolated || epoch.extrapolated;
  if (ranks_share_an_accelerator(run.document.run)) return;
  add_efficiency(epochs, row);
  row.pipeline = summarize_pipeline(epochs);
}

void add_quality_and_memory(const std::vector<EpochRecord>& epochs, ReportRow& row) {
  if (epochs.empty()) return;
  row.val_metric_name = epochs.back().val_metric_name;
  if (!row.val_metric_name.empty()) row.val_metric = epochs.back().val_metric;
  double peak = 0.0;
  std::int64_t used = 0, library = 0;
  for (const EpochRecord& epoch : epochs) {
    peak = std::max(peak, epoch.memory_peak_total_bytes.max);
    used = std::max(used, epoch.device_memory_used_bytes);
    library = std::max(library, epoch.library_bytes);
  }
  if (peak > 0.0) row.memory_peak_bytes = peak;
  if (used > 0) row.device_memory_used_bytes = static_cast<double>(used);
  if (library > 0) row.library_bytes = static_cast<double>(library);
  const std::int64_t predicted = epochs.back().memory_predicted_bytes.total();
  if (predicted > 0) row.memory_predicted_bytes = static_cast<double>(predicted);
}

// ---- cells ------------------------------------------------------------------------------------------------------

/// `digits` significant digits, thousands whole: 0.0123, 12.3, 12345.
std::string rounded(double value, int digits = 4) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  const int before = value == 0.0 ? 1 : static_cast<int>(std::floor(std::log10(std::fabs(value)))) + 1;
  std::ostringstream out;
  out << std::fixed << std::setprecision(std::clamp(digits - before, 0, 6)) << value;
  return out.str();
}

std::string optional_cell(const std::optional<double>& value) { return value ? rounded(*value) : "-"; }

std::string memory_cell(const std::optional<double>& bytes) {
  return bytes ? format_bytes(static_cast<std::int64_t>(*bytes)) : "-";
}

std::string throughput_cell(const ReportRow& row) {
  if (row.tokens_per_s) return rounded(*row.tokens_per_s) + " tok/s";
  return row.samples_per_s ? rounded(*row.samples_per_s) + " smp/s" : "-";
}

std::string metric_cell(const ReportRow& row) {
  return row.val_metric ? str(row.val_metric_name, " ", rounded(*row.val_metric)) : "-";
}

std::string share_cell(const std::optional<double>& share) { return share ? rounded(*share * 100.0, 3) + "%" : "-"; }

const Cells kTableHeader = {"run",     "engine",     "model",       "ranks",     "dtype",       "comm", "epochs",
                            "status",  "step ms",    "speed",       "mfu",       "palm",        "hfu",  "of gemm",
                            "s/epoch", "validation", "peak memory", "predicted", "exposed comm"};
const std::set<std::string> kNumberColumns = {"ranks",   "epochs",      "step ms",   "speed",
                                              "mfu",     "palm",        "hfu",       "of gemm",
                                              "s/epoch", "peak memory", "predicted", "exposed comm"};
const std::set<std::string> kRareColumns = {"mfu", "palm", "hfu", "of gemm"};  // left out when no run has them

/// Parts of the ranks' time, and seconds of an epoch. steady, drain: waiting, as warm-up is.
const Cells kPipelineHeader = {"pipeline",       "forward", "backward", "recompute",   "warm-up",
                               "steady",         "drain",   "comm",     "update",      "idle",
                               "simulated idle", "theory",  "train s",  "simulated s", "planned s"};

/// The run's name, or its directory when several runs have the same name.
std::string run_cell(const Report& report, const ReportRow& row) {
  const auto namesakes = std::count_if(report.rows.begin(), report.rows.end(),
                                       [&row](const ReportRow& other) { return other.name == row.name; });
  return namesakes > 1 || row.name.empty() ? row.directory : row.name;
}

Cells table_cells(const Report& report, const ReportRow& row) {
  return {run_cell(report, row) + (row.synthetic_data ? "*" : "") + (row.ranks_per_device > 1 ? "!" : ""),
          row.engine,
          row.model,
          str(row.ranks),
          row.dtype,
          row.comm,
          str(row.epochs, "/", row.epochs_planned),
          row.status,
          optional_cell(row.step_ms),
          throughput_cell(row),
          share_cell(row.mfu),
          share_cell(row.mfu_palm),
          share_cell(row.hfu),
          share_cell(row.of_gemm),
          optional_cell(row.epoch_s) + (row.extrapolated && row.epoch_s ? "~" : ""),
          metric_cell(row),
          memory_cell(row.memory_peak_bytes),
          memory_cell(row.memory_predicted_bytes),
          share_cell(row.comm_exposed_share)};
}

/// Letters, not bytes: a name may hold any UTF-8.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string table_line(const Cells& cells, const Cells& header, const std::vector<std::size_t>& widths) {
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const std::string padding(widths[i] - width_of(cells[i]), ' ');
    const bool right = kNumberColumns.count(header[i]) > 0 || (i > 0 && header.front() == kPipelineHeader.front());
    line += (i == 0 ? "" : "  ") + (right ? padding + cells[i] : cells[i] + padding);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

/// Rare columns in which every line has a dash. The first line is the header.
void drop_empty_columns(std::vector<Cells>& lines) {
  for (std::size_t column = lines.front().size(); column-- > 0;) {
    const bool empty =
        std::all_of(lines.begin() + 1, lines.end(), [column](const Cells& l) { return l[column] == "-"; });
    if (!empty || kRareColumns.count(lines.front()[column]) == 0) continue;
    for (Cells& cells : lines) cells.erase(cells.begin() + static_cast<std::ptrdiff_t>(column));
  }
}

/// The first line is the header.
std::string aligned(std::vector<Cells> lines) {
  std::vector<std::size_t> widths(lines.front().size(), 0);
  for (const Cells& cells : lines) {
    for (std::size_t i = 0; i < cells.size(); ++i) widths[i] = std::max(widths[i], width_of(cells[i]));
  }
  Cells rule;
  for (const std::size_t width : widths) rule.push_back(std::string(width, '-'));
  lines.insert(lines.begin() + 1, rule);
  std::string text;
  for (const Cells& cells : lines) text += table_line(cells, lines.front(), widths);
  return text;
}

/// Where the ranks of pipelines spent their time; empty when no run has one.
std::string pipeline_table(const Report& report) {
  std::vector<Cells> lines = {kPipelineHeader};
  for (const ReportRow& row : report.rows) {
    if (!row.pipeline) continue;
    const PipelineSummary& sum = *row.pipeline;
    lines.push_back({run_cell(report, row)});
    for (const double share : {sum.forward, sum.backward, sum.recompute, sum.warm_up, sum.steady, sum.drain, sum.comm,
                               sum.update, sum.idle, sum.simulated_idle}) {
      lines.back().push_back(share_cell(share));
    }
    lines.back().push_back(share_cell(sum.closed_form_idle));
    for (const std::optional<double> seconds :
         {std::optional(sum.train_s), std::optional(sum.simulated_s), sum.planned_s}) {
      lines.back().push_back(optional_cell(seconds));
    }
  }
  return lines.size() > 1 ? "\n" + aligned(std::move(lines)) : "";
}

std::string format_table(const Report& report) {
  std::vector<Cells> lines = {kTableHeader};
  bool synthetic = false, extrapolated = false, shared = false;
  for (const ReportRow& row : report.rows) {
    lines.push_back(table_cells(report, row));
    synthetic = synthetic || row.synthetic_data;
    extrapolated = extrapolated || (row.extrapolated && row.epoch_s);
    shared = shared || row.ranks_per_device > 1;
  }
  drop_empty_columns(lines);
  std::string text = aligned(std::move(lines));
  for (const ReportRow& row : report.rows) {
    if (!row.reason.empty()) text += str(run_cell(report, row), ": ", row.reason, "\n");
  }
  if (synthetic) text += "* synthetic data\n";
  if (extrapolated) text += "~ extrapolated from part of an epoch\n";
  if (shared) text += "! ranks share a GPU: right, but no measure of speed; efficiency and overlap are withheld\n";
  text += pipeline_table(report);
  return text;
}

// ---- csv and json -----------------------------------------------------------------------------------------------

/// A field of the machine-readable formats: text is quoted, a number or a truth value is not, empty means absent.
struct Field {
  const char* name;
  std::string value;
  bool is_text = false;
};

Field number_field(const char* name, const std::optional<double>& value) {
  return {name, value ? json_number(*value) : ""};
}

std::optional<double> of_pipeline(const ReportRow& row, double PipelineSummary::*value) {
  return row.pipeline ? std::optional((*row.pipeline).*value) : std::nullopt;
}

std::vector<Field> fields_of(const ReportRow& row) {
  return {
      {"directory", row.directory, true},
      {"run", row.name, true},
      {"engine", row.engine, true},
      {"model", row.model, true},
      {"ranks", str(row.ranks)},
      {"dtype", row.dtype, true},
      {"comm", row.comm, true},
      {"ranks_per_device", str(row.ranks_per_device)},
      {"data", row.data, true},
      {"synthetic_data", row.synthetic_data ? "true" : "false"},
      {"epochs", str(row.epochs)},
      {"epochs_planned", str(row.epochs_planned)},
      {"status", row.status, true},
      {"reason", row.reason, true},
      number_field("step_ms", row.step_ms),
      number_field("samples_per_s", row.samples_per_s),
      number_field("tokens_per_s", row.tokens_per_s),
      number_field("mfu", row.mfu),
      number_field("mfu_palm", row.mfu_palm),
      number_field("hfu", row.hfu),
      number_field("of_gemm", row.of_gemm),
      number_field("epoch_s", row.epoch_s),
      {"extrapolated", row.extrapolated ? "true" : "false"},
      {"val_metric_name", row.val_metric_name, true},
      number_field("val_metric", row.val_metric),
      number_field("memory_peak_bytes", row.memory_peak_bytes),
      number_field("memory_predicted_bytes", row.memory_predicted_bytes),
      number_field("device_memory_used_bytes", row.device_memory_used_bytes),
      number_field("library_bytes", row.library_bytes),
      number_field("comm_exposed_share", row.comm_exposed_share),
      number_field("comm_overlap", row.comm_overlap),
      number_field("pipeline_idle_fraction", of_pipeline(row, &PipelineSummary::idle)),
      number_field("pipeline_useful_fraction", of_pipeline(row, &PipelineSummary::useful)),
      number_field("pipeline_simulated_idle_fraction", of_pipeline(row, &PipelineSummary::simulated_idle)),
      number_field("pipeline_closed_form_idle_fraction", row.pipeline ? row.pipeline->closed_form_idle : std::nullopt),
      number_field("pipeline_simulated_s", of_pipeline(row, &PipelineSummary::simulated_s)),
      number_field("pipeline_planned_s", row.pipeline ? row.pipeline->planned_s : std::nullopt)};
}

/// RFC 4180: quotes only where they are needed.
std::string csv_cell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::string format_csv(const Report& report) {
  std::string text;
  for (const Field& field : fields_of(ReportRow())) text += str(text.empty() ? "" : ",", field.name);
  text += "\n";
  for (const ReportRow& row : report.rows) {
    std::string line;
    for (const Field& field : fields_of(row)) {
      const bool is_word = !field.is_text && field.value.starts_with('"');  // "nan" needs no quotes here
      const std::string value = is_word ? field.value.substr(1, field.value.size() - 2) : field.value;
      line += csv_cell(value) + ",";
    }
    line.back() = '\n';
    text += line;
  }
  return text;
}

std::string format_json(const Report& report) {
  std::string text = "{\n  \"runs\": [";
  for (std::size_t i = 0; i < report.rows.size(); ++i) {
    std::string object;
    for (const Field& field : fields_of(report.rows[i])) {
      const std::string value = field.is_text ? json_text(field.value) : field.value.empty() ? "null" : field.value;
      object += str(object.empty() ? "" : ", ", "\"", field.name, "\": ", value);
    }
    text += str(i == 0 ? "" : ",", "\n    {", object, "}");
  }
  text += report.rows.empty() ? "],\n  \"warnings\": [" : "\n  ],\n  \"warnings\": [";
  for (std::size_t i = 0; i < report.warnings.size(); ++i) {
    text += str(i == 0 ? "" : ",", "\n    ", json_text(report.warnings[i]));
  }
  return text + (report.warnings.empty() ? "]\n}\n" : "\n  ]\n}\n");
}

}  // namespace

ReportRow summarize(const StoredRun& run) {
  const RunDocument& document = run.document;
  ReportRow row;
  row.directory = run.directory;
  row.name = document.run.name;
  row.engine = document.run.engine;
  row.model = document.run.model;
  row.ranks = static_cast<int>(document.run.ranks.size());
  row.dtype = document.run.dtype;
  row.comm = document.run.comm;
  row.ranks_per_device = document.run.ranks_per_device;
  if (const auto name = document.run.data.find("name"); name != document.run.data.end()) row.data = name->second;
  row.synthetic_data = document.run.synthetic_data;
  row.epochs = static_cast<std::int64_t>(run.epochs.size());
  row.epochs_planned = document.run.epochs_planned;
  row.status = name_of(document.status);
  row.reason = document.reason;
  if (document.status == RunStatus::success) {
    if (const std::vector<std::string> problems = check_run(run); problems.empty()) {
      add_speed(run, row);
    } else {
      row.status = "invalid";
      row.reason = problems.front();
      return row;
    }
  }
  if (document.status == RunStatus::benchmark) return row;  // its validation means nothing either
  add_quality_and_memory(run.epochs, row);
  return row;
}

Report make_report(const std::vector<std::string>& directories) {
  Report report;
  for (const std::string& directory : directories) {
    for (const std::string& found : find_runs(directory)) {
      try {
        const StoredRun run = read_run(found);
        report.rows.push_back(summarize(run));
        for (const std::string& warning : run.warnings) report.warnings.push_back(warning);
        if (run.document.status == RunStatus::running) {
          report.warnings.push_back(str(found, ": no result yet: the run is under way or was killed"));
        }
      } catch (const Error& error) {
        report.warnings.push_back(error.what());
      }
    }
  }
  return report;
}

std::string format_report(const Report& report, ReportFormat format) {
  switch (format) {
    case ReportFormat::table:
      return format_table(report);
    case ReportFormat::csv:
      return format_csv(report);
    case ReportFormat::json:
      return format_json(report);
  }
  return "";
}

ReportFormat report_format_named(const std::string& name) {
  if (name == "table") return ReportFormat::table;
  if (name == "csv") return ReportFormat::csv;
  if (name == "json") return ReportFormat::json;
  throw ConfigError(str("no report format \"", name, "\"; there are table, csv, json"));
}

}  // namespace pdl
