#pragma once
// Many runs as one table. A run that did not succeed, or whose records are not sound, is shown with its status and
// without figures of speed: it never yields a number that somebody could quote.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/record/pipeline_summary.h"
#include "engine/record/stored_run.h"

namespace pdl {

/// One run. Absent values were not measured, do not apply, or are withheld.
struct ReportRow {
  std::string directory, name, engine, model;
  int ranks = 0;
  std::string dtype, comm, data;
  int ranks_per_device = 1;
  bool synthetic_data = false;
  std::int64_t epochs = 0, epochs_planned = 0;
  std::string status;  ///< as in run.json, or "invalid": says success, but its records are not sound
  std::string reason;
  std::optional<double> step_ms;  ///< median over epochs of their median steps
  /// Medians over epochs: throughput of the median step (of the mean one in older records), tokens only for text.
  std::optional<double> samples_per_s, tokens_per_s, epoch_s;
  /// Likewise of the median step, where known; withheld when ranks share an accelerator.
  std::optional<double> mfu, mfu_palm, hfu, of_gemm;
  bool extrapolated = false;  ///< epoch_s, in some epoch
  std::string val_metric_name;
  std::optional<double> val_metric;                                 ///< of the last epoch
  std::optional<double> memory_peak_bytes, memory_predicted_bytes;  ///< total of the fullest rank
  std::optional<double> device_memory_used_bytes, library_bytes;    ///< most of any epoch, of the fullest rank
  /// Exposed communication as a part of the median step (of training time in older records), and how much of
  /// communication was hidden, 1 - exposed / busy; withheld when ranks share an accelerator.
  std::optional<double> comm_exposed_share, comm_overlap;
  std::optional<PipelineSummary> pipeline;  ///< of a run with one; withheld likewise
};

struct Report {
  std::vector<ReportRow> rows;
  std::vector<std::string> warnings;
};

enum class ReportFormat { table, csv, json };

ReportRow summarize(const StoredRun& run);
/// All runs in and below the directories. Runs that cannot be read become warnings. Throws Error(data) when a directory
/// holds no run at all.
Report make_report(const std::vector<std::string>& directories);
/// Ends with a newline. Only json carries the warnings; print them beside the others.
std::string format_report(const Report& report, ReportFormat format);
/// "table", "csv" or "json"; throws ConfigError for another.
ReportFormat report_format_named(const std::string& name);

}  // namespace pdl
