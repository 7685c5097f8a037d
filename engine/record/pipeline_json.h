#pragma once
// The field "pipeline" of a line of epochs.jsonl, to JSON and back.

#include "engine/record/json_fields.h"

namespace pdl {

Json pipeline_json(const PipelineRecord& record);
/// Throws Error(data) that names the first wrong or missing field.
PipelineRecord read_pipeline(const Fields& fields);

}  // namespace pdl
