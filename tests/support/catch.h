#pragma once
// The one place that knows which Catch2 is installed: tests include this and write for version 3, which version 2 then
// understands as well. `main` comes from the build (version 2: one file with CATCH_CONFIG_MAIN; version 3: a library).

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#include <string>

namespace Catch::Matchers {
// Version 2 calls this Contains, a name that version 3 gives to ranges.
inline auto ContainsSubstring(const std::string& text) { return Contains(text); }
}  // namespace Catch::Matchers
#endif

// Write Approx(x), unqualified: version 2 has it in the global namespace and gives Catch::Approx to a matcher.
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using Catch::Matchers::StartsWith;
using Catch::Matchers::WithinAbs;
using Catch::Matchers::WithinRel;
