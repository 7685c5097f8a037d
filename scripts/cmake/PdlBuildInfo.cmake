# pdl_build_info.h: what this build is, for `--version` and for every record.
#
# Included by the project it defines two targets: pdl_build_info (the include folder) and pdl_build_info_refresh, which runs this
# same file as a script at every build. The header is rewritten only when its content changes, so nothing is relinked in vain.

if(NOT CMAKE_SCRIPT_MODE_FILE)
  string(TOUPPER "${CMAKE_BUILD_TYPE}" build_type)
  get_directory_property(options COMPILE_OPTIONS)
  string(REGEX REPLACE "\\$<\\$<COMPILE_LANGUAGE:CXX>:([^>]*)>" "\\1" options "${options}")
  string(REPLACE ";" " " flags "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${build_type}} ${options}")
  string(STRIP "${flags}" flags)
  string(REPLACE "\"" "'" flags "${flags}")
  set(header "${PROJECT_BINARY_DIR}/generated/pdl_build_info.h")
  find_package(Git QUIET)
  set(refresh ${CMAKE_COMMAND}
    "-DHEADER=${header}" "-DSOURCE=${PROJECT_SOURCE_DIR}" "-DGIT=${GIT_EXECUTABLE}" "-DVERSION=${PROJECT_VERSION}"
    "-DCOMPILER=${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}" "-DBUILD_TYPE=${CMAKE_BUILD_TYPE}" "-DFLAGS=${flags}"
    -P "${CMAKE_CURRENT_LIST_FILE}")
  execute_process(COMMAND ${refresh})  # so that editors and the architecture test find it before the first build
  add_custom_target(pdl_build_info_refresh COMMAND ${refresh} BYPRODUCTS "${header}" COMMENT "" VERBATIM)
  add_library(pdl_build_info INTERFACE)
  target_include_directories(pdl_build_info INTERFACE "${PROJECT_BINARY_DIR}/generated")
  return()
endif()

set(sha "unknown")
set(dirty "false")
if(GIT)
  execute_process(COMMAND "${GIT}" rev-parse --short=12 HEAD WORKING_DIRECTORY "${SOURCE}"
    RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT failed)
    set(sha "${output}")
  endif()
  execute_process(COMMAND "${GIT}" --no-optional-locks status --porcelain WORKING_DIRECTORY "${SOURCE}"
    RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT failed AND output)
    set(dirty "true")
  endif()
endif()
file(CONFIGURE OUTPUT "${HEADER}" @ONLY CONTENT [[
#pragma once
// Generated at build time.

namespace pdl {

inline constexpr const char* kVersion = "@VERSION@";
inline constexpr const char* kGitSha = "@sha@";
inline constexpr bool kGitDirty = @dirty@;
inline constexpr const char* kCompiler = "@COMPILER@";
inline constexpr const char* kBuildType = "@BUILD_TYPE@";
inline constexpr const char* kFlags = "@FLAGS@";

}  // namespace pdl
]])
