#pragma once
// Dispatches a command and ends the program: one message, root cause first, and the exit code of engine/base/error.h on
// every rank.

#include "cli/args.h"

namespace pdl {

/// True on the rank that should print before MPI has started: rank 0 by the launcher's variables, or no launcher at
/// all.
bool is_first_by_environment();

/// Runs the command. Failures are printed by the first rank that fails and end all ranks with its code.
int run_program(const Args& args, int argc, char** argv);

}  // namespace pdl
