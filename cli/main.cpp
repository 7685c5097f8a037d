#include "cli/args.h"
#include "cli/program.h"

/// Parses, dispatches, and turns every failure into one message and one exit code (see program.h).
int main(int argc, char** argv) {
  const pdl::ParsedArgs parsed = pdl::parse_args(argc, argv, pdl::is_first_by_environment());
  if (parsed.end) return parsed.exit_code;
  return pdl::run_program(parsed.args, argc, argv);
}
