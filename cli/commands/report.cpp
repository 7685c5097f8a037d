// pdlbench report: the records of many runs as one table.

#include "engine/record/report.h"

#include <cstdio>

#include "cli/commands/commands.h"

namespace pdl {

int report_command(const Args& args) {
  const Report report = make_report(args.directories);
  std::printf("%s", format_report(report, report_format_named(args.format)).c_str());
  for (const std::string& warning : report.warnings) std::fprintf(stderr, "warning: %s\n", warning.c_str());
  return 0;
}

}  // namespace pdl
