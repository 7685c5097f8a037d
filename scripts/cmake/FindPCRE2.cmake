# PCRE2 for 8-bit code units. Defines PCRE2_FOUND, PCRE2_VERSION and the target PCRE2::PCRE2.

find_path(PCRE2_INCLUDE_DIR pcre2.h HINTS ENV CPATH)
find_library(PCRE2_LIBRARY pcre2-8)
mark_as_advanced(PCRE2_INCLUDE_DIR PCRE2_LIBRARY)

set(PCRE2_VERSION "")
if(PCRE2_INCLUDE_DIR)
  file(STRINGS "${PCRE2_INCLUDE_DIR}/pcre2.h" lines REGEX "^#define PCRE2_(MAJOR|MINOR) +[0-9]+")
  string(REGEX REPLACE "#define PCRE2_[A-Z]+ +" "" numbers "${lines}")
  list(JOIN numbers "." PCRE2_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(PCRE2 REQUIRED_VARS PCRE2_LIBRARY PCRE2_INCLUDE_DIR VERSION_VAR PCRE2_VERSION)

if(PCRE2_FOUND AND NOT TARGET PCRE2::PCRE2)
  add_library(PCRE2::PCRE2 UNKNOWN IMPORTED)
  set_target_properties(PCRE2::PCRE2 PROPERTIES
    IMPORTED_LOCATION "${PCRE2_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${PCRE2_INCLUDE_DIR}")
endif()
