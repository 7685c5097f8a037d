#pragma once
// Records as JSON text and back. The one place that knows field names; results/schema/ describes them for others.
// NaN and infinities are the strings "nan", "inf", "-inf", since JSON has no numbers for them; text that is not UTF-8
// (a host name, a path) gets replacement characters, so that every file is valid JSON.

#include <cstdint>
#include <string>
#include <vector>

#include "engine/record/records.h"

namespace pdl {

/// One continuation of an interrupted run.
struct ResumeRecord {
  std::string start_utc;
  std::int64_t first_epoch = 0;      ///< the first one trained anew
  std::string previous_status;       ///< what run.json said before
  std::string previous_config_hash;  ///< differs from the run's when the configuration was changed
};

/// All of run.json.
struct RunDocument {
  RunRecord run;
  RunStatus status = RunStatus::running;
  std::string reason;   ///< empty for success
  std::string end_utc;  ///< empty while running
  std::int64_t epochs_recorded = 0;
  std::vector<ResumeRecord> resumes;
};

/// One line without its newline.
std::string to_json_line(const EpochRecord& record);
/// Throws Error(data) that names the first wrong or missing field, or a schema version other than ours.
EpochRecord epoch_from_json_line(const std::string& line);

/// Indented, with a newline at the end.
std::string to_json(const RunDocument& document);
/// Throws Error(data) as above.
RunDocument run_from_json(const std::string& text);

/// What the driver said, on one line; what it did not say is left out.
std::string to_json(const DeviceState& state);
/// Throws Error(data) as above.
DeviceState device_state_from_json(const std::string& text);

/// A JSON string with its quotes; a JSON number, or the quoted word for one that is not finite.
std::string json_text(const std::string& text);
std::string json_number(double value);

}  // namespace pdl
