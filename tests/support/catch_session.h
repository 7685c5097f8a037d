#pragma once
// Catch2's own machinery, compiled once for all test binaries: with version 2 it is a header that takes long to
// compile.

/// Runs the tests that the command line selects and returns their exit code, 0 when all passed.
/// `stop_at_first_failure` ends the session at the first failed assertion.
int run_catch_session(int argc, char** argv, bool stop_at_first_failure);
