#include "tests/support/catch_session.h"

#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

int run_catch_session(int argc, char** argv, bool stop_at_first_failure) {
  Catch::Session session;
  const int usage_error = session.applyCommandLine(argc, argv);
  if (usage_error != 0) return usage_error;
  if (stop_at_first_failure) session.configData().abortAfter = 1;
  return session.run();
}
