// The main of test binaries that run in one process.

#include "tests/support/catch_session.h"

int main(int argc, char** argv) { return run_catch_session(argc, argv, false); }
